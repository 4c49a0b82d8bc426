"""Where the tokens of one forward lie: packed end to end, folded only for attention.

All matrices see packed tokens, without padding. Attention needs rectangles: rows are ordered by
their number of new tokens, longest first, and cut into buckets in which little is padded. Where the
lanes of a bucket lie close together, its rectangle has a row for each lane between the first and
the last, so that keys and values are read where they are; a copy of them would cost as much as the
attention itself.

Shapes: `R` rows, `T` packed tokens, `B` rows of a bucket's rectangle, `n` its widest row, `L` its
longest context.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

WORST_PADDING = 4
"""No row of a bucket is wider than this times another ..."""
SMALL_CELLS = 512
"""... unless so few cells would be padded that a bucket of its own costs more."""
WIDEST_SPAN = 1.25
"""Lanes are read where they are, if there are at most so many times as many between the first and
the last as there are rows: attention for lanes that compute nothing costs something too."""


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
    lanes: slice | torch.Tensor
    """Neighbours, or int64 [B]"""
    height: int
    """B"""
    width: int
    """n"""
    context: int
    """L"""
    cells: torch.Tensor | None
    """int64: each token's place in the rectangle [B * n]; None where that is its own number"""
    mask: torch.Tensor
    """float32 [B, 1, n, L]: 0 where a token may look, else -inf"""


def packed_positions(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Row and position of every packed token: int64 [T] each."""
    row = np.repeat(np.arange(len(rows.counts)), rows.counts)
    return row, _counted(rows.starts, rows.counts)


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
    lanes, places, height = _rectangle(rows.lanes)
    starts, counts = np.zeros(height, np.int64), np.zeros(height, np.int64)
    starts[places], counts[places] = rows.starts, rows.counts
    offsets = np.arange(width)
    is_token = offsets < counts[:, None]
    positions = np.where(is_token, starts[:, None] + offsets, 0)
    is_visible = np.arange(context) <= positions[:, None, :, None]
    mask = torch.from_numpy(np.where(is_visible, np.float32(0), np.float32(-np.inf)))
    is_packed = is_token.all() and np.array_equal(places, np.arange(height))
    cells = None if is_packed else torch.from_numpy(_counted(places * width, rows.counts))
    return Bucket(tokens, lanes, height, width, context, cells, mask)


def _rectangle(lanes: np.ndarray) -> tuple[slice | torch.Tensor, np.ndarray, int]:
    """The lanes of a rectangle's rows, in which row each of `lanes` is, and the number of rows."""
    first, last = int(lanes.min()), int(lanes.max()) + 1
    if last - first > WIDEST_SPAN * len(lanes):
        return torch.from_numpy(lanes), np.arange(len(lanes)), len(lanes)
    return slice(first, last), lanes - first, last - first


def _counted(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`counts[r]` numbers from `begins[r]` on, for one row after the other."""
    shift = begins - (np.cumsum(counts) - counts)
    return np.arange(counts.sum()) + np.repeat(shift, counts)
