"""Compute the token-level policy loss and its derivatives by a Triton kernel.

It computes `mage_kernels.surrogate.token_losses`, with derivatives derived by hand; a test compares
them with autograd. The parameters of the loss are compile-time constants, because Python floats as
run-time arguments would promote the arithmetic to fp64.
"""

import triton
import triton.language as tl
from torch import Tensor

from mage_kernels.fused.head_kernels import row_vectors
from mage_kernels.surrogate import MAX_LOG_RATIO, Surrogate, TokenData

BLOCKS = {"BLOCK_T": 256}
"""Number of tokens of a program."""
OPTIONS = {"num_warps": 4}
"""Options of the kernel's launch."""


@triton.jit
def k3(d):
    """Compute `e^d - d - 1`, near 0 by its series, where the formula cancels."""
    series = d * d * (0.5 + d * (1.0 / 6 + d * (1.0 / 24 + d * (1.0 / 120))))
    return tl.where(tl.abs(d) < 0.125, series, tl.exp(d) - d - 1.0)


@triton.jit
def surrogate_gradient_kernel(
    logprob_ptr,
    entropy_ptr,
    advantage_ptr,
    anchor_ptr,
    reference_ptr,
    entropy_rate_ptr,
    inverse_normaliser_ptr,
    d_logprob_ptr,
    d_entropy_ptr,
    losses_ptr,
    T,
    CLIP_LOW: tl.constexpr,
    CLIP_HIGH: tl.constexpr,
    DUAL_CLIP: tl.constexpr,
    KL_COEFFICIENT: tl.constexpr,
    MAX_LOG_RATIO: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Compute the losses and derivatives of BLOCK_T tokens; see `surrogate_gradient`.

    The pointers from `advantage_ptr` to `entropy_rate_ptr` are the fields of `TokenData`; the
    anchor is the log-prob that the ratio is relative to.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < T
    logprob = tl.load(logprob_ptr + token, mask=is_token, other=0.0)
    advantage = tl.load(advantage_ptr + token, mask=is_token, other=0.0).to(tl.float32)
    anchor = tl.load(anchor_ptr + token, mask=is_token, other=0.0).to(tl.float32)
    inverse_normaliser = tl.load(inverse_normaliser_ptr)

    log_ratio = logprob - anchor
    ratio = tl.exp(tl.minimum(tl.maximum(log_ratio, -MAX_LOG_RATIO), MAX_LOG_RATIO))
    plain = -advantage * ratio
    clipped = -advantage * tl.minimum(tl.maximum(ratio, 1.0 - CLIP_LOW), 1.0 + CLIP_HIGH)
    loss = tl.where(clipped > plain, clipped, plain)
    # Where the loss is constant in the log-prob, its derivative is 0.
    is_flat = (clipped > plain) | (tl.abs(log_ratio) > MAX_LOG_RATIO)
    if DUAL_CLIP is not None:
        bound = -advantage * DUAL_CLIP
        is_dual = (advantage < 0) & (loss > bound)
        loss = tl.where(is_dual, bound, loss)
        is_flat = is_flat | is_dual
    d_logprob = tl.where(is_flat, 0.0, -advantage * ratio)
    if reference_ptr is not None:
        reference = tl.load(reference_ptr + token, mask=is_token, other=0.0).to(tl.float32)
        distance = reference - logprob
        cut = tl.minimum(tl.maximum(distance, -MAX_LOG_RATIO), MAX_LOG_RATIO)
        slope = tl.where(tl.abs(distance) > MAX_LOG_RATIO, 0.0, 1.0 - tl.exp(cut))
        loss += KL_COEFFICIENT * k3(cut)
        d_logprob += KL_COEFFICIENT * slope
    if entropy_rate_ptr is not None:
        rate = tl.load(entropy_rate_ptr + token, mask=is_token, other=0.0).to(tl.float32)
        loss -= rate * tl.load(entropy_ptr + token, mask=is_token, other=0.0)
        tl.store(d_entropy_ptr + token, -rate * inverse_normaliser, mask=is_token)
    tl.store(d_logprob_ptr + token, d_logprob * inverse_normaliser, mask=is_token)
    tl.store(losses_ptr + tl.program_id(0), tl.sum(tl.where(is_token, loss, 0.0), 0))


def surrogate_gradient(
    logprob: Tensor, entropy: Tensor, data: TokenData, loss: Surrogate, inverse_normaliser: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the sum of losses of each block, `[blocks]`, not normalised, and normalised
    derivatives by log-prob and entropy, `[T]`; the last is None without an entropy bonus.

    Args:
        inverse_normaliser: Factor of the derivatives: fp32 `[1]`.
    """
    num_rows = len(logprob)
    num_blocks = triton.cdiv(num_rows, BLOCKS["BLOCK_T"])
    (losses,) = row_vectors(1, num_blocks, logprob.device)
    d_logprob, d_entropy = row_vectors(2, num_rows, logprob.device)
    surrogate_gradient_kernel[(num_blocks,)](
        logprob,
        entropy,
        *data,
        inverse_normaliser,
        d_logprob,
        d_entropy,
        losses,
        num_rows,
        CLIP_LOW=loss.clip_low,
        CLIP_HIGH=loss.clip_high,
        DUAL_CLIP=loss.dual_clip,
        KL_COEFFICIENT=loss.kl_coefficient,
        MAX_LOG_RATIO=MAX_LOG_RATIO,
        **BLOCKS,
        **OPTIONS,
    )
    return losses, d_logprob, None if data.entropy_rates is None else d_entropy
