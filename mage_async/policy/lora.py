"""Put low-rank adapters on a frozen policy: add them with peft, save them as peft does, load them.

Which layers get an adapter is a key of the configuration (`Lora.targets` in
`mage_async/config/schema.py`). `mage_async/learning/adapters.py` says which tensors of such a model
are trained and published, and merges adapters into whole weights.
"""

import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from mage_async.config.schema import Config, Embedded, Lora
from mage_async.errors import PolicyError
from mage_async.learning.adapters import ADAPTER, adapted_layers, route, trained_tensors
from mage_async.methods.method import Methods
from mage_async.policy.load import load_policy
from mage_async.policy.model_files import check_targets

WEIGHTS = "adapter_model.safetensors"
"""Name of the file of adapters in a checkpoint."""
PREFIX = "base_model.model."
"""Prefix that peft puts before the name of every tensor."""


def load_trained(
    config: Config, policy: Path, checkpoint: Path | None = None, *, device: str
) -> PreTrainedModel:
    """Load the policy as the learner trains it: all weights, or frozen under adapters.

    Args:
        policy: Model directory that the run began from.
        checkpoint: Checkpoint whose weights or adapters replace the initial ones.

    Raises:
        PolicyError: the model cannot be trained, or lacks the configured layers or adapters.
    """
    lora, dtype = config.policy.lora, config.policy.dtype
    if lora is None:
        return load_policy(checkpoint or policy, dtype, device)
    model = load_policy(policy, dtype, device)
    add_adapters(model, lora, config.seed, roles=Methods(config).roles())
    if checkpoint:
        load_adapters(model, checkpoint)
    return model


def add_adapters(
    model: PreTrainedModel, lora: Lora, seed: int, *, roles: tuple[str, str] | None = None
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


def linear_layers(model: PreTrainedModel) -> set[str]:
    """Return the names of a model's linear layers that can take an adapter."""
    head = model.get_output_embeddings()
    return {
        name.rpartition(".")[2]
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head
    }


def publishes_adapters(config: Config) -> bool:
    """Return whether the learner publishes the adapters alone, which its engines merge.

    SGLang gets merged weights: its interface replaces whole tensors, and adapters that it loads by
    itself cost an extra product for every token.
    """
    return config.policy.lora is not None and isinstance(config.engine, Embedded)


def save_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapters in peft's format. With two roles, each role's adapter gets a folder with
    the name of the role.
    """
    for adapter, lora in model.peft_config.items():
        own_folder = _folder_of(adapter, folder)
        own_folder.mkdir(parents=True, exist_ok=True)
        lora.save_pretrained(own_folder)
        tensors = {name: one.cpu() for name, one in _saved_tensors(model, adapter).items()}
        save_file(tensors, own_folder / WEIGHTS, {"format": "pt"})


def load_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Load saved adapters into a model, in place.

    Raises:
        PolicyError: the folder has no adapters, lacks the adapter of a role, or has adapters of
            other layers or of another rank.
    """
    if not holds_adapters(folder):
        raise PolicyError(f"{folder} was trained without policy.lora: leave that section out")
    for adapter in model.peft_config:
        own_folder = _folder_of(adapter, folder)
        if not (own_folder / WEIGHTS).is_file():
            raise PolicyError(
                f"{own_folder}: holds no adapter {adapter!r}: turn on the methods that it was "
                "trained with, and no others that change the roles of the policy"
            )
        saved, present = load_file(own_folder / WEIGHTS), _saved_tensors(model, adapter)
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
    return any(folder.glob(WEIGHTS)) or any(folder.glob(f"*/{WEIGHTS}"))


def _folder_of(adapter: str, folder: Path) -> Path:
    """Return the folder in which an adapter is saved."""
    return folder if adapter == ADAPTER else folder / adapter


def _saved_tensors(model: PreTrainedModel, adapter: str) -> dict[str, torch.Tensor]:
    """Return the tensors of one adapter by the names that peft saves them under."""
    return {
        PREFIX + name.replace(f".{adapter}.", "."): tensor
        for name, tensor in trained_tensors(model).items()
        if f".{adapter}." in name
    }
