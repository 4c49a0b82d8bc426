"""The specification, in plain PyTorch: what every kernel here must compute.

Written to be read and trusted, not to be fast. Given fp64 it computes in fp64, else in fp32, and
the whole `[T, V]` matrix of logits exists. Differentiable by autograd.

Shapes: `T` tokens, `V` vocabulary, `D` hidden.
"""

import torch
from torch import Tensor

from mage_kernels.surrogate import Surrogate, TokenData, TokenTerms, token_terms


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64; everything else is computed in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def column(inverse_temperature: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    """One number, or `[T, 1]`: what a `[T, V]` matrix is multiplied with."""
    if isinstance(inverse_temperature, Tensor) and inverse_temperature.ndim:
        return inverse_temperature.to(dtype)[:, None]
    return inverse_temperature


def linear_logprob(
    hidden: Tensor, head: Tensor, tokens: Tensor, inverse_temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-prob of each token and entropy of the distribution it was drawn from, in nats.

    The distribution is `softmax(inverse_temperature * hidden @ head.T)`; `inverse_temperature` is
    one number or `[T]`.

    Args:
        hidden: `[T, D]`.
        head: `[V, D]`.
        tokens: `[T]`, int64.

    Returns:
        log-prob `[T]` and entropy `[T]`, fp32, or fp64 for fp64 inputs.
    """
    dtype = computing_dtype(hidden.dtype)
    logits = hidden.to(dtype) @ head.to(dtype).T * column(inverse_temperature, dtype)  # [T, V]
    logprobs = logits.log_softmax(-1)
    probs = logprobs.exp()
    return logprobs.gather(-1, tokens[:, None]).squeeze(-1), -(probs * logprobs).sum(-1)


def linear_policy_loss(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    data: TokenData,
    loss: Surrogate,
    inverse_temperature: float | Tensor = 1.0,
) -> TokenTerms:
    """Terms of every token's policy loss; the loss proper is `terms.loss.sum() / normaliser`."""
    logprob, entropy = linear_logprob(hidden, head, tokens, inverse_temperature)
    return token_terms(logprob, entropy, data, loss)
