"""Exp-scaled logits kept between forward and backward.

Shapes: `R` kept rows, `V` vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mage_kernels.fused.launching import padded_buffer

TILE = {"BLOCK_T": 128, "BLOCK_V": 256}
"""One maximum is kept per row and BLOCK_V columns."""


@dataclass(frozen=True, slots=True)
class KeptLogits:
    """`2^(z - m)` of the first R rows, and the `m` of each of their tiles."""

    values: Tensor
    """`[R, V]`: bf16, whose eight exponent bits hold `2^(z - m)` for all but vanishing tokens"""
    tile_max: Tensor
    """fp32 `[tiles, R]`"""

    @classmethod
    def empty(cls, num_rows: int, vocabulary: int, like: Tensor) -> "KeptLogits":
        """Room for some rows."""
        tiles = -(-vocabulary // TILE["BLOCK_V"])
        tile_max = torch.empty((tiles, num_rows), dtype=torch.float32, device=like.device)
        dtype = torch.bfloat16 if like.itemsize == 2 else like.dtype
        return cls(padded_buffer(num_rows, vocabulary, dtype, like.device), tile_max)


def num_kept_rows(keep_bytes: int, num_rows: int, vocabulary: int, itemsize: int) -> int:
    """How many rows fit the budget: all, or a whole number of row tiles."""
    fitting = keep_bytes // (vocabulary * itemsize)
    return num_rows if fitting >= num_rows else fitting - fitting % TILE["BLOCK_T"]
