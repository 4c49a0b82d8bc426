"""Find the shape of a policy by its `config.json`, without weights and without a download.

The shapes of hub models that the shipped configurations name are listed here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from mage_async.assembly import environment_of
from mage_async.config.schema import Config, Tiny, local_policy
from mage_async.errors import PolicyError
from mage_async.learning.attention import PACKED_ATTENTION
from mage_async.learning.lora import add_adapters
from mage_async.methods.method import Methods
from mage_async.policy.load import as_policy_error, refuse_untrainable, tiny_shape
from mage_async.policy.model_files import kv_token_bytes
from mage_async.policy.tiny_tokenizer import build_tokenizer

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
"""Fields of `config.json` that all Qwen3 models share."""
HUB: dict[str, dict[str, Any]] = {
    f"Qwen/Qwen3-{size}": QWEN3
    | {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": is_tied,
    }
    for size, hidden, mlp, layers, heads, is_tied in (
        ("0.6B", 1024, 3072, 28, 16, True),
        ("1.7B", 2048, 6144, 28, 16, True),
        ("4B", 2560, 9728, 36, 32, True),
        ("8B", 4096, 12288, 36, 32, False),
        ("14B", 5120, 17408, 40, 40, False),
        ("32B", 5120, 25600, 64, 64, False),
    )
} | {
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
}
"""Fields of `config.json`, by hub id."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Hold the size of a model, on which memory and operations depend."""

    config: PretrainedConfig
    num_weights: int
    """Number of elements of all weight tensors, without adapters; a tied LM head counts once."""
    num_in_matrices: int
    """Number of elements of the layers' matrices, without the embedding and the LM head."""

    @property
    def num_in_embedding(self) -> int:
        """Number of weights of the embedding, as a rule the largest tensor."""
        return int(self.config.vocab_size * self.config.hidden_size)

    @property
    def num_layer_weights(self) -> int:
        """Number of weights without the embedding and the LM head."""
        matrices = 1 if self.config.tie_word_embeddings else 2
        return self.num_weights - matrices * self.num_in_embedding

    def kv_token_bytes(self, itemsize: int, gpus: int = 1) -> int:
        """Return the bytes of a token's keys and values on each of `gpus` that share the model."""
        return kv_token_bytes(self.config.to_dict(), itemsize, gpus)


def shape_of(config: Config) -> Shape:
    """Return the shape of a configuration's policy.

    Raises:
        PolicyError: the shape is unknown on this machine, or the model cannot be built or trained.
    """
    model_config = _model_config(config)
    source = getattr(config.policy, "source", "policy")
    with as_policy_error(source), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    refuse_untrainable(model, source)
    ends = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    matrices = (each for each in model.parameters() if each.ndim == 2 and each not in ends)
    return Shape(model_config, model.num_parameters(), sum(each.numel() for each in matrices))


def meta_model(config: Config, shape: Shape) -> PreTrainedModel:
    """Return the model as the learner trains it, on torch's meta device (shapes without values).

    Raises:
        PolicyError: the model lacks the layers that adapters are configured for.
    """
    dtype = getattr(torch, config.policy.dtype)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            shape.config, dtype=dtype, attn_implementation=PACKED_ATTENTION
        )
    if config.policy.lora:
        add_adapters(model, config.policy.lora, config.seed, roles=Methods(config).roles())
    model.train()
    return model


def _model_config(config: Config) -> PretrainedConfig:
    """Return the model configuration of a policy: that of a tiny model, the `config.json` on this
    machine, or the known one of a hub model (`HUB`).
    """
    policy = config.policy
    if isinstance(policy, Tiny):
        return tiny_shape(policy, build_tokenizer(environment_of(config).facts.words))
    directory = local_policy(policy.source)
    try:
        # A hub model's `config.json` may have been downloaded before.
        cached = None if directory else try_to_load_from_cache(policy.source, "config.json")
    except HFValidationError:
        cached = None  # no hub model can have this name
    if isinstance(cached, str):
        directory = Path(cached).parent
    if directory:
        with as_policy_error(policy.source):
            known: PretrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True)
        return known
    if policy.source in HUB:
        return AutoConfig.for_model(**HUB[policy.source])
    raise PolicyError(
        f"policy.source {policy.source!r} is not on this machine, and its shape is not known: give "
        f"a directory with its config.json, or one of {', '.join(HUB)}"
    )
