"""Refuse models that packed training would compute wrongly, before any weight is read.

Packed training runs a model's layers with an attention of its own, and multiplies the last hidden
states by the weight of the LM head. A model with further operations in its attention or after its
LM head would run without an error, but its log-probs would not be those that an engine samples
with.
"""

from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from mage_async.errors import PolicyError
from mage_async.policy.headers import check_head, outline_of

TRAINABLE = ("gemma", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
"""Values of `model_type` whose packed forward is tested against transformers' own."""
OFF = (None, False, 0, 0.0, 1.0)
"""Values of a key that turn its feature off."""
FEATURES = {
    "soft cap of attention": ["attn_logit_softcapping"],
    "soft cap of logits": ["final_logit_softcapping"],
    "logit scale": ["logit_scale", "logits_scaling", "lm_head_multiplier"],
    "mixture of experts": ["num_experts", "num_local_experts", "n_routed_experts"],
    "dropout": ["attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"],
    "quantised weights": ["quantization_config"],
}
"""Unsupported features, with their keys in `config.json`."""
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
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        # Further lines list all classes of transformers.
        reason = str(error).strip().splitlines()[0]
        raise PolicyError(f"{directory}: transformers cannot build it: {reason}") from error
    refuse_untrainable(model, str(directory))
    check_head(directory, outline_of(directory).tensors, is_tied=model.config.tie_word_embeddings)
    return model


def refuse_untrainable(model: PreTrainedModel, source: str) -> None:
    """Refuse a model, on any device, that packed training would compute wrongly.

    Raises:
        PolicyError: the message begins with `source` and names the features.
    """
    config = model.config
    on = {key for key in chain(*FEATURES.values()) if getattr(config, key, None) not in OFF}
    found = {name for name, keys in FEATURES.items() if not on.isdisjoint(keys)}
    found |= _attention_features(model, config) | _head_features(model)
    if not found and config.model_type not in TRAINABLE:
        found = {f"unknown architecture {type(model).__name__}"}
    if found:
        raise PolicyError(
            f"{source}: {config.model_type} cannot be trained on packed sequences because of "
            f"its {', '.join(sorted(found))}; take a model without, of type {', '.join(TRAINABLE)}"
        )


def _attention_features(model: nn.Module, config: PretrainedConfig) -> set[str]:
    """Return the unsupported features of a model's attention, in words."""
    # Qwen's models always have `layer_types`. In a model without it, all layers are of one kind.
    uniform = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = getattr(config, "layer_types", None) or [uniform]
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


def _head_features(model: PreTrainedModel) -> set[str]:
    """Return the unsupported features of a model's LM head, in words."""
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return {f"head of type {type(head).__name__}"}
    return {"head bias"} if head.bias is not None else set()
