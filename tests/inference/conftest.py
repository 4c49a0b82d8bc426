"""Small random models of every family the engine serves, saved as people's models are."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from mage_async.inference.model import Model
from mage_async.inference.scheduler import Scheduler

VOCABULARY = 96
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}
FAMILIES = (
    *("qwen3", "qwen2", "llama", "gemma", "gemma3_text", "mistral", "olmo2", "smollm3"),
    *("qwen2 with windows", "mistral without"),
)


@dataclass(frozen=True)
class Reference:
    """A model directory, and what transformers makes of it."""

    directory: Path
    model: PreTrainedModel

    def logprobs(self, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Log-probs of every next token after each token, computed at once: [T, V]"""
        with torch.no_grad():
            ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
            return torch.log_softmax(self.model(ids).logits[0] / temperature, -1).numpy()

    def engine_model(self, *, slots: int = 8, max_tokens: int = 256) -> Model:
        """The same model as the engine serves it."""
        return Model.load(self.directory, slots=slots, max_tokens=max_tokens)

    def reseeded(self, seed: int, directory: Path) -> "Reference":
        """Other weights of the same shapes."""
        other = type(self.model)(self.model.config).eval()
        randomise(other, seed)
        other.save_pretrained(directory)
        return Reference(directory, other)


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """Give every parameter, norms and biases too, a value that would be noticed if it were lost."""
    source = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        scale = 0.3 if weight.dim() == 2 else 0.2
        weight.normal_(1.0 if "norm" in name else 0.0, scale, generator=source)


def build(family: str) -> PreTrainedModel:
    """A random model by its name."""
    match family:
        case "qwen3":
            rope = {"rope_type": "default", "rope_theta": 100.0}
            config = Qwen3Config(
                **SHAPE, head_dim=16, tie_word_embeddings=True, rope_parameters=rope
            )
            model = Qwen3ForCausalLM(config)
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, rope_parameters=LINEAR))
        case "llama":
            model = LlamaForCausalLM(
                LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3)
            )
        case "gemma":
            model = GemmaForCausalLM(GemmaConfig(**SHAPE, head_dim=16))
        case "gemma3_text":  # of three layers, the first two have windows
            model = Gemma3ForCausalLM(
                Gemma3TextConfig(
                    **SHAPE | {"num_hidden_layers": 3},
                    head_dim=16,
                    query_pre_attn_scalar=24,
                    sliding_window=12,
                    sliding_window_pattern=3,
                )
            )
        case "mistral":
            model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=12))
        case "mistral without":
            model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None))
        case "olmo2":
            model = Olmo2ForCausalLM(Olmo2Config(**SHAPE, attention_bias=True))
        case "smollm3":  # of three layers, the second does not rotate
            model = SmolLM3ForCausalLM(
                SmolLM3Config(
                    **SHAPE | {"num_hidden_layers": 3},
                    no_rope_layer_interval=2,
                    mlp_bias=True,
                    pad_token_id=0,
                )
            )
        case "qwen2 with windows":
            model = Qwen2ForCausalLM(
                Qwen2Config(
                    **SHAPE, use_sliding_window=True, sliding_window=12, max_window_layers=1
                )
            )
    randomise(model, 0)
    return model.eval()


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    """A reference for each family."""
    made = {}
    for family in FAMILIES:
        directory = tmp_path_factory.mktemp(family.replace(" ", "_"))
        model = build(family)
        model.save_pretrained(directory)
        made[family] = Reference(directory, model)
    return made


@pytest.fixture(scope="session")
def reference(references):
    """The default family."""
    return references["qwen3"]


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def scheduler(reference):
    return Scheduler(reference.engine_model())


@pytest.fixture(scope="session")
def newer(reference, tmp_path_factory):
    return reference.reseeded(1, tmp_path_factory.mktemp("newer"))
