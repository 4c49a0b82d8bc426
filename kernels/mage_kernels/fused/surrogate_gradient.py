"""The Triton kernel of the token-level policy loss: loss, derivatives, and sums for metrics.

It computes the terms of `mage_kernels.surrogate.token_terms`, with derivatives derived by hand; a
test compares them with autograd. The parameters of the loss are compile-time constants, because
Python floats as run-time arguments would promote the arithmetic to fp64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mage_kernels.fused.head_kernels import row_vectors
from mage_kernels.surrogate import MAX_LOG_RATIO, SUMS, Surrogate, TokenData

BLOCKS = {"BLOCK_T": 256}
OPTIONS = {"num_warps": 4}


@triton.jit
def k3(d):
    """Compute `e^d - d - 1`, near 0 by its series, where the formula cancels."""
    series = d * d * (0.5 + d * (1.0 / 6 + d * (1.0 / 24 + d * (1.0 / 120))))
    return tl.where(tl.abs(d) < 0.125, series, tl.exp(d) - d - 1.0)


@triton.jit
def surrogate_gradient_kernel(
    logprob_ptr,
    entropy_ptr,
    behaviour_ptr,
    proximal_ptr,
    reference_ptr,
    advantage_ptr,
    entropy_weight_ptr,
    inverse_normaliser_ptr,
    d_logprob_ptr,
    d_entropy_ptr,
    sums_ptr,
    T,
    CLIP_LOW: tl.constexpr,
    CLIP_HIGH: tl.constexpr,
    DUAL_CLIP: tl.constexpr,
    WEIGHT_CAP: tl.constexpr,
    KL_COEFFICIENT: tl.constexpr,
    ENTROPY_COEFFICIENT: tl.constexpr,
    MAX_LOG_RATIO: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < T
    logprob = tl.load(logprob_ptr + token, mask=is_token, other=0.0)
    entropy = tl.load(entropy_ptr + token, mask=is_token, other=0.0)
    behaviour = tl.load(behaviour_ptr + token, mask=is_token, other=0.0).to(tl.float32)
    advantage = tl.load(advantage_ptr + token, mask=is_token, other=0.0).to(tl.float32)
    proximal = behaviour
    if proximal_ptr is not None:
        proximal = tl.load(proximal_ptr + token, mask=is_token, other=0.0).to(tl.float32)

    log_ratio = logprob - proximal
    ratio = tl.exp(tl.minimum(tl.maximum(log_ratio, -MAX_LOG_RATIO), MAX_LOG_RATIO))
    plain = -advantage * ratio
    clipped = -advantage * tl.minimum(tl.maximum(ratio, 1.0 - CLIP_LOW), 1.0 + CLIP_HIGH)
    is_clipped = clipped > plain
    surrogate = tl.where(is_clipped, clipped, plain)
    is_dual = token < 0
    if DUAL_CLIP is not None:
        bound = -advantage * DUAL_CLIP
        is_dual = (advantage < 0) & (surrogate > bound)
        surrogate = tl.where(is_dual, bound, surrogate)
    is_flat = is_clipped | is_dual | (tl.abs(log_ratio) > MAX_LOG_RATIO)

    raw_log_weight = proximal - behaviour
    raw_weight = tl.exp(tl.minimum(tl.maximum(raw_log_weight, -MAX_LOG_RATIO), MAX_LOG_RATIO))
    weight = raw_weight
    if WEIGHT_CAP is not None:
        weight = tl.minimum(raw_weight, WEIGHT_CAP)
    bonus = tl.zeros_like(logprob) + ENTROPY_COEFFICIENT
    if entropy_weight_ptr is not None:
        bonus *= tl.load(entropy_weight_ptr + token, mask=is_token, other=0.0).to(tl.float32)
    loss = weight * surrogate - bonus * entropy
    d_logprob = tl.where(is_flat, 0.0, -advantage * ratio * weight)
    reference_k3 = tl.zeros_like(logprob)
    if reference_ptr is not None:
        reference = tl.load(reference_ptr + token, mask=is_token, other=0.0).to(tl.float32)
        distance = reference - logprob
        cut = tl.minimum(tl.maximum(distance, -MAX_LOG_RATIO), MAX_LOG_RATIO)
        reference_k3 = k3(cut)
        slope = tl.where(tl.abs(distance) > MAX_LOG_RATIO, 0.0, 1.0 - tl.exp(cut))
        loss += KL_COEFFICIENT * reference_k3
        d_logprob += KL_COEFFICIENT * slope
    inverse_normaliser = tl.load(inverse_normaliser_ptr)
    tl.store(d_logprob_ptr + token, d_logprob * inverse_normaliser, mask=is_token)
    if ENTROPY_COEFFICIENT != 0:
        tl.store(d_entropy_ptr + token, -bonus * inverse_normaliser, mask=is_token)

    drift = logprob - behaviour
    behaviour_k3 = k3(tl.minimum(tl.maximum(drift, -MAX_LOG_RATIO), MAX_LOG_RATIO))
    one = tl.zeros_like(logprob) + 1.0
    # In the order of mage_kernels.surrogate.SUMS.
    at = sums_ptr + tl.program_id(0) * 13
    tl.store(at, tl.sum(tl.where(is_token, one, 0.0), 0))
    tl.store(at + 1, tl.sum(tl.where(is_token, loss, 0.0), 0))
    tl.store(at + 2, tl.sum(tl.where(is_token, surrogate, 0.0), 0))
    tl.store(at + 3, tl.sum(tl.where(is_token, logprob, 0.0), 0))
    tl.store(at + 4, tl.sum(tl.where(is_token, entropy, 0.0), 0))
    tl.store(at + 5, tl.sum(tl.where(is_token, reference_k3, 0.0), 0))
    tl.store(at + 6, tl.sum(tl.where(is_token, ratio, 0.0), 0))
    tl.store(at + 7, tl.sum(tl.where(is_token & is_clipped, one, 0.0), 0))
    tl.store(at + 8, tl.sum(tl.where(is_token & is_dual, one, 0.0), 0))
    tl.store(at + 9, tl.sum(tl.where(is_token, weight, 0.0), 0))
    tl.store(at + 10, tl.sum(tl.where(is_token, weight * weight, 0.0), 0))
    tl.store(at + 11, tl.sum(tl.where(is_token & (weight < raw_weight), one, 0.0), 0))
    tl.store(at + 12, tl.sum(tl.where(is_token, behaviour_k3, 0.0), 0))


def surrogate_gradient(
    logprob: Tensor, entropy: Tensor, data: TokenData, loss: Surrogate, inverse_normaliser: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return sums of each block, `[blocks, len(SUMS)]`, and derivatives by log-prob and entropy,
    `[T]`.

    `data.mask` is not read: masked rows have been removed before. The derivative by the entropy is
    None if `entropy_coefficient` is 0.

    Args:
        inverse_normaliser: fp32 `[1]`.
    """
    num_rows = len(logprob)
    num_blocks = triton.cdiv(num_rows, BLOCKS["BLOCK_T"])
    sums = torch.empty((num_blocks, len(SUMS)), dtype=torch.float32, device=logprob.device)
    d_logprob, d_entropy = row_vectors(2, num_rows, logprob.device)
    surrogate_gradient_kernel[(num_blocks,)](
        logprob,
        entropy,
        data.behaviour_logprobs,
        data.proximal_logprobs,
        data.reference_logprobs,
        data.advantages,
        data.entropy_weights,
        inverse_normaliser,
        d_logprob,
        d_entropy,
        sums,
        num_rows,
        CLIP_LOW=loss.clip_low,
        CLIP_HIGH=loss.clip_high,
        DUAL_CLIP=loss.dual_clip,
        WEIGHT_CAP=loss.weight_cap,
        KL_COEFFICIENT=loss.kl_coefficient,
        ENTROPY_COEFFICIENT=loss.entropy_coefficient,
        MAX_LOG_RATIO=MAX_LOG_RATIO,
        **BLOCKS,
        **OPTIONS,
    )
    return sums, d_logprob, d_entropy if loss.entropy_coefficient else None
