"""Advantages of turns written at their tokens, on a CPU: memory is all it costs.

Two ways to the same bits. Short stretches are looked up, a cache's worth of tokens at a time, since
an index is made for each; long ones are filled one by one, which reads nothing.

Shapes: `N` turns, `T` tokens.
"""

import mmap
from itertools import pairwise

import torch
from torch import Tensor

from mage_kernels.turns import TurnLayout

CHUNK_TOKENS = 2**17
LONG_STRETCH = 512
"""Tokens of a turn or a gap, on average, from which filling them one by one is faster."""
HUGE_PAGE_BYTES = 2**21


def fresh_tokens(num_tokens: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for `[T]` on the device of `like`, holding anything.

    On Linux a large one lies on huge pages where the system lends them: it has to be zeroed by the
    system all the same, but in pieces of 2 MB instead of 4 KB.
    """
    num_bytes = num_tokens * dtype.itemsize
    if like.device.type != "cpu" or num_bytes < 2 * HUGE_PAGE_BYTES or not _lends_huge_pages():
        return like.new_empty(num_tokens, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def expanded_to_tokens(advantages: Tensor, turns: TurnLayout, out: Tensor) -> Tensor:
    """`reference.expanded_to_tokens` into `out`: gaps and turns alternate."""
    is_long = turns.num_tokens >= LONG_STRETCH * (2 * len(advantages) + 1)
    if is_long and out.device.type == "cpu":
        return _filled(advantages, turns, out)
    return _looked_up(advantages, turns, out)


def _filled(advantages: Tensor, turns: TurnLayout, out: Tensor) -> Tensor:
    """Stretch after stretch, each by its bounds: slicing a numpy view costs a tenth of slicing a
    tensor.
    """
    tokens, end = out.numpy(), 0
    columns = (advantages.tolist(), turns.starts.tolist(), turns.stops.tolist())
    for advantage, start, stop in zip(*columns, strict=True):
        if end < start:
            tokens[end:start] = 0.0
        tokens[start:stop] = advantage
        end = stop
    tokens[end:] = 0.0
    return out


def _looked_up(advantages: Tensor, turns: TurnLayout, out: Tensor) -> Tensor:
    """Each stretch's value repeated, by an index of its tokens."""
    edges = torch.stack([turns.starts, turns.stops], 1).flatten()
    last = edges.new_full((1,), turns.num_tokens)
    ends = torch.cat([edges, last])  # [2 N + 1]
    lengths = ends.diff(prepend=torch.zeros_like(last))
    values = torch.stack([torch.zeros_like(advantages), advantages], 1).flatten()
    values = torch.cat([values, values.new_zeros(1)])
    marks = ends.new_tensor(range(CHUNK_TOKENS, turns.num_tokens, CHUNK_TOKENS))
    cuts = torch.searchsorted(ends, marks).unique().tolist()
    start = 0
    for first, stop in pairwise([0, *cuts, len(ends)]):
        if first < stop:
            end = int(ends[stop - 1])
            index = torch.repeat_interleave(lengths[first:stop], output_size=end - start)
            torch.index_select(values[first:stop], 0, index, out=out[start:end])
            start = end
    return out


def _lends_huge_pages() -> bool:
    return hasattr(mmap, "MADV_HUGEPAGE")
