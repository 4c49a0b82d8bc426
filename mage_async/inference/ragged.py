"""Where the tokens of one forward lie: packed end to end, folded only for attention.

All matrices see packed tokens, without padding. Attention needs rectangles: rows are ordered by
their number of new tokens, longest first, and cut into buckets in which little is padded.

Shapes: `R` rows, `T` packed tokens, `B` rows of a bucket, `n` its widest row, `L` its longest
context.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

WORST_PADDING = 4
"""No row of a bucket is wider than this times another ..."""
SMALL_CELLS = 512
"""... unless so few cells would be padded that a bucket of its own costs more."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """New tokens of some contexts: row `r` computes `counts[r]` positions from `starts[r]` on."""

    lanes: np.ndarray
    """int64 [R]: which cache lane; each at most once"""
    starts: np.ndarray
    """int64 [R]"""
    counts: np.ndarray
    """int64 [R], at least 1, never increasing"""

    def take(self, rows: np.ndarray) -> "Rows":
        """Some of the rows, in the given order."""
        return Rows(self.lanes[rows], self.starts[rows], self.counts[rows])

    def last_tokens(self) -> "Rows":
        """The last token of every row alone."""
        return Rows(self.lanes, self.starts + self.counts - 1, np.ones_like(self.counts))


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Rows that attend together, as a rectangle."""

    tokens: slice
    """Which of the packed tokens are theirs."""
    lanes: torch.Tensor
    """int64 [B]"""
    width: int
    """n"""
    context: int
    """L"""
    cells: torch.Tensor | None
    """int64: each token's place in the rectangle [B * n]; None where the rectangle is full"""
    mask: torch.Tensor
    """float32 [B, 1, n, L]: 0 where a token may look, else -inf"""


def packed_positions(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Row and position of every packed token: int64 [T] each."""
    row = np.repeat(np.arange(len(rows.counts)), rows.counts)
    shift = rows.starts - (np.cumsum(rows.counts) - rows.counts)
    return row, np.arange(len(row)) + shift[row]


def buckets(rows: Rows) -> list[Bucket]:
    """Cut rows into rectangles."""
    ends = np.cumsum(rows.counts)
    begins = ends - rows.counts
    return [
        _bucket(rows.take(np.arange(first, last)), slice(int(begins[first]), int(ends[last - 1])))
        for first, last in _cuts(rows.counts)
    ]


def _cuts(counts: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of rows that share a bucket."""
    first, num_rows = 0, len(counts)
    while first < num_rows:
        widest = int(counts[first])
        is_padded_little = (num_rows - first) * widest - counts[first:].sum() < SMALL_CELLS
        narrow = counts[first:] * WORST_PADDING < widest
        is_all = is_padded_little or not narrow.any()
        last = num_rows if is_all else first + int(narrow.argmax())
        yield first, last
        first = last


def _bucket(rows: Rows, tokens: slice) -> Bucket:
    width, context = int(rows.counts[0]), int((rows.starts + rows.counts).max())
    offsets = np.arange(width)
    is_token = offsets < rows.counts[:, None]
    positions = np.where(is_token, rows.starts[:, None] + offsets, 0)
    is_visible = np.arange(context) <= positions[:, None, :, None]
    mask = np.where(is_visible, np.float32(0), np.float32(-np.inf))
    cells = None if is_token.all() else torch.from_numpy(is_token.ravel().nonzero()[0])
    return Bucket(
        tokens, torch.from_numpy(rows.lanes), width, context, cells, torch.from_numpy(mask)
    )
