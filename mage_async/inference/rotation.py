"""Rotary positions: which angles turn the pairs of a head's dimensions.

Types: `default`, `linear` (positions interpolated), `llama3` (slow pairs interpolated).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mage_async.errors import PolicyError

TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Rotation:
    """The base of the angles and how they are stretched for long contexts."""

    kind: str
    base: float
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192


def read_rotation(file: Path, config: dict[str, Any]) -> Rotation:
    """Read `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of 4."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    is_nested = any(isinstance(value, dict) for value in scaling.values())
    if kind not in TYPES or partial != 1.0 or is_nested:
        raise PolicyError(
            f"{file}: rotary positions {scaling} are not served by the embedded engine, which "
            f'turns whole heads, by {", ".join(TYPES)}; set engine.kind = "sglang"'
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
    """Unit complex numbers that turn a head's pairs: complex64 [positions, head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = _stretched(rotation, 1.0 / rotation.base**exponents)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def _stretched(rotation: Rotation, frequencies: torch.Tensor) -> torch.Tensor:
    if rotation.kind == "default":
        return frequencies
    slow = frequencies / rotation.factor
    if rotation.kind == "linear":
        return slow
    low, high = rotation.low_frequency_factor, rotation.high_frequency_factor
    turns = rotation.original_positions * frequencies / (2 * math.pi)
    share_kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share_kept) * slow + share_kept * frequencies
