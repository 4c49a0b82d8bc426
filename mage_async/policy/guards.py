"""Refusal of models that packed training would compute wrongly, before any weight is read.

Packed training runs a model's layers with an attention of its own, and multiplies the last hidden
states by the weight of the LM head. A model with further operations in its attention or after its
LM head would run without an error, but its log-probs would not be those that an engine samples
with.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from mage_async.errors import PolicyError
from mage_async.policy.headers import check_head

TRAINABLE = ("gemma", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
"""Values of `model_type` whose packed forward is tested against transformers' own."""
OFF = (None, False, 0, 0.0, 1.0)
"""Values of a key that turn its feature off."""
FEATURES = {
    "attn_logit_softcapping": "soft cap of attention",
    "final_logit_softcapping": "soft cap of logits",
    "logit_scale": "logit scale",
    "logits_scaling": "logit scale",
    "lm_head_multiplier": "logit scale",
    "num_experts": "mixture of experts",
    "num_local_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "attention_dropout": "dropout",
    "attn_pdrop": "dropout",
    "embd_pdrop": "dropout",
    "resid_pdrop": "dropout",
    "quantization_config": "quantised weights",
}
"""Unsupported features by their key in `config.json`."""
ROTATIONS_BY_LENGTH = ("dynamic", "longrope")
"""Values of `rope_type` whose rotation of each sequence depends on the longest of the batch."""


def check_trainable(directory: Path) -> PreTrainedModel:
    """Check a model directory without reading its weights.

    Returns:
        The model on torch's meta device (shapes without values).

    Raises:
        PolicyError: packed training would compute this model wrongly (the message names the
            features), or the LM head is missing although it is not tied to the embedding.
    """
    if not (directory / "config.json").is_file():
        raise PolicyError(f"{directory}: no config.json, so this is no HuggingFace model directory")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]  # the rest lists all classes of transformers
        raise PolicyError(f"{directory}: transformers cannot build it: {reason}") from error
    refuse_untrainable(model, str(directory))
    names = [name for file in directory.glob("*.safetensors") for name in _names(file)]
    check_head(directory, names, is_tied=model.config.tie_word_embeddings)
    return model


def refuse_untrainable(model: PreTrainedModel, source: str) -> None:
    """Refuse a model, on any device, that packed training would compute wrongly.

    Raises:
        PolicyError: the message begins with `source` and names the features.
    """
    if features := untrainable(model):
        raise PolicyError(
            f"{source}: {model.config.model_type} cannot be trained on packed sequences because of "
            f"its {', '.join(features)}; take a model without, of type {', '.join(TRAINABLE)}"
        )


def untrainable(model: PreTrainedModel) -> list[str]:
    """List the features of a model that packed training would leave out."""
    config = model.config
    found = {name for key, name in FEATURES.items() if getattr(config, key, None) not in OFF}
    found |= _attention_features(model, config) | _head_features(model)
    if not found and config.model_type not in TRAINABLE:
        found = {f"unknown architecture {type(model).__name__}"}
    return sorted(found)


def _attention_features(model: nn.Module, config: PretrainedConfig) -> set[str]:
    kinds = getattr(config, "layer_types", None) or _uniform_layers(config)
    found = {f"layers with {kind.replace('_', ' ')}" for kind in kinds} - {
        "layers with full attention"
    }
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        found.add("attention sinks")
    rotation = getattr(config, "rope_parameters", None) or {}
    if rotation.get("rope_type") in ROTATIONS_BY_LENGTH:
        found.add(
            f"rotation of type {rotation['rope_type']}, which depends on the longest sequence"
        )
    return found


def _uniform_layers(config: PretrainedConfig) -> list[str]:
    """Return the kind of the layers if `layer_types` is missing; Qwen's models always have it."""
    return ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]


def _head_features(model: PreTrainedModel) -> set[str]:
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return {f"head of type {type(head).__name__}"}
    return {"head bias"} if head.bias is not None else set()


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())
