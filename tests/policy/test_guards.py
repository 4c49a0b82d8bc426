"""What packed training computes as transformers does, and what it refuses by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from mage_async.errors import PolicyError
from mage_async.learning.attention import PACKED_ATTENTION
from mage_async.learning.forward import head_inputs
from mage_async.learning.packing import TokenRow
from mage_async.policy.load import check_trainable
from mage_async.policy.model_files import TRAINABLE
from tests.helpers.random_models import SHAPE, random_model

LENGTHS = (50, 37, 9)
CLASSES = {
    "gemma": "Gemma",
    "gemma3_text": "Gemma3Text",
    "llama": "Llama",
    "mistral": "Mistral",
    "olmo2": "Olmo2",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
}


def packed_logprobs(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Of all tokens but the first of each sequence."""
    model.set_attn_implementation(PACKED_ATTENTION)
    sequences = [each.numpy() for each in tokens.split(LENGTHS)]
    predicted = [np.arange(1, length) for length in LENGTHS]
    row = TokenRow.of(sequences, torch.device("cpu"), predicted=predicted)
    return head_inputs(model, row, 1.0).logprobs()[0]


def own_logprobs(model: PreTrainedModel, tokens: torch.Tensor, attention: str) -> torch.Tensor:
    """The same by transformers alone, sequence by sequence."""
    model.set_attn_implementation(attention)
    found = []
    for part in tokens.split(LENGTHS):
        every = model(part[None]).logits[0, :-1].log_softmax(-1)
        found.append(every.gather(1, part[1:, None])[:, 0])
    return torch.cat(found)


WINDOWS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "phi3": {"sliding_window": 8},
    "qwen2": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "smollm3": {"sliding_window": 8, "use_sliding_window": True, "no_rope_layer_interval": 2},
}
"""Changes with which some layers of a model see eight tokens."""


@pytest.mark.parametrize("has_windows", [False, True])
@pytest.mark.parametrize("kind", TRAINABLE)
@torch.no_grad()
def test_packed_logprobs_are_those_of_transformers(kind: str, has_windows: bool) -> None:
    if has_windows and kind not in WINDOWS:
        pytest.skip("no model of this type has windows")
    changes = WINDOWS[kind] if has_windows else {}
    if kind in ("gemma3_text", "mistral"):  # whose default is a window
        changes = {"sliding_window": 4096} | changes
    model = random_model(CLASSES[kind], **changes)
    assert model.config.model_type == kind
    tokens = torch.randint(3, 64, (sum(LENGTHS),))
    gap = packed_logprobs(model, tokens) - own_logprobs(model, tokens, "eager")
    assert gap.abs().max() < 1e-5
    model = model.double()  # transformers' eager attention has a softmax in float32, sdpa has not
    gap = packed_logprobs(model, tokens) - own_logprobs(model, tokens, "sdpa")
    assert gap.abs().max() < 1e-10


@pytest.mark.parametrize(
    ("name", "changes", "features"),
    [
        ("Gemma2", {}, ["soft cap of attention", "soft cap of logits"]),
        ("Gemma3Text", {"use_bidirectional_attention": True}, ["attention to later tokens"]),
        ("GptOss", {"num_local_experts": 4}, ["attention sinks", "mixture of experts"]),
        ("Cohere", {"logit_scale": 0.0625}, ["logit scale"]),
        ("Granite", {"logits_scaling": 8.0}, ["logit scale"]),
        ("Mixtral", {}, ["mixture of experts"]),
        ("Qwen3Moe", {"num_experts": 4}, ["mixture of experts"]),
        ("Phi", {}, ["head bias"]),
        ("Llama", {"attention_dropout": 0.1}, ["dropout"]),
        ("Starcoder2", {}, ["unknown architecture Starcoder2ForCausalLM"]),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(
    name: str, changes: dict[str, Any], features: list[str], tmp_path: Path
) -> None:
    getattr(transformers, f"{name}Config")(**SHAPE, **changes).save_pretrained(tmp_path)
    with pytest.raises(PolicyError, match="cannot be trained on packed sequences") as refused:
        check_trainable(tmp_path)  # there are no weights
    assert all(feature in str(refused.value) for feature in features)


def test_an_attention_that_asks_for_more_is_refused_where_it_asks() -> None:
    model = random_model("Gemma2")
    with pytest.raises(PolicyError, match="Gemma2Attention passes softcap"):
        packed_logprobs(model, torch.randint(3, 64, (sum(LENGTHS),)))
