"""Low-rank adapters (LoRA, arXiv 2106.09685): which tensors are trained, and which are published.

Adapted layers are peft's: `base_layer` is the frozen layer, `lora_A` and `lora_B` are the adapter.
They are recognised by these attributes, because importing peft takes seconds. Every function also
takes a model without adapters, whose weights are all trained and published as they are.

Of a model with adapters these alone are published (`adapter_tensors`), if engines merge them
(`mage_async/inference/base_weights.py`). Checkpoints have them in peft's format, and merged at the
last step. SGLang, and a run within one process, get merged weights (`merged_tensors`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from torch import nn

from mage_async.completion import SECOND_ROLE
from mage_async.inference.base_weights import added
from mage_async.inference.weights import DOWN, UP

ADAPTER = "default"
"""peft's name of a single adapter. A method with two roles (`mage_async/learning/roles.py`) names
its two adapters itself; the first in `lora_A` is that of role 0."""


class AdaptedLayer(Protocol):
    """A linear layer to which peft has added adapters, by the adapter's name."""

    weight: torch.Tensor
    lora_A: Mapping[str, nn.Linear]
    lora_B: Mapping[str, nn.Linear]
    scaling: Mapping[str, float]
    cast_input_dtype_enabled: bool
    disable_adapters: bool

    def enable_adapters(self, enabled: bool) -> None:
        """Switch the layer's adapters on or off."""

    def set_adapter(self, adapter_names: list[str]) -> None:
        """Choose the adapters that act and are trained."""


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLayer]:
    """Return the layers with an adapter by their name in the model."""
    return {
        name: cast("AdaptedLayer", layer)
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A")
    }


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has adapters, without a look at each layer: peft notes their rules."""
    return hasattr(model, "peft_config")


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the adapters; all tensors of a model without adapters."""
    is_whole = not adapted_layers(model)
    state = model.state_dict()
    return {name: tensor for name, tensor in state.items() if is_whole or _is_adapter(name)}


def base_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors without adapters, by the names of a model without adapters."""
    state = model.state_dict()
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in state.items()
        if not _is_adapter(name)
    }


def second_role_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the base tensors that the second role's adapter changes, by their published names.

    Merged, a policy with two roles has two of each: the first role's under the usual name, and the
    second role's under this one. A model without roles has none.
    """
    layers, base = adapted_layers(model), base_tensors(model)
    adapted = [f"{name}.weight" for name, layer in layers.items() if len(layer.lora_A) == 2]
    return {f"{SECOND_ROLE}{name}": base[name] for name in adapted}


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the matrices of all adapters by their published names."""
    return {
        # The prefix stands before names of role 1, and not (`SECOND_ROLE * 0`) of role 0.
        f"{SECOND_ROLE * role}{name}{ending}": part[adapter].weight.detach()
        for name, layer in adapted_layers(model).items()
        for role, adapter in enumerate(layer.lora_A)
        for ending, part in ((DOWN, layer.lora_A), (UP, layer.lora_B))
    }


@torch.no_grad()
def merged_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Merge the adapters into the weights: yield `W + alpha / rank * B A` for every adapted weight.

    Tensors are computed one at a time, in float32, and cast once. They come in the order of
    `base_tensors`, for a policy with roles with the first role's adapter; those of
    `second_role_tensors` follow.
    """
    layers = adapted_layers(model)
    for name, tensor in base_tensors(model).items():
        layer = layers.get(name.removesuffix(".weight"))
        yield name, tensor if layer is None else merge(layer, tensor, 0)
    for name, tensor in second_role_tensors(model).items():
        layer = layers[name.removeprefix(SECOND_ROLE).removesuffix(".weight")]
        yield name, merge(layer, tensor, 1)


@torch.no_grad()
def merged_rows(
    tensors: dict[str, torch.Tensor],
    layers: dict[str, AdaptedLayer],
    row_of: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Compute one row of each of `merged_tensors`, from that row of the base tensor alone.

    A comparison with the published tensors shows whether merging has left something out.

    Args:
        tensors: the base tensors, by their published names.
        layers: result of `adapted_layers`.
        row_of: selects the row of a tensor; it may depend on the number of rows only.
    """
    rows = {name: row_of(tensor) for name, tensor in tensors.items()}
    for name, layer in layers.items():
        row = rows[f"{name}.weight"]
        rows[f"{name}.weight"] = merge(layer, row, 0, row_of)
        if len(layer.lora_A) == 2:
            rows[f"{SECOND_ROLE}{name}.weight"] = merge(layer, row, 1, row_of)
    return rows


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch all adapters off inside the `with` block."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def has_wide_adapters(model: nn.Module) -> bool:
    """Return whether a model of 16 bits has adapters in float32.

    The forward then runs under autocast, which rounds the adapters to 16 bits, so that their
    products have the type of all others: `add_adapters` stops peft from casting the layers' inputs
    to float32.
    """
    return bool(model.dtype.itemsize == 2) and any(
        each.weight.itemsize == 4
        for layer in adapted_layers(model).values()
        for each in layer.lora_A.values()
    )


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def merge(
    layer: AdaptedLayer,
    weight: torch.Tensor,
    role: int,
    part_of: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole,
) -> torch.Tensor:
    """Merge the adapter of a role, or the only one, into a weight.

    Args:
        part_of: selects the rows that `weight` consists of.
    """
    name = list(layer.lora_A)[role]
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    return added(weight, down, part_of(up), layer.scaling[name])
