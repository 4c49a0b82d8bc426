"""The language-model head and what RL wants of it, without ever storing its logits whole.

Shapes: `T` tokens, `V` vocabulary, `D` hidden.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mage_kernels.chunked import (
    CHUNK_BYTES,
    ChunkedLogprob,
    ChunkedPolicyLoss,
    chunk_bytes_on,
    rows_at_once,
    rows_of,
)
from mage_kernels.compaction import masked_rows, scattered
from mage_kernels.dispatch import is_fused_head
from mage_kernels.reference import computing_dtype
from mage_kernels.surrogate import Surrogate, TokenData


class PolicyLoss(NamedTuple):
    """What one pass over the head gives; only `loss` carries a gradient."""

    loss: Tensor
    """Scalar: the sum over the masked tokens, divided by the normaliser."""
    sums: Tensor
    """`[len(SUMS)]` on the device: sums over the masked tokens, named by `mage_kernels.SUMS`."""
    logprob: Tensor
    """`[T]`, 0 outside the mask"""
    entropy: Tensor
    """`[T]`, 0 outside the mask"""


def linear_logprob(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    inverse_temperature: float | Tensor = 1.0,
    *,
    mask: Tensor | None = None,
    keep_bytes: int = 0,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each token and entropy of the distribution it was drawn from, in nats.

    The distribution is `softmax(inverse_temperature * hidden @ head.T)`. Any gradient per token may
    flow into either result; tokens where both are exactly 0 cost nothing in the backward pass.

    Args:
        hidden: `[T, D]`.
        head: `[V, D]`, of the same dtype.
        tokens: `[T]`, int64.
        inverse_temperature: one number, or `[T]`; above 0.
        mask: bool `[T]`; tokens outside cost nothing and get 0 and 0. On the host it costs no
            synchronisation.
        keep_bytes: on a GPU, how much of the exp-scaled logits (2 bytes each) may be kept for the
            backward pass, which then needs no second logits GEMM for those rows. 0 computes all of
            them again: least memory.

    Returns:
        log-prob `[T]` and entropy `[T]`: fp32, or fp64 for fp64 inputs.
    """
    _check(hidden, head, tokens, inverse_temperature, mask)
    index = None if mask is None else masked_rows(mask, hidden.device)
    if index is not None:
        results = _linear_logprob(
            hidden.index_select(0, index),
            head,
            tokens[index],
            rows_of(inverse_temperature, index),
            keep_bytes,
        )
        return tuple(scattered(result, index, len(hidden)) for result in results)
    return _linear_logprob(hidden, head, tokens, inverse_temperature, keep_bytes)


def keeps_logits(hidden: Tensor, head: Tensor) -> bool:
    """Whether `linear_logprob` keeps by itself what its backward pass needs of the logits.

    Where it does, `linear_policy_loss` has nothing to save. Plain PyTorch keeps one chunk; the
    Triton kernels keep what `keep_bytes` says, which is nothing unless told.
    """
    itemsize = computing_dtype(hidden.dtype).itemsize
    fits = len(hidden) <= rows_at_once(len(head), itemsize, CHUNK_BYTES)
    return fits and not is_fused_head(hidden)


def linear_policy_loss(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    *,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    normaliser: float | Tensor,
    proximal_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    inverse_temperature: float | Tensor = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    weight_cap: float | None = None,
    kl_coefficient: float = 0.0,
    entropy_coefficient: float = 0.0,
    entropy_weights: Tensor | None = None,
) -> PolicyLoss:
    """The token-level policy loss with its gradients, in a single pass: three GEMMs, not four.

    `sum over the mask of (weight * surrogate + kl_coefficient * k3 - entropy_coefficient * entropy)
    / normaliser`, term by term in `mage_kernels.surrogate.token_terms`. dX and dW are computed
    here, not in `backward()`, which only scales them: call it under `no_grad` where no gradient is
    wanted.

    Args:
        hidden: `[T, D]`.
        head: `[V, D]`, of the same dtype.
        tokens: `[T]`, int64.
        behaviour_logprobs: `[T]`, under the policy that drew the tokens.
        advantages: `[T]`.
        mask: bool `[T]`: the tokens that count. The others cost nothing and may hold anything, NaN
            included.
        normaliser: the number of tokens of the whole step, over all its passes and ranks: known
            before the pass, or gradient accumulation would change the loss.
        proximal_logprobs: `[T]`, under the policy the ratio is clipped around; None means the
            behaviour policy.
        reference_logprobs: `[T]`, under the frozen policy of the KL term; needed where
            `kl_coefficient` is not 0.
        inverse_temperature: one number, or `[T]`; above 0.
        clip_low, clip_high: the ratio is clipped to `1 - clip_low .. 1 + clip_high`.
        dual_clip: for negative advantages the surrogate is at most `dual_clip` times their size.
        weight_cap: the constant weight `exp(proximal - behaviour)` is cut at this; None leaves it
            as it is.
        entropy_weights: `[T]`: a token's entropy bonus is so many times `entropy_coefficient`; None
            means once. On a GPU the coefficients are constants of a kernel: one that changes from
            step to step belongs here.
    """
    _check(hidden, head, tokens, inverse_temperature, mask)
    if kl_coefficient and reference_logprobs is None:
        raise ValueError(
            f"kl_coefficient is {kl_coefficient}, which needs reference_logprobs, got None"
        )
    loss = Surrogate(
        clip_low, clip_high, dual_clip, weight_cap, kl_coefficient, entropy_coefficient
    )
    num_rows, index = len(hidden), masked_rows(mask, hidden.device)
    everything = torch.ones(num_rows, dtype=torch.bool, device=hidden.device)
    data = TokenData(
        behaviour_logprobs,
        proximal_logprobs,
        reference_logprobs,
        advantages,
        everything,
        entropy_weights,
    )
    if index is not None:
        hidden, tokens, data = hidden.index_select(0, index), tokens[index], data.rows(index)
        inverse_temperature = rows_of(inverse_temperature, index)
    result = PolicyLoss(
        *_linear_policy_loss(hidden, head, tokens, data, loss, inverse_temperature, normaliser)
    )
    if index is None:
        return result
    return result._replace(
        logprob=scattered(result.logprob, index, num_rows),
        entropy=scattered(result.entropy, index, num_rows),
    )


def _linear_logprob(hidden, head, tokens, inverse_temperature, keep_bytes):
    if is_fused_head(hidden):
        from mage_kernels.fused.linear_logprob import FusedLogprob

        return FusedLogprob.apply(hidden, head, tokens, inverse_temperature, keep_bytes)
    chunk_bytes = chunk_bytes_on(hidden.device)
    return ChunkedLogprob.apply(hidden, head, tokens, inverse_temperature, chunk_bytes)


def _linear_policy_loss(hidden, head, tokens, data, loss, inverse_temperature, normaliser):
    arguments = (hidden, head, tokens, data, loss, inverse_temperature, normaliser)
    if is_fused_head(hidden):
        from mage_kernels.fused.linear_policy_loss import FusedPolicyLoss

        return FusedPolicyLoss.apply(*arguments)
    return ChunkedPolicyLoss.apply(*arguments, chunk_bytes_on(hidden.device))


def _check(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    inverse_temperature: float | Tensor,
    mask: Tensor | None,
) -> None:
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1]:
        raise ValueError(
            "hidden must be [T, D] and head [V, D], "
            f"got {list(hidden.shape)} and {list(head.shape)}"
        )
    if hidden.dtype != head.dtype or not hidden.dtype.is_floating_point:
        raise ValueError(
            f"hidden and head must share a floating dtype, got {hidden.dtype} and {head.dtype}"
        )
    shape = hidden.shape[:1]
    for name, tensor, dtype in (("tokens", tokens, torch.int64), ("mask", mask, torch.bool)):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
            got = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{name} must be {dtype} {list(shape)}, got {got}")
    if isinstance(inverse_temperature, Tensor):
        if inverse_temperature.shape not in ((), shape):
            got = list(inverse_temperature.shape)
            raise ValueError(f"inverse_temperature must be one number or {list(shape)}, got {got}")
    elif inverse_temperature <= 0:
        raise ValueError(f"inverse_temperature must be above 0, got {inverse_temperature}")
