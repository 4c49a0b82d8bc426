"""Low-rank adapters on a frozen policy, by peft: added, saved as peft saves them, loaded.

`mage_async/learning/adapters.py` says what is trained and published of such a model.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from mage_async.config.schema import Config
from mage_async.config.sections.policy import Lora
from mage_async.errors import PolicyError
from mage_async.learning.adapters import ADAPTER, adapted_layers, trained_tensors
from mage_async.policy.headers import check_targets
from mage_async.policy.load import load_policy

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft writes before the name of every tensor."""


def load_trained(
    config: Config, policy: Path, checkpoint: Path | None = None, *, device: str
) -> PreTrainedModel:
    """The policy as the learner trains it: whole, or frozen under adapters.

    Args:
        policy: the model directory that the run began from.
        checkpoint: whose weights, or adapters, are taken instead of the first ones.

    Raises:
        PolicyError: the model cannot be trained, or has no layers or adapters as configured.
    """
    rules, dtype = config.policy.lora, config.policy.dtype
    if rules is None:
        return load_policy(checkpoint or policy, dtype, device)
    model = load_policy(policy, dtype, device)
    add_adapters(model, rules, config.seed)
    if checkpoint:
        load_adapters(model, checkpoint)
    return model


def add_adapters(model: PreTrainedModel, rules: Lora, seed: int) -> None:
    """Freeze a model, in place, under adapters that change nothing yet.

    Adapters of a model in 16 bits are float32: their updates would vanish otherwise.
    """
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds

    check_targets(model.config.model_type, rules.targets, linear_layers(model))
    shape = LoraConfig(
        r=rules.rank,
        lora_alpha=rules.alpha,
        target_modules=rules.targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    torch.manual_seed(seed)
    inject_adapter_in_model(shape, model, ADAPTER)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
    for layer in adapted_layers(model).values():
        layer.cast_input_dtype_enabled = False  # products are of the model's type


def linear_layers(model: PreTrainedModel) -> set[str]:
    """Names of the linear layers of a model, on any device, that take an adapter."""
    head = model.get_output_embeddings()
    return {
        name.rpartition(".")[2]
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head
    }


def save_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapters as peft reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    model.peft_config[ADAPTER].save_pretrained(folder)
    tensors = {_saved_name(name): one.cpu() for name, one in trained_tensors(model).items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def load_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Give a model, in place, the adapters that were saved.

    Raises:
        PolicyError: they are of other layers or of another rank.
    """
    if not holds_adapters(folder):
        raise PolicyError(f"{folder}: was trained without policy.lora: leave that section out")
    found = load_file(folder / WEIGHTS)
    own = {_saved_name(name): tensor for name, tensor in trained_tensors(model).items()}
    if {name: one.shape for name, one in found.items()} != {n: o.shape for n, o in own.items()}:
        raise PolicyError(
            f"{folder}: its adapters are of other layers, or of another rank, than policy.lora "
            "says: set its rank and targets to those of adapter_config.json"
        )
    for name, tensor in own.items():
        tensor.copy_(found[name])


def holds_adapters(folder: Path) -> bool:
    """Whether a checkpoint is of adapters, not of a whole model."""
    return (folder / WEIGHTS).is_file()


def _saved_name(name: str) -> str:
    return PREFIX + name.replace(f".{ADAPTER}.", ".")
