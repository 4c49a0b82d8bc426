"""Models of random weights of any architecture that transformers knows, and segments."""

import random
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from mage_async.learning.attention import PACKED_ATTENTION
from mage_async.learning.packing import SampledTokens, TrainingSequence

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


def smallest_qwen3() -> Qwen3Config:
    """The smallest shape that the packed forward takes, with fewer key heads than heads."""
    return Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        attn_implementation=PACKED_ATTENTION,
    )


def random_model(name: str, **changes: Any) -> PreTrainedModel:
    """A small model of a class of transformers, as "Qwen3"; the same at every call."""
    config = getattr(transformers, f"{name}Config")(**SHAPE, **changes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def sequence(length: int) -> TrainingSequence:
    """Two turns of a segment that all but ends with the second."""
    source = random.Random(length)
    places = np.concatenate([np.arange(2, 6), np.arange(length - 3, length)])
    zeros = np.zeros(7, np.int32)
    return TrainingSequence(
        np.array([source.randrange(3, 64) for _ in range(length)], np.int32),
        places,
        SampledTokens(
            np.array([-source.uniform(3.5, 4.5) for _ in range(7)], np.float32),
            *(zeros.copy() for _ in range(5)),
        ),
        np.array([4, 3]),
        torch.tensor([1.0, -0.7]),
    )


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    """The model, in place, in float64 throughout: transformers' norms compute in float32."""
    for norm in model.double().modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = partial(
                rms_norm,
                normalized_shape=norm.weight.shape,
                weight=norm.weight,
                eps=norm.variance_epsilon,
            )
    return model
