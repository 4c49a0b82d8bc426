"""Compute the LM head: log-probs, entropies and the policy loss, without storing all logits.

Shapes: `T` tokens, `V` vocabulary, `D` hidden, `R` tokens drawn from sets of allowed tokens, `U`
tokens that any of the sets holds.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mage_kernels.chunked import (
    CHUNK_BYTES,
    ChunkedLogprob,
    ChunkedPolicyLoss,
    chunk_bytes_on,
    computing_dtype,
    masked_rows,
    rows_at_once,
    scattered,
    temperature_of_rows,
)
from mage_kernels.dispatch import is_fused_head
from mage_kernels.surrogate import Surrogate, TokenData


class PolicyLoss(NamedTuple):
    """Hold the result of one pass over the LM head; only `loss` has a gradient."""

    loss: Tensor
    """Sum over the tokens inside the mask, divided by the normaliser; a scalar."""
    logprob: Tensor
    """Log-prob in nats, `[T]`; 0 outside the mask."""
    entropy: Tensor
    """Entropy in nats, `[T]`; 0 outside the mask."""


def linear_logprob(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    inverse_temperature: float | Tensor = 1.0,
    *,
    mask: Tensor | None = None,
    keep_bytes: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of each token and the entropy of its distribution, in nats.

    The distribution is `softmax(inverse_temperature * hidden @ head.T)`. Both results are
    differentiable. Tokens whose incoming gradients are exactly 0 cost nothing in the backward pass.

    Args:
        hidden: `[T, D]`.
        head: `[V, D]`, of the same dtype.
        tokens: `[T]`, int64.
        inverse_temperature: Inverse of the sampling temperature, above 0; or one for each token,
            fp32 `[T]`.
        mask: bool `[T]`; tokens outside cost nothing, and their results are 0. A mask on the host
            costs no synchronisation.
        keep_bytes: On a GPU, largest number of bytes of logits (2 bytes each) that are kept for the
            backward pass, which then needs no second logits GEMM for their rows. 0 keeps none.

    Returns:
        Log-prob `[T]` and entropy `[T]`: fp32, or fp64 for fp64 inputs.

    Raises:
        ValueError: shapes, dtypes or the temperature are wrong.
    """
    _check(hidden, head, tokens, inverse_temperature, mask)
    num_rows = len(hidden)
    index = None if mask is None else masked_rows(mask, hidden.device)
    if index is not None:
        hidden, tokens = hidden.index_select(0, index), tokens[index]
        inverse_temperature = temperature_of_rows(inverse_temperature, index)
    results: tuple[Tensor, Tensor]
    if is_fused_head(hidden):
        from mage_kernels.fused.head_autograd import FusedLogprob  # imports Triton

        results = FusedLogprob.apply(hidden, head, tokens, inverse_temperature, keep_bytes)
    else:
        chunk_bytes = chunk_bytes_on(hidden.device)
        results = ChunkedLogprob.apply(hidden, head, tokens, inverse_temperature, chunk_bytes)
    if index is None:
        return results
    logprob, entropy = results
    return scattered(logprob, index, num_rows), scattered(entropy, index, num_rows)


def restricted_logprob(
    hidden: Tensor,
    head: Tensor,
    columns: Tensor,
    mask: Tensor,
    targets: Tensor,
    inverse_temperature: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute log-prob and entropy, in nats, of tokens drawn from sets of allowed tokens.

    The distribution of row `r` is the softmax of `inverse_temperature * hidden[r] @ head[c]` over
    the tokens `c` of `columns` where `mask[r]` is True. Both results are differentiable.

    The cost is that of `U` rows of the LM head instead of `V`: a few dozen for the actions of a
    game, instead of tens of thousands.

    The arguments are not checked: a target outside of its row's set gets the log-prob 0, and a row
    with an empty set the entropy NaN.

    Args:
        hidden: `[R, D]`.
        head: `[V, D]`.
        columns: int64 `[U]`, token ids.
        mask: bool `[R, U]`: the set of each row, which holds its target.
        targets: int64 `[R]`: index of each row's token in `columns`.
        inverse_temperature: Inverse of the sampling temperature, above 0; or one for each row,
            fp32 `[R]`.

    Returns:
        Log-prob `[R]` and entropy `[R]`: fp32, or fp64 for fp64 inputs.
    """
    dtype = computing_dtype(hidden.dtype)
    logits = hidden.to(dtype) @ head.index_select(0, columns).to(dtype).T
    if isinstance(inverse_temperature, Tensor):
        inverse_temperature = inverse_temperature[:, None]
    logits = (logits * inverse_temperature).masked_fill(~mask, float("-inf"))
    logprobs = torch.log_softmax(logits, 1)
    # 0 instead of -inf outside of the sets: 0 * -inf would be nan, in the backward pass too.
    inside = logprobs.masked_fill(~mask, 0.0)
    entropy = -(inside * logprobs.exp()).sum(1)
    return inside.gather(1, targets[:, None])[:, 0], entropy


def keeps_logits(hidden: Tensor, head: Tensor) -> bool:
    """Return whether `linear_logprob` keeps all logits for its backward pass.

    If so, `linear_policy_loss` is no faster than `linear_logprob` and its backward pass. Plain
    PyTorch keeps the logits if they fit in one chunk; the Triton kernels keep `keep_bytes` of them,
    by default none.
    """
    itemsize = computing_dtype(hidden.dtype).itemsize
    fits = len(hidden) <= rows_at_once(len(head), itemsize, CHUNK_BYTES)
    return fits and not is_fused_head(hidden)


def linear_policy_loss(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    data: TokenData,
    loss: Surrogate,
    normaliser: float,
    inverse_temperature: float | Tensor = 1.0,
    *,
    mask: Tensor | None = None,
) -> PolicyLoss:
    """Compute a token-level policy loss and its gradients in one pass: three GEMMs, not four.

    The loss is the sum of `mage_kernels.surrogate.token_losses` over the mask, divided by
    `normaliser`. dX and dW are computed here, and `backward()` only scales them, so call this under
    `no_grad` if no gradient is needed.

    Args:
        hidden: `[T, D]`.
        head: `[V, D]`, of the same dtype.
        tokens: `[T]`, int64.
        data: Data of the tokens.
        loss: Parameters of the loss; on a GPU they are compile-time constants.
        normaliser: Number by which the sum of the tokens' losses is divided, above 0. It is the
            same for all micro-batches and ranks, whose gradients are added. The learner passes the
            mean number of sampled tokens of the step's minibatches.
        inverse_temperature: See `linear_logprob`.
        mask: See `linear_logprob`; data of tokens outside never reaches a result, not even NaN.

    Raises:
        ValueError: the shape or dtype of `hidden`, `head`, `tokens` or `mask` is wrong, or the
            temperature, or there is a KL term and no reference. Nothing else of `data` is checked.
    """
    _check(hidden, head, tokens, inverse_temperature, mask)
    if loss.kl_coefficient and data.reference_logprobs is None:
        raise ValueError(
            f"kl_coefficient is {loss.kl_coefficient}, which needs reference_logprobs, got None"
        )
    num_rows = len(hidden)
    index = None if mask is None else masked_rows(mask, hidden.device)
    if index is not None:
        hidden, tokens, data = hidden.index_select(0, index), tokens[index], data.rows(index)
        inverse_temperature = temperature_of_rows(inverse_temperature, index)
    arguments = (hidden, head, tokens, data, loss, inverse_temperature, normaliser)
    if is_fused_head(hidden):
        from mage_kernels.fused.head_autograd import FusedPolicyLoss  # imports Triton

        result = PolicyLoss(*FusedPolicyLoss.apply(*arguments))
    else:
        chunk_bytes = chunk_bytes_on(hidden.device)
        result = PolicyLoss(*ChunkedPolicyLoss.apply(*arguments, chunk_bytes))
    if index is None:
        return result
    return result._replace(
        logprob=scattered(result.logprob, index, num_rows),
        entropy=scattered(result.entropy, index, num_rows),
    )


def _check(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    inverse_temperature: float | Tensor,
    mask: Tensor | None,
) -> None:
    """Raise a ValueError if shapes, dtypes or the temperature are wrong."""
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
    by_row = inverse_temperature if isinstance(inverse_temperature, Tensor) else None
    for name, tensor, dtype in (
        ("tokens", tokens, torch.int64),
        ("mask", mask, torch.bool),
        ("inverse_temperature", by_row, torch.float32),
    ):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
            got = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{name} must be {dtype} {list(shape)}, got {got}")
    # Values on a device are not looked at, which would cost a synchronisation.
    if not isinstance(inverse_temperature, Tensor) and inverse_temperature <= 0:
        raise ValueError(f"inverse_temperature must be above 0, got {inverse_temperature}")
