"""Kernel: log-prob, entropy and normaliser of each row of logits that exist already, in one read.

Every lane carries its own maximum and sums; lanes meet once a row, where a reduction per block
would put two barriers into each of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mage_kernels.chunked_rows import ONCE
from mage_kernels.fused.coefficients import Coefficients
from mage_kernels.fused.launching import LOG2E, per_row, row_vectors
from mage_kernels.fused.own_gradient import own_gradient
from mage_kernels.fused.row_gradient import row_gradient

BLOCKS = {"BLOCK_V": 4096}
OPTIONS = {"num_warps": 8}
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)  # finite: a logit of -inf against a maximum of -inf would give NaN


@triton.jit
def row_softmax_kernel(
    logits_ptr,
    tokens_ptr,
    scale_ptr,
    logprob_ptr,
    entropy_ptr,
    normaliser_ptr,
    V,
    stride,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    scale = tl.load(scale_ptr + row)
    m = tl.full((BLOCK_V,), LOWEST, tl.float32)
    s = tl.zeros((BLOCK_V,), tl.float32)
    w = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, V, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        z = tl.load(logits_ptr + column, mask=column < V, other=float("-inf")).to(tl.float32)
        z = tl.maximum(z * scale, LOWEST)
        new_m = tl.maximum(m, z)
        decay = tl.exp2(m - new_m)
        p = tl.exp2(z - new_m)  # 1 where all so far is -inf, and wiped out by what comes
        s = s * decay + p
        w = w * decay + p * z
        m = new_m
    top = tl.max(m, 0)
    decay = tl.exp2(m - top)
    total = tl.sum(s * decay, 0)
    mean = tl.sum(w * decay, 0) / total
    normaliser = top + tl.log2(total)
    own = tl.load(logits_ptr + tl.load(tokens_ptr + row)).to(tl.float32) * scale
    tl.store(logprob_ptr + row, tl.minimum((own - normaliser) * LN2, 0.0))
    tl.store(entropy_ptr + row, tl.maximum((normaliser - mean) * LN2, 0.0))
    tl.store(normaliser_ptr + row, normaliser)


def row_softmax(
    logits: Tensor, tokens: Tensor, inverse_temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy (nats) and log2 of the normaliser, fp32 `[T]` each, of logits `[T, V]`."""
    num_rows, vocabulary = logits.shape
    logprob, entropy, normaliser = row_vectors(3, num_rows, logits.device)
    row_softmax_kernel[(num_rows,)](
        logits,
        tokens,
        inverse_temperature * LOG2E,
        logprob,
        entropy,
        normaliser,
        vocabulary,
        logits.stride(0),
        **BLOCKS,
        **OPTIONS,
    )
    return logprob, entropy, normaliser


class FusedRows(torch.autograd.Function):
    """`reference.token_logprob_and_entropy` by Triton kernels. Differentiable once."""

    @staticmethod
    def forward(ctx, logits, tokens, inverse_temperature, overwrite_logits):
        logits, tokens = logits.contiguous(), tokens.contiguous()
        inverse_temperature = per_row(inverse_temperature, len(logits), logits.device)
        if len(logits):
            results = row_softmax(logits, tokens, inverse_temperature)
        else:
            results = row_vectors(3, 0, logits.device)
        ctx.save_for_backward(logits, tokens, inverse_temperature, *results)
        ctx.overwrites, ctx.is_overwritten = overwrite_logits, False
        ctx.set_materialize_grads(False)
        return results[0], results[1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_logprob, d_entropy):
        if d_logprob is None and d_entropy is None:
            return (None,) * 4
        if ctx.is_overwritten:
            raise RuntimeError(ONCE)
        logits, tokens, inverse_temperature, logprob, entropy, normaliser = ctx.saved_tensors
        coefficients = Coefficients.of(
            logprob, entropy, normaliser, inverse_temperature, d_logprob, d_entropy
        )
        gradient = logits.detach() if ctx.overwrites else torch.empty_like(logits)
        ctx.is_overwritten = ctx.overwrites
        if len(logits):
            row_gradient(gradient, logits, coefficients)
            own_gradient(gradient, tokens, coefficients.own, first_column=0)
        return gradient, None, None, None
