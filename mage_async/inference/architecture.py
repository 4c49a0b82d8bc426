"""Read the architecture of a model from its HuggingFace `config.json`.

transformers, whose import takes seconds per process, is not needed. A setting that the embedded
engine does not implement is refused, because a model with a wrong rotation or without its sliding
window would be wrong silently.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mage_async.errors import PolicyError

ROPE_TYPES = ("default", "linear", "llama3")
"""Values of `rope_type`; `linear` interpolates all positions, `llama3` only dimensions that turn
slowly."""
SUPPORTED = ("llama", "qwen2", "qwen3")
"""Values of `model_type` that the embedded engine serves."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Describe rotary position embedding: base of the angles, and scaling for long contexts."""

    kind: str
    """One of `ROPE_TYPES`."""
    base: float
    factor: float = 1.0
    """Factor by which rotations are slowed down."""
    low_frequency_factor: float = 1.0
    """Turns within `original_positions` up to which `llama3` slows a rotation down by `factor`."""
    high_frequency_factor: float = 4.0
    """Turns from which on `llama3` leaves a rotation as it is; in between it interpolates."""
    original_positions: int = 8192
    """Context length of the model before its context was extended."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Hold shapes and options of a decoder of the Llama family."""

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
    """Whether the LM head is the embedding; None if the file does not say."""
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_head_norms: bool
    """Whether queries and keys are normalised per head."""


def read_architecture(directory: Path) -> Architecture:
    """Read a model directory's `config.json`, of transformers 4 or 5.

    Raises:
        PolicyError: there is no such file, or the embedded engine does not serve the model.
    """
    file = directory / "config.json"
    if not file.is_file():
        raise PolicyError(f"{directory}: no config.json, so this is no HuggingFace model directory")
    try:
        written = json.loads(file.read_text()).items()
    except (ValueError, AttributeError) as error:
        raise PolicyError(f"{file}: no JSON object: {error}") from error
    return architecture_of(dict(written), file)


def architecture_of(written: dict[str, Any], file: Path) -> Architecture:
    """Return the architecture that a configuration of transformers describes.

    Args:
        file: source of the configuration, with which errors begin.

    Raises:
        PolicyError: the embedded engine does not serve the model.
    """
    config = {name: value for name, value in written.items() if value is not None}
    _refuse_unknown(file, config)
    try:
        return _architecture(file, config)
    except KeyError as error:
        raise PolicyError(f"{file}: has no {error}") from error


def _architecture(file: Path, config: dict[str, Any]) -> Architecture:
    """Return the architecture that a `config.json` describes."""
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
        # transformers fixes the biases of qwen2 in its code: on queries, keys and values, and
        # nowhere else.
        has_qkv_bias=has_bias or kind == "qwen2",
        has_output_bias=has_bias and kind != "qwen2",
        has_mlp_bias=bool(config.get("mlp_bias", False)) and kind == "llama",
        has_head_norms=kind == "qwen3",
    )


def _refuse_unknown(file: Path, config: dict[str, Any]) -> None:
    """Raise a `PolicyError` if the embedded engine does not implement a setting of the model."""
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


def read_rotation(file: Path, config: dict[str, Any]) -> Rotation:
    """Read `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of 4."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    # transformers 5 has a table for each kind of layer where layers rotate differently.
    is_nested = any(isinstance(value, dict) for value in scaling.values())
    if kind not in ROPE_TYPES or partial != 1.0 or is_nested:
        raise PolicyError(
            f"{file}: rotary positions {scaling} are not served by the embedded engine, which "
            f'turns whole heads, by {", ".join(ROPE_TYPES)}; set engine.kind = "sglang"'
        )
    return Rotation(
        kind,
        base=scaling.get("rope_theta", config.get("rope_theta", 10_000.0)),
        factor=scaling.get("factor", 1.0),
        low_frequency_factor=scaling.get("low_freq_factor", 1.0),
        high_frequency_factor=scaling.get("high_freq_factor", 4.0),
        original_positions=scaling.get("original_max_position_embeddings", 8192),
    )


def rotations(rotation: Rotation, head_dim: int, num_positions: int) -> torch.Tensor:
    """Compute the complex numbers that rotate pairs: complex64 [positions, head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = _stretched(rotation, 1.0 / rotation.base**exponents)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def _stretched(rotation: Rotation, frequencies: torch.Tensor) -> torch.Tensor:
    """Return the frequencies, made slower for long contexts as the kind of rotation says."""
    if rotation.kind == "default":
        return frequencies
    slow = frequencies / rotation.factor
    if rotation.kind == "linear":
        return slow
    low, high = rotation.low_frequency_factor, rotation.high_frequency_factor
    turns = rotation.original_positions * frequencies / (2 * math.pi)
    share_kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share_kept) * slow + share_kept * frequencies
