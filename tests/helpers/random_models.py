"""Models of random weights of any architecture that transformers knows."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_model(name: str, **changes: Any) -> PreTrainedModel:
    """A small model of a class of transformers, as "Qwen3"; the same at every call."""
    config = getattr(transformers, f"{name}Config")(**SHAPE, **changes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()
