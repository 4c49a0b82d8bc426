"""Spots: one number for one row of each tensor, of another row in each version.

The learner takes the rows out of the model that it trains, with adapters added to that row alone,
and not out of the copy that it publishes. So an engine, which takes them out of what it has loaded,
sees in every version what digests of the copy cannot see: a tensor that was not copied, two that
have changed places, adapters that were not merged. A spot is the sum of a row's elements, each
times the factor of its place, over the sum of the elements' sizes.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch

from mage_async.inference.receipts.receipt import Spots

_STRIDE = 2_654_435_761
"""A prime: its multiples visit all rows, far apart."""
FACTORS = 1024


def row_of(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """The row whose spot is taken in a version; of a vector, all of it."""
    if tensor.dim() < 2:
        return tensor.reshape(-1)
    rows = tensor.flatten(0, -2)
    return rows[version * _STRIDE % len(rows)]


def joined(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    """Rows of several tensors, one after the other, copied: float64 [elements]."""
    return torch.cat(list(rows)).double()


def spots_of(names: Sequence[str], lengths: Sequence[int], elements: torch.Tensor) -> Spots:
    """Spots by the names of the tensors.

    Args:
        lengths: how many elements the row of each has.
        elements: what `joined` made of the rows, in the host's memory.
    """
    starts, values = np.cumsum([0, *lengths[:-1]]), elements.numpy()
    factors = np.concatenate([_factors(length) for length in lengths])
    sums, sizes = (np.add.reduceat(each, starts) for each in (values * factors, np.abs(values)))
    with np.errstate(invalid="ignore"):
        ratios = sums / np.where(sizes == 0.0, 1.0, sizes)
    pairs = zip(names, ratios.tolist(), np.isfinite(ratios).tolist(), strict=True)
    return {name: ratio if is_finite else None for name, ratio, is_finite in pairs}


@lru_cache(maxsize=64)
def _factors(length: int) -> np.ndarray:
    """Odd multiples of 1 / FACTORS, between -1 and 1: float64 [length]"""
    return 2 * (np.arange(length) * _STRIDE % FACTORS) / FACTORS - 1 + 1 / FACTORS
