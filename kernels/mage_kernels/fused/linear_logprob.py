"""The head on Hopper and Blackwell: fused forward, and a backward by chunks of the vocabulary.

Every logit's gradient is formed once, in 16 bits, for one chunk of columns; dW's slice is then one
GEMM over all rows and dX is accumulated in fp32. Rows whose exp-scaled logits were kept need no
second logits GEMM: three GEMMs instead of four. No atomics, no locks: two runs give the same bits.

Shapes: `T` tokens, `V` vocabulary, `D` hidden, `R` rows with a gradient, `C` columns of a chunk.
"""

import torch
from torch import Tensor

from mage_kernels.compaction import rows_with_gradient
from mage_kernels.fused.coefficients import Coefficients
from mage_kernels.fused.kept_gradient import kept_gradient
from mage_kernels.fused.kept_logits import KeptLogits, num_kept_rows
from mage_kernels.fused.launching import add_product, padded_buffer, per_row
from mage_kernels.fused.logit_partials import logit_partials
from mage_kernels.fused.merged_partials import merged_partials
from mage_kernels.fused.own_gradient import own_gradient
from mage_kernels.fused.recomputed_gradient import recomputed_gradient

CHUNK_COLUMNS = 8192


def forward_rows(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    inverse_temperature: Tensor,
    kept: KeptLogits | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy and log2 of the normaliser `[T]`; fills `kept` with the first rows."""
    num_kept = 0 if kept is None else len(kept.values)
    partials = [
        logit_partials(hidden[rows], head, inverse_temperature[rows], target)
        for rows, target in ((slice(num_kept), kept), (slice(num_kept, None), None))
        if len(hidden[rows])
    ]
    return merged_partials(torch.cat(partials, -1), hidden, head, tokens, inverse_temperature)


class FusedLogprob(torch.autograd.Function):
    """`reference.linear_logprob` by Triton kernels. Differentiable once."""

    @staticmethod
    def forward(ctx, hidden, head, tokens, inverse_temperature, keep_bytes):
        hidden, head, tokens = hidden.contiguous(), head.contiguous(), tokens.contiguous()
        inverse_temperature = per_row(inverse_temperature, len(hidden), hidden.device)
        num_kept = num_kept_rows(keep_bytes, len(hidden), len(head), hidden.itemsize)
        is_kept = num_kept and any(ctx.needs_input_grad)
        ctx.kept = KeptLogits.empty(num_kept, len(head), hidden) if is_kept else None
        if len(hidden):
            results = forward_rows(hidden, head, tokens, inverse_temperature, ctx.kept)
        else:
            results = (torch.empty_like(inverse_temperature) for _ in range(3))
        logprob, entropy, normaliser = results
        ctx.save_for_backward(
            hidden, head, tokens, inverse_temperature, logprob, entropy, normaliser
        )
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_logprob, d_entropy):
        if d_logprob is None and d_entropy is None:
            return (None,) * 5
        hidden, head, tokens, inverse_temperature, logprob, entropy, normaliser = ctx.saved_tensors
        coefficients = Coefficients.of(
            logprob, entropy, normaliser, inverse_temperature, d_logprob, d_entropy
        )
        active = rows_with_gradient(d_logprob, d_entropy)
        is_frozen = not ctx.needs_input_grad[1]
        if active is None:
            active = torch.arange(len(hidden), device=hidden.device)
            some, d_head = backward_rows(
                hidden, head, tokens, coefficients, ctx.kept, active, is_frozen=is_frozen
            )
            d_hidden = some.to(hidden.dtype)
        else:
            d_hidden = torch.zeros_like(hidden)
            some, d_head = backward_rows(
                hidden[active],
                head,
                tokens[active],
                coefficients[active],
                ctx.kept,
                active,
                is_frozen=is_frozen,
            )
            d_hidden[active] = some.to(hidden.dtype)
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
    """dX `[R, D]` in fp32 and dW `[V, D]` of rows from `source_rows` `[R]` of the forward; the dW
    of a frozen head is None.
    """
    num_rows, width = hidden.shape
    if not num_rows:
        d_head = None if is_frozen else torch.zeros_like(head)
        return torch.empty_like(hidden, dtype=torch.float32), d_head
    is_kept = slice(0) if kept is None else slice(count_below(source_rows, len(kept.values)))
    is_recomputed = slice(is_kept.stop, None)
    d_head = None if is_frozen else torch.empty_like(head)
    d_hidden = torch.zeros((num_rows, width), dtype=torch.float32, device=hidden.device)
    buffer = padded_buffer(num_rows, min(CHUNK_COLUMNS, len(head)), hidden.dtype, hidden.device)
    for first in range(0, len(head), CHUNK_COLUMNS):
        columns = slice(first, min(first + CHUNK_COLUMNS, len(head)))
        gradient = buffer[:, : columns.stop - first]
        if len(kept_part := gradient[is_kept]):
            kept_gradient(kept_part, kept, source_rows[is_kept], coefficients[is_kept], first)
        if len(part := gradient[is_recomputed]):
            recomputed_gradient(
                part, hidden[is_recomputed], head, coefficients[is_recomputed], first
            )
        own_gradient(gradient, tokens, coefficients.own, first)
        if d_head is not None:
            torch.mm(gradient.T, hidden, out=d_head[columns])
        add_product(d_hidden, gradient, head[columns])
    return d_hidden, d_head


def count_below(ascending: Tensor, bound: int) -> int:
    """How many of ascending integers are below `bound`; free where all are."""
    return int(torch.searchsorted(ascending, bound))
