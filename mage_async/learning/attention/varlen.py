"""Attention over sequences of different lengths as they lie in a row, without padding.

torch's flash kernel is told where sequences begin and end, and which keys belong to each. It runs
on CUDA, in 16 bits; other attention goes through `fold.py`. What all sequences begin with is one
more sequence of queries, and its keys are laid before the own keys of every other: under the
kernel's causal mask, which is aligned at the last query and the last key of a sequence
(`torch/nn/attention/bias.py`), an own token sees the whole opening. Never run on a GPU.

Shapes: `T` packed tokens, of which the first `P` are the opening; `S` sequences, `M` keys laid out,
`N` heads, `K` key-value heads, `D` head size.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch.autograd.function import FunctionCtx

CAUSAL = (-1, 0)
"""How far a token sees, back and forth: everything, and nothing."""
OLDEST = (8, 0)
"""Compute capability that the kernel needs."""
WIDEST = 256
"""Head size that it takes at most."""


@cache
def kernel() -> Callable[..., torch.Tensor] | None:
    """torch's function; None where its version has none that takes what we have to say."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    takes = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= takes.keys() else None


def fits(query: torch.Tensor, dropout: float) -> bool:
    """Whether the kernel computes such attention: queries [1, N, T, D]."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and not dropout
        and size <= WIDEST
        and size % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= OLDEST
        and kernel() is not None
    )


@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """Where the queries and the keys of each sequence lie; an opening is the first sequence."""

    queries: torch.Tensor
    """int32 [S + 1], one more with an opening: the row's place where each begins, and its end."""
    keys: torch.Tensor
    """The same of keys as they are laid out."""
    most_queries: int
    most_keys: int
    copies: torch.Tensor | None = None
    """int64 [S + 1, P]: where each copy of the opening's keys is laid; None without one."""
    own: torch.Tensor | None = None
    """int64 [T - P]: where every other token's key is laid."""

    @staticmethod
    def of(lengths: torch.Tensor, opening: int = 0) -> "Extents":
        """Extents of sequences with the given lengths past their opening, int64 [S]."""
        longest = int(lengths.max())
        if not opening:
            ends = _ends(lengths)
            return Extents(ends, ends, longest, longest)
        first = lengths.new_tensor([opening])
        owned = torch.cat((first.new_zeros(1), lengths))
        queries, keys = _ends(torch.cat((first, lengths))), _ends(owned + opening)
        starts = keys[:-1].long()
        copies = starts[:, None] + torch.arange(opening, device=lengths.device)
        is_own = torch.ones(int(keys[-1]), dtype=torch.bool, device=lengths.device)
        is_own[copies] = False
        own = is_own.nonzero()[:, 0]
        return Extents(queries, keys, max(opening, longest), opening + longest, copies, own)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, extents: Extents, scale: float
) -> torch.Tensor:
    """Causal attention inside each sequence: [T, N, D] and twice [T, K, D] to [T, N, D]."""
    attention = kernel()
    assert attention is not None, "`fits` has said that there is one"
    if extents.copies is not None:
        key, value = (Laid.apply(each, extents.copies, extents.own) for each in (key, value))
    return attention(
        query,
        key,
        value,
        extents.queries,
        extents.keys,
        extents.most_queries,
        extents.most_keys,
        scale=scale,
        window_size=CAUSAL,
        enable_gqa=query.shape[1] != key.shape[1],
    )


class Laid(torch.autograd.Function):
    """[T, ...] -> [M, ...]: the first rows before those of every sequence; gradients of copies are
    summed in one order, which indexing would not do on CUDA.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: torch.Tensor, copies: torch.Tensor, own: torch.Tensor
    ) -> torch.Tensor:
        """`copies` and `own` as of `Extents`."""
        ctx.save_for_backward(copies, own)
        first, others = rows.tensor_split((copies.shape[1],))
        laid = rows.new_empty((copies.numel() + len(own), *rows.shape[1:]))
        laid[copies] = first
        laid[own] = others
        return laid

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The sum over copies, and the gradient of every other row's own place."""
        copies, own = ctx.saved_tensors
        shared = gradient.index_select(0, copies.flatten()).unflatten(0, copies.shape).sum(0)
        return torch.cat((shared, gradient.index_select(0, own))), None, None


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    """int32 [S + 1]: 0, and where each sequence ends."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
