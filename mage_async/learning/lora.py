"""Low-rank adapters (LoRA, arXiv 2106.09685): add them to a frozen model with peft, train them,
publish them or merge them into whole weights, save them as peft does, load them.

Which layers get an adapter is a key of the configuration (`Lora.targets` in
`mage_async/config/schema.py`). Adapted layers are peft's: `base_layer` is the frozen layer,
`lora_A` and `lora_B` are the adapter. A layer is recognised by these attributes, because importing
peft takes seconds. Functions that train or publish also take a model without adapters, whose
weights are all trained, and published as they are.

The adapters alone (`adapter_tensors`) are published for engines that merge them into their own copy
of the frozen weights (`mage_async/inference/merged_adapters.py`). Merged weights (`merged_tensors`)
are published for SGLang, and in a run within one process. A checkpoint holds the adapters in peft's
format; that of the last step holds the merged model too.

A policy of two roles has an adapter of each (`route`). Both take part in every forward, but each
acts on the tokens of its own role only: the output of its down-projection is multiplied by 1 or 0
for each token. A token reads the keys and values of all earlier tokens, whichever adapter computed
them, so the KV cache of a context stays valid when the role changes. The second role's tokens
attend to tokens of the first role, so their loss also has a gradient with respect to the first
role's adapter. `backward` leaves that part out: each adapter gets the gradient of its own tokens
only, so no loss of one role changes the other.

Shapes: `T` tokens of a row, `N` sampled tokens, `D` hidden.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mage_async.completion import SECOND_ROLE
from mage_async.config.schema import Config, Embedded, Lora
from mage_async.errors import PolicyError
from mage_async.inference.merged_adapters import with_adapter
from mage_async.inference.weights import DOWN, UP
from mage_async.policy.model_files import check_targets

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # takes seconds

ADAPTER = "default"
"""peft's name of a single adapter. A method with two roles names its two adapters itself; the first
in `lora_A` is that of role 0."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""Name of the file of adapters in a checkpoint."""
PREFIX = "base_model.model."
"""Prefix that peft puts before the name of every tensor."""


class AdaptedLayer(Protocol):
    """Declare the attributes that are used of a linear layer to which peft has added adapters; the
    keys of its mappings are the adapters' names.

    Shapes: weight `W` [O, I], down-projection `A` [R, I], up-projection `B` [O, R].
    """

    weight: torch.Tensor
    """`W`, which is frozen."""
    lora_A: Mapping[str, nn.Linear]
    lora_B: Mapping[str, nn.Linear]
    scaling: Mapping[str, float]
    """alpha / rank: the layer computes `W + scaling B A`."""
    cast_input_dtype_enabled: bool
    disable_adapters: bool

    def enable_adapters(self, enabled: bool) -> None:
        """Switch the layer's adapters on or off."""

    def set_adapter(self, adapter_names: list[str]) -> None:
        """Choose the adapters that act and are trained."""


def add_adapters(
    model: "PreTrainedModel", lora: Lora, seed: int, *, roles: tuple[str, str] | None = None
) -> None:
    """Freeze a model, in place, under adapters whose initial output is zero.

    Adapters of a 16-bit model are float32: in 16 bits, small updates would round to nothing.

    Args:
        roles: Names of two adapters, if a method gives the policy two roles, such as a planner and
            an executor; None for one adapter.
    """
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds

    check_targets(model.config.model_type, lora.targets, linear_layers(model))
    shape = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft divides it by `r`
        target_modules=lora.targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    torch.manual_seed(seed)
    names = roles or (ADAPTER,)
    # peft warns when a second adapter is added to the same layers.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        for name in names:
            inject_adapter_in_model(shape, model, name)
    if roles:
        route(model)  # each adapter acts on the tokens of its role only
    for layer in adapted_layers(model).values():
        layer.set_adapter([*names])  # all of them are trained
        layer.cast_input_dtype_enabled = False  # products stay in the model's type
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))


def linear_layers(model: "PreTrainedModel") -> set[str]:
    """Return the names of a model's linear layers that can take an adapter."""
    head = model.get_output_embeddings()
    return {
        name.rpartition(".")[2]
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head
    }


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLayer]:
    """Return the layers with an adapter by their name in the model."""
    return {
        name: cast("AdaptedLayer", layer)
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A")
    }


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has adapters: peft leaves their configuration on the model, so this
    costs less than a search of all layers.
    """
    return hasattr(model, "peft_config")


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the adapters; all tensors of a model without adapters."""
    trains_all, state = not adapted_layers(model), model.state_dict()
    return {name: tensor for name, tensor in state.items() if trains_all or _is_adapter(name)}


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

    After merging, a policy with two roles has two versions of each adapted tensor: the first role's
    under its usual name, the second role's under that name with the prefix `SECOND_ROLE`. A model
    without roles has no second version, and the result is empty.
    """
    layers, base = adapted_layers(model), base_tensors(model)
    adapted = [f"{name}.weight" for name, layer in layers.items() if len(layer.lora_A) == 2]
    return {f"{SECOND_ROLE}{name}": base[name] for name in adapted}


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the matrices of all adapters by their published names."""
    return {
        # `SECOND_ROLE * role` is the prefix for role 1, and an empty string for role 0.
        f"{SECOND_ROLE * role}{name}{ending}": part[adapter].weight.detach()
        for name, layer in adapted_layers(model).items()
        for role, adapter in enumerate(layer.lora_A)
        for ending, part in ((DOWN, layer.lora_A), (UP, layer.lora_B))
    }


def publishes_adapters(config: Config) -> bool:
    """Return whether the learner publishes the adapters alone, which its engines merge.

    SGLang gets merged weights: its interface replaces whole tensors, and adapters that it loads by
    itself cost an extra product for every token.
    """
    return config.policy.lora is not None and isinstance(config.engine, Embedded)


@torch.no_grad()
def merged_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Merge the adapters into the weights: yield `W + alpha / rank * B A` for every adapted weight.

    Tensors are computed one at a time, in float32, and cast once. They come in the order of
    `base_tensors`. For a policy with two roles these have the first role's adapter, and the tensors
    of `second_role_tensors` follow, with the second role's.
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

    A published tensor that differs in this row was not merged, or was merged with other weights.

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


def has_float32_adapters(model: nn.Module) -> bool:
    """Return whether a model of 16 bits has adapters in float32.

    The forward then runs under autocast, which rounds the adapters to 16 bits, so that all products
    have the model's type. For this, `add_adapters` keeps peft from casting the inputs of adapted
    layers to float32.
    """
    return bool(model.dtype.itemsize == 2) and any(
        each.weight.itemsize == 4
        for layer in adapted_layers(model).values()
        for each in layer.lora_A.values()
    )


def _is_adapter(name: str) -> bool:
    """Return whether the name of a tensor is that of an adapter's matrix."""
    return ".lora_A." in name or ".lora_B." in name


def merge(
    layer: AdaptedLayer,
    weight: torch.Tensor,
    role: int,
    part_of: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole,
) -> torch.Tensor:
    """Merge the adapter of a role, or the only one, into a weight.

    Args:
        part_of: selects from the up-projection the rows that `weight` holds; default: all.
    """
    name = list(layer.lora_A)[role]
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    return with_adapter(weight, down, part_of(up), layer.scaling[name])


@dataclass(slots=True)
class Routing:
    """Hold the role of each token in the model's latest forward, and set values of the other role's
    tokens to 0.
    """

    is_second_role: torch.Tensor | None = None
    """bool [T]: True for tokens of the second role; None: all tokens are the first role's."""

    def masked(self, role: int, values: torch.Tensor) -> torch.Tensor:
        """Set the values of the other role's tokens to 0: [..., T, any]."""
        if self.is_second_role is None:
            return values if role == 0 else torch.zeros_like(values)
        is_role = self.is_second_role if role == 1 else ~self.is_second_role
        return values * is_role[:, None].to(values.dtype)


def route(model: nn.Module) -> None:
    """Make each of the model's two adapters act on the tokens of its role only, in place."""
    routing = Routing()
    model.routing = routing  # type: ignore[assignment]  # torch declares tensors and modules only

    def mask_output(role: int, layer: nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
        """Set the output of a down-projection to 0 at the other role's tokens."""
        return routing.masked(role, out)

    for layer in adapted_layers(model).values():
        for role, down in enumerate(layer.lora_A.values()):
            down.register_forward_hook(partial(mask_output, role))


def has_roles(model: nn.Module) -> bool:
    """Return whether the model has one adapter for each of two roles."""
    return isinstance(getattr(model, "routing", None), Routing)


def give_roles(model: nn.Module, is_second_role: torch.Tensor | None) -> None:
    """Set the roles of the next forward's tokens; a model without roles is left alone.

    The roles stay set for activation checkpointing, which repeats the forward in the backward pass.

    Args:
        is_second_role: bool [T]; None: all tokens are the first role's.
    """
    routing = getattr(model, "routing", None)
    if isinstance(routing, Routing):
        routing.is_second_role = is_second_role


def backward(
    model: nn.Module, loss: torch.Tensor, hidden: torch.Tensor, is_second_role: torch.Tensor | None
) -> None:
    """Run the backward pass; with roles, give each adapter the gradient of its own tokens only.

    Args:
        hidden: [N, D], from the model's latest forward; with roles, the loss must depend on the
            adapters through it alone.
        is_second_role: bool [N]; None: all tokens are the first role's.
    """
    if not has_roles(model):
        loss.backward()
        return
    (gradient,) = torch.autograd.grad(loss, hidden)
    routing = Routing(is_second_role)
    # A role without a token gets no gradient, not one of zeros, so that the optimizer leaves its
    # adapter as it is.
    roles = _present_roles(is_second_role)
    for role in roles:
        role_gradient, weights = routing.masked(role, gradient), _adapter(model, role)
        # The pass of the last role frees the graph.
        is_last = role == roles[-1]
        torch.autograd.backward(hidden, role_gradient, inputs=weights, retain_graph=not is_last)


def _present_roles(is_second_role: torch.Tensor | None) -> list[int]:
    """Return the roles that have a token: 0, 1, or both."""
    if is_second_role is None:
        return [0]
    return [role for role in (0, 1) if bool((is_second_role == bool(role)).any())]


def _adapter(model: nn.Module, role: int) -> list[torch.Tensor]:
    """Return the weights of a role's adapter in all layers."""
    layers = adapted_layers(model).values()
    return [
        list(part.values())[role].weight
        for layer in layers
        for part in (layer.lora_A, layer.lora_B)
    ]


# The functions below write adapters to files in peft's format, and read them.


def save_adapters(model: "PreTrainedModel", folder: Path) -> None:
    """Write the adapters in peft's format. With two roles, each role's adapter gets a folder with
    the name of the role.
    """
    for adapter, lora in model.peft_config.items():
        own_folder = _folder_of(adapter, folder)
        own_folder.mkdir(parents=True, exist_ok=True)
        lora.save_pretrained(own_folder)
        tensors = {name: one.cpu() for name, one in _saved_tensors(model, adapter).items()}
        save_file(tensors, own_folder / ADAPTER_WEIGHTS, {"format": "pt"})


def load_adapters(model: "PreTrainedModel", folder: Path) -> None:
    """Load saved adapters into a model, in place.

    Raises:
        PolicyError: the folder has no adapters, lacks the adapter of a role, or has adapters of
            other layers or of another rank.
    """
    if not holds_adapters(folder):
        raise PolicyError(f"{folder} was trained without policy.lora: leave that section out")
    for adapter in model.peft_config:
        own_folder = _folder_of(adapter, folder)
        if not (own_folder / ADAPTER_WEIGHTS).is_file():
            raise PolicyError(
                f"{own_folder}: holds no adapter {adapter!r}: turn on the methods that it was "
                "trained with, and no others that change the roles of the policy"
            )
        saved, present = load_file(own_folder / ADAPTER_WEIGHTS), _saved_tensors(model, adapter)
        shapes = [{name: one.shape for name, one in each.items()} for each in (saved, present)]
        if shapes[0] != shapes[1]:
            raise PolicyError(
                f"{own_folder}: its adapters are of other layers, or of another rank, than "
                "policy.lora says: set its rank and targets to those of adapter_config.json"
            )
        for name, tensor in present.items():
            tensor.copy_(saved[name])


def holds_adapters(folder: Path) -> bool:
    """Return whether a checkpoint holds adapters instead of a whole model."""
    return any(folder.glob(ADAPTER_WEIGHTS)) or any(folder.glob(f"*/{ADAPTER_WEIGHTS}"))


def _folder_of(adapter: str, folder: Path) -> Path:
    """Return the folder in which an adapter is saved."""
    return folder if adapter == ADAPTER else folder / adapter


def _saved_tensors(model: "PreTrainedModel", adapter: str) -> dict[str, torch.Tensor]:
    """Return the tensors of one adapter by the names that peft saves them under."""
    return {
        PREFIX + name.replace(f".{adapter}.", "."): tensor
        for name, tensor in trained_tensors(model).items()
        if f".{adapter}." in name
    }
