"""The head with its vocabulary split over ranks: what each computes, and how it is put together.

Forward: every rank calls `shard_partials`, all exchange them (16 bytes a token and rank), and
`logprob_and_entropy(combined_partials(all))` is the same on all ranks. Backward: `shard_gradients`
gives a rank's own dW, which nobody else needs, and its part of dX, which is summed over ranks. How
tensors travel is the caller's; with torch.distributed that is one all_gather and one all_reduce.

`reference` specifies all of it. Leave masked rows out before: see `mage_kernels.compaction`.

Shapes: `T` tokens, `D` hidden, `S` rows of a shard.
"""

import torch
from torch import Tensor

from mage_kernels.chunked import (
    CHUNK_BYTES,
    MIN_ROWS,
    GradientSink,
    at_least,
    chunks,
    matmul,
    rows_of,
)
from mage_kernels.dispatch import is_fused_head
from mage_kernels.reference import (
    column,
    combined_partials,
    computing_dtype,
    logprob_and_entropy,
)

__all__ = ["combined_partials", "logprob_and_entropy", "shard_gradients", "shard_partials"]


def shard_partials(
    hidden: Tensor,
    shard: Tensor,
    tokens: Tensor,
    first_row: int,
    inverse_temperature: float | Tensor = 1.0,
) -> Tensor:
    """`reference.shard_partials`, `[4, T]`, the logits never stored whole."""
    if is_fused_head(hidden):
        from mage_kernels.fused.shards import fused_partials

        return fused_partials(hidden, shard, tokens - first_row, inverse_temperature)
    dtype = computing_dtype(hidden.dtype)
    partials = hidden.new_empty((4, len(hidden)), dtype=dtype)
    for rows in chunks(len(hidden), len(shard), dtype.itemsize, CHUNK_BYTES):
        logits = _logits(hidden[rows], shard, rows_of(inverse_temperature, rows))
        columns, here = _own_columns(tokens[rows] - first_row, len(shard))
        largest = logits.amax(1)
        own = logits.gather(1, columns).squeeze(1).where(here, 0.0)
        weights = (logits - largest[:, None]).exp()
        sums = weights.sum(1), torch.linalg.vecdot(weights, logits)
        partials[:, rows] = torch.stack([largest, *sums, own])
    return partials


def shard_gradients(
    hidden: Tensor,
    shard: Tensor,
    tokens: Tensor,
    first_row: int,
    whole: Tensor,
    d_logprob: Tensor,
    d_entropy: Tensor | None = None,
    inverse_temperature: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """`reference.shard_gradients`: dX's part `[T, D]` in fp32 (or fp64), dW `[S, D]` as the shard.

    The logits are computed again, those of the shard alone. `d_entropy` None: no gradient.
    """
    if is_fused_head(hidden):
        from mage_kernels.fused.shards import fused_gradients

        return fused_gradients(
            hidden, shard, tokens - first_row, whole, d_logprob, d_entropy, inverse_temperature
        )
    logprob, entropy = logprob_and_entropy(whole)
    normaliser = whole[0] + whole[1].log()
    own = -d_logprob * logprob.expm1()  # 1 - p cancels where p is close to 1
    rest = -d_logprob
    if d_entropy is not None:
        own = own - d_entropy * logprob.exp() * (logprob + entropy)
        rest = rest - d_entropy * entropy
    sink = GradientSink(hidden, shard, is_partial=True)
    for rows in chunks(len(hidden), len(shard), sink.dtype.itemsize, CHUNK_BYTES):
        scale = rows_of(inverse_temperature, rows)
        logprobs = _logits(hidden[rows], shard, scale).sub_(normaliser[rows, None])
        factor = rest[rows, None]
        if d_entropy is not None:
            factor = factor - d_entropy[rows, None] * logprobs
        gradient = logprobs.exp() * factor
        columns, here = _own_columns(tokens[rows] - first_row, len(shard))
        there = gradient.gather(1, columns).squeeze(1)
        gradient.scatter_(1, columns, own[rows].where(here, there)[:, None])
        sink.add(rows, gradient, scale)
    return sink.gradients()


def _logits(hidden: Tensor, shard: Tensor, inverse_temperature: float | Tensor) -> Tensor:
    logits = matmul(at_least(hidden, MIN_ROWS), shard.T)[: len(hidden)]
    return logits.mul_(column(inverse_temperature, logits.dtype))


def _own_columns(columns: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Each token's column `[T, 1]`, 0 where it is not in this shard, and whether it is `[T]`."""
    here = (columns >= 0) & (columns < num_columns)
    return columns.where(here, 0)[:, None], here
