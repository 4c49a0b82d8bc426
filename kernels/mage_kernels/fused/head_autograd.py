"""Launch the Triton kernels of the LM head from autograd functions, for Hopper and Blackwell.

`FusedLogprob` computes the gradient of all logits once, in 16 bits, by chunks of columns: a chunk
gives its slice of dW by one GEMM over all rows, and dX is accumulated in fp32. The backward
recomputes logits by a GEMM, except those of rows that the forward has kept. `FusedPolicyLoss`
computes a loss and its gradients in a single pass over chunks of rows. There are no atomics and no
locks, so two runs give the same bits.

Shapes: `T` tokens, `V` vocabulary, `D` hidden, `R` rows with a gradient, `C` columns
of a chunk. dX is the gradient of the hidden states, dW that of the LM head.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mage_kernels.chunked import SinglePassLoss, rows_with_gradient
from mage_kernels.fused.head_kernels import (
    Coefficients,
    KeptLogits,
    add_product,
    kept_gradient,
    logit_partials,
    merged_partials,
    num_kept_rows,
    padded_buffer,
    product,
    recomputed_gradient,
    row_vectors,
    sampled_token_gradient,
    surrogate_gradient,
)
from mage_kernels.surrogate import Surrogate, TokenData

CHUNK_COLUMNS = 8192
"""Number of columns of logits whose gradient is in memory at a time; a multiple of the kernels'
tiles.
"""


def forward_rows(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    inverse_temperature: Tensor,
    kept: KeptLogits | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-prob, entropy and log2 of the softmax's normaliser, fp32 `[T]` each.

    Args:
        kept: Filled, if given, with the logits of the first `len(kept.values)` rows.
    """
    num_kept = 0 if kept is None else len(kept.values)
    partials = [
        logit_partials(hidden[rows], head, inverse_temperature[rows], target)
        for rows, target in ((slice(num_kept), kept), (slice(num_kept, None), None))
        if len(hidden[rows])
    ]
    return merged_partials(torch.cat(partials, -1), hidden, head, tokens, inverse_temperature)


def by_row(inverse_temperature: float | Tensor, hidden: Tensor) -> Tensor:
    """Return the inverse temperature of each row, fp32 `[T]`, as the kernels take it."""
    if isinstance(inverse_temperature, Tensor):
        return inverse_temperature.contiguous()
    size = (len(hidden),)
    return torch.full(size, inverse_temperature, dtype=torch.float32, device=hidden.device)


class FusedLogprob(torch.autograd.Function):
    """Compute log-prob and entropy by Triton kernels; differentiable once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        tokens: Tensor,
        inverse_temperature: float | Tensor,
        keep_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy of each token, fp32 `[T]` each, and keep the logits of as
        many rows as fit into `keep_bytes` for the backward.
        """
        hidden, head, tokens = hidden.contiguous(), head.contiguous(), tokens.contiguous()
        scales = by_row(inverse_temperature, hidden)
        num_kept = num_kept_rows(keep_bytes, len(hidden), len(head), hidden.itemsize)
        keeps = num_kept and any(ctx.needs_input_grad)
        kept = KeptLogits.empty(num_kept, len(head), hidden) if keeps else None
        results: Iterable[Tensor]
        if len(hidden):
            results = forward_rows(hidden, head, tokens, scales, kept)
        else:
            results = (torch.empty_like(scales) for _ in range(3))
        logprob, entropy, normaliser = results
        # Saved tensors are freed by the backward, attributes of `ctx` only with the whole graph.
        kept_tensors = (kept.values, kept.tile_max) if kept else ()
        ctx.save_for_backward(
            *(hidden, head, tokens, scales, logprob, entropy, normaliser), *kept_tensors
        )
        ctx.set_materialize_grads(False)  # a result that nobody uses has the gradient None, not 0
        return logprob, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_logprob, d_entropy):
        """Return the gradients of hidden states and LM head, from rows with a gradient alone."""
        if d_logprob is None and d_entropy is None:
            return (None,) * 5  # one for each argument of `forward`
        hidden, head, tokens, scales, logprob, entropy, normaliser, *kept = ctx.saved_tensors
        coefficients = Coefficients.of(logprob, entropy, normaliser, scales, d_logprob, d_entropy)
        active = rows_with_gradient(d_logprob, d_entropy)  # None: all rows
        rows = slice(None) if active is None else active
        d_active, d_head = backward_rows(
            hidden[rows],
            head,
            tokens[rows],
            coefficients.rows(rows),
            KeptLogits(*kept) if kept else None,
            torch.arange(len(hidden), device=hidden.device)[rows],
            is_frozen=not ctx.needs_input_grad[1],
        )
        d_hidden = d_active.to(hidden.dtype)
        if active is not None:
            d_hidden = torch.zeros_like(hidden).index_copy_(0, active, d_hidden)
        return d_hidden, d_head, None, None, None


def backward_rows(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    coefficients: Coefficients,
    kept: KeptLogits | None,
    source_rows: Tensor,
    *,
    is_frozen: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute dX `[R, D]` in fp32, and dW `[V, D]`, or None instead of dW if the LM head is frozen.

    Args:
        source_rows: Numbers that the rows had in the forward: int64 `[R]`, ascending.
    """
    num_rows, width = hidden.shape
    if not num_rows:
        d_head = None if is_frozen else torch.zeros_like(head)
        return torch.empty_like(hidden, dtype=torch.float32), d_head
    num_kept = 0
    # The forward kept its first rows, and `source_rows` ascend, so the first `num_kept` rows here
    # are kept ones.
    if kept is not None:
        # `int` waits for the device.
        num_kept = int(torch.searchsorted(source_rows, len(kept.values)))
    kept_rows, recomputed_rows = slice(num_kept), slice(num_kept, None)
    d_head = None if is_frozen else torch.empty_like(head)
    d_hidden = torch.zeros((num_rows, width), dtype=torch.float32, device=hidden.device)
    buffer = padded_buffer(num_rows, min(CHUNK_COLUMNS, len(head)), hidden.dtype, hidden.device)
    for first in range(0, len(head), CHUNK_COLUMNS):
        columns = slice(first, min(first + CHUNK_COLUMNS, len(head)))
        gradient = buffer[:, : columns.stop - first]
        if kept is not None and len(part := gradient[kept_rows]):
            part_coefficients = coefficients.rows(kept_rows)
            kept_gradient(part, kept, source_rows[kept_rows], part_coefficients, first)
        if len(part := gradient[recomputed_rows]):
            part_coefficients = coefficients.rows(recomputed_rows)
            recomputed_gradient(part, hidden[recomputed_rows], head, part_coefficients, first)
        sampled_token_gradient(gradient, tokens, coefficients.sampled, first)
        if d_head is not None:
            torch.mm(gradient.T, hidden, out=d_head[columns])
        add_product(d_hidden, gradient, head[columns])
    return d_hidden, d_head


# Single pass: the LM head and a token-level loss, in three GEMMs.
#
# The log-probs of a chunk of rows decide its loss and, because the loss of a token depends on that
# token alone, its gradients: the kept logits are turned into the logits' gradient in place, and two
# GEMMs give dX and dW. Every chunk reads and writes dW, fp32 `[V, D]` (3 GB of traffic at D = 2560
# and V = 152 thousand), so chunks are large. The host reads nothing, so the pass never waits for
# the device.

CHUNK_ROWS = 4096
"""Largest number of rows of a chunk."""
ROW_STEP = 128
"""The rows of every chunk but the last are a multiple of this, the row tile of the kernels."""


def even_chunks(num_rows: int) -> Iterator[slice]:
    """Cut rows into the fewest chunks of at most CHUNK_ROWS rows, of about equal length."""
    # `-(-a // b)` is a / b, rounded up. `range` needs a step of at least 1, also without rows.
    num_chunks = max(1, -(-num_rows // CHUNK_ROWS))
    step = -(-num_rows // (num_chunks * ROW_STEP)) * ROW_STEP
    return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step or 1))


class FusedPolicyLoss(SinglePassLoss):
    """Compute loss, log-probs and entropies; dX and dW in the same pass.

    `SinglePassLoss.backward` scales dX and dW, which the forward has saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        tokens: Tensor,
        data: TokenData,
        loss: Surrogate,
        inverse_temperature: float | Tensor,
        divisor: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, and log-prob and entropy of each token, `[T]` each.

        Args:
            divisor: divides the sum of the tokens' losses.
        """
        hidden, head, tokens = hidden.contiguous(), head.contiguous(), tokens.contiguous()
        data = TokenData._make(None if field is None else field.contiguous() for field in data)
        options: dict[str, Any] = {"dtype": torch.float32, "device": hidden.device}
        scales = by_row(inverse_temperature, hidden)
        inverse_divisor = torch.full((1,), divisor, **options).reciprocal()
        wants_gradient, is_frozen = any(ctx.needs_input_grad), not ctx.needs_input_grad[1]
        logprob, entropy = row_vectors(2, len(hidden), hidden.device)
        total = torch.zeros(1, **options)
        d_hidden, d_head = torch.empty_like(hidden), None
        for rows in even_chunks(len(hidden)):
            part, part_scales = hidden[rows], scales[rows]
            kept = KeptLogits.empty(len(part), len(head), hidden) if wants_gradient else None
            results = forward_rows(part, head, tokens[rows], part_scales, kept)
            logprob[rows], entropy[rows], _ = results
            losses, *derivatives = surrogate_gradient(
                *results[:2], data.rows(rows), loss, inverse_divisor
            )
            total += losses.sum()
            if kept is None:
                continue
            coefficients = Coefficients.of(*results, part_scales, *derivatives)
            # The gradient overwrites the kept logits: their memory is viewed in the inputs' type,
            # whose elements have the same size. Every row stays in its place.
            gradient = kept.values.view(hidden.dtype)
            in_place = torch.arange(len(part), device=hidden.device)
            kept_gradient(gradient, kept, in_place, coefficients, first_column=0)
            sampled_token_gradient(gradient, tokens[rows], coefficients.sampled, first_column=0)
            torch.mm(gradient, head, out=d_hidden[rows])
            if is_frozen:
                continue
            if d_head is None:
                d_head = product(gradient.T, part)
            else:
                add_product(d_head, gradient.T, part)
        if wants_gradient:
            if not is_frozen:
                d_head = torch.zeros_like(head) if d_head is None else d_head.to(head.dtype)
            ctx.save_for_backward(d_hidden, d_head)
        ctx.mark_non_differentiable(logprob, entropy)
        ctx.set_materialize_grads(False)  # those of log-prob and entropy are None, not 0
        return (total * inverse_divisor).squeeze(0), logprob, entropy
