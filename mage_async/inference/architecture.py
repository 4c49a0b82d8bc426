"""What a HuggingFace `config.json` says about a model, as far as a forward needs it.

The file is read without transformers, whose import costs seconds per process. A key that is not
understood is refused, because a model that runs with a wrong rotation or without its sliding window
is wrong silently.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mage_async.errors import PolicyError
from mage_async.inference.rotation import Rotation, read_rotation

SUPPORTED = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shapes and switches of a decoder of the Llama family."""

    model_type: str
    vocabulary: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    norm_epsilon: float
    max_positions: int
    rotation: Rotation
    is_tied: bool | None
    """Whether the head is the embedding; None where the file leaves it to the weights."""
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_head_norms: bool
    """Queries and keys are normalised per head."""


def read_architecture(directory: Path) -> Architecture:
    """Read a model directory's `config.json`, of transformers 4 or 5.

    Raises:
        PolicyError: no such file, or a model this engine would compute wrongly.
    """
    file = directory / "config.json"
    if not file.is_file():
        raise PolicyError(f"{directory}: no config.json, so this is no HuggingFace model directory")
    try:
        written = json.loads(file.read_text()).items()
    except (ValueError, AttributeError) as error:
        raise PolicyError(f"{file}: no JSON object: {error}") from error
    config = {name: value for name, value in written if value is not None}
    _refuse_unknown(file, config)
    try:
        return _architecture(file, config)
    except KeyError as error:
        raise PolicyError(f"{file}: has no {error}") from error


def _architecture(file: Path, config: dict[str, Any]) -> Architecture:
    kind, heads = config["model_type"], config["num_attention_heads"]
    has_bias = bool(config.get("attention_bias", False))
    return Architecture(
        model_type=kind,
        vocabulary=config["vocab_size"],
        hidden_size=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        mlp_size=config["intermediate_size"],
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        max_positions=config["max_position_embeddings"],
        rotation=read_rotation(file, config),
        is_tied=config.get("tie_word_embeddings"),
        has_qkv_bias=has_bias or kind == "qwen2",
        has_output_bias=has_bias and kind != "qwen2",
        has_mlp_bias=bool(config.get("mlp_bias", False)) and kind == "llama",
        has_head_norms=kind == "qwen3",
    )


def _refuse_unknown(file: Path, config: dict[str, Any]) -> None:
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        raise PolicyError(
            f"{file}: model_type {kind!r} is not served by the embedded engine, which knows "
            f'{", ".join(SUPPORTED)}; set engine.kind = "sglang"'
        )
    slides = config.get("use_sliding_window", False)
    if slides or "sliding_attention" in (config.get("layer_types") or ()):
        raise PolicyError(
            f'{file}: the embedded engine has no sliding window; set engine.kind = "sglang"'
        )
    if config.get("hidden_act", "silu") != "silu":
        raise PolicyError(
            f"{file}: hidden_act {config['hidden_act']!r} is not served by the embedded engine, "
            f'which knows silu; set engine.kind = "sglang"'
        )
    if config.get("quantization_config") is not None:
        raise PolicyError(
            f"{file}: the embedded engine serves no quantised weights; give it the original model"
        )
