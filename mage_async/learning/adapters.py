"""A model with low-rank adapters, as the learner sees it: what is trained, and what is published.

Adapted layers are peft's: `base_layer` is the frozen one, `lora_A` and `lora_B` are the adapter.
They are known by these names, for to import peft takes seconds. Every function takes a model
without adapters too, of which all weights are trained and published as they are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mage_async.completion import EXPLOITER

ADAPTER = "default"
"""peft's name of the only adapter."""
EXPLORE, EXPLOIT = ROLES = ("explore", "exploit")
"""The names of two, where a policy has two roles (`mage_async/learning/roles.py`)."""


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers with an adapter, by their name in the model."""
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The adapters' tensors; all of a model without adapters."""
    is_whole = not adapted_layers(model)
    state = model.state_dict()
    return {name: tensor for name, tensor in state.items() if is_whole or _is_adapter(name)}


def base_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the model below its adapters, under the names of a model without."""
    state = model.state_dict()
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in state.items()
        if not _is_adapter(name)
    }


def exploiters_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of a model with two roles, tensors below its adapters of which the exploiter has one of its
    own when they are merged, by the name under which that is published.
    """
    layers, base = adapted_layers(model), base_tensors(model)
    own = [f"{name}.weight" for name, layer in layers.items() if EXPLOIT in layer.lora_A]
    return {f"{EXPLOITER}{name}": base[name] for name in own}


@torch.no_grad()
def merged_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The model as one that needs no adapters: `W + alpha / rank * B A` for every adapted weight,
    computed in float32 and cast once, one at a time. In the order of `base_tensors`; where there
    are two roles it is the explorer's, and what the exploiter has for itself comes behind.
    """
    layers = adapted_layers(model)
    for name, tensor in base_tensors(model).items():
        layer = layers.get(name.removesuffix(".weight"))
        yield name, tensor if layer is None else _merged(layer, tensor, EXPLORE)
    for name, tensor in exploiters_tensors(model).items():
        layer = layers[name.removeprefix(EXPLOITER).removesuffix(".weight")]
        yield name, _merged(layer, tensor, EXPLOIT)


@torch.no_grad()
def merged_rows(
    tensors: dict[str, torch.Tensor],
    layers: dict[str, nn.Module],
    row_of: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """A row of each of `merged_tensors`, made of that row alone: what merging has left out is seen
    by a comparison of both.

    Args:
        tensors: below the adapters, by the names under which they are published.
        layers: of `adapted_layers`.
        row_of: chooses the row, by the number of rows.
    """
    rows = {name: row_of(tensor) for name, tensor in tensors.items()}
    for name, layer in layers.items():
        row = rows[f"{name}.weight"]
        rows[f"{name}.weight"] = _merged(layer, row, EXPLORE, row_of)
        if EXPLOIT in layer.lora_A:
            rows[f"{EXPLOITER}{name}.weight"] = _merged(layer, row, EXPLOIT, row_of)
    return rows


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model computes as it did before adapters were added."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def has_wide_adapters(model: nn.Module) -> bool:
    """Whether float32 adapters stand beside weights of 16 bits.

    Their products are then to be of 16 bits too, as every other of the model: `add_adapters` lets
    peft leave the layers' input as it is, and the forward computes under autocast, which rounds the
    small matrices instead.
    """
    return model.dtype.itemsize == 2 and any(
        each.weight.itemsize == 4
        for layer in adapted_layers(model).values()
        for each in layer.lora_A.values()
    )


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _merged(
    layer: nn.Module,
    weight: torch.Tensor,
    role: str,
    part_of: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole,
) -> torch.Tensor:
    """With the adapter of a role, or with the only one; or the part of a weight that is given, with
    the same part of the adapter.
    """
    name = role if role in layer.lora_A else ADAPTER
    wide = torch.promote_types(weight.dtype, torch.float32)
    down, up = (each[name].weight.to(wide) for each in (layer.lora_A, layer.lora_B))
    return (weight.to(wide) + layer.scaling[name] * (part_of(up) @ down)).to(weight.dtype)
