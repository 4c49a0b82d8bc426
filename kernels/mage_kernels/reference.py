"""Specify the LM head's kernels in plain PyTorch.

The code is written to be read, not to be fast: it stores the whole `[T, V]` matrix of logits, and
autograd computes the gradients. fp64 inputs are computed in fp64, all others in fp32.

Shapes: `T` tokens, `V` vocabulary, `D` hidden.
"""

import torch
from torch import Tensor

from mage_kernels.surrogate import Surrogate, TokenData, token_losses


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64 inputs, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def linear_logprob(
    hidden: Tensor, head: Tensor, tokens: Tensor, inverse_temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of each token and the entropy of its distribution, in nats.

    The distribution is `softmax(inverse_temperature * hidden @ head.T)`.

    Args:
        hidden: `[T, D]`.
        head: `[V, D]`.
        tokens: `[T]`, int64.

    Returns:
        Log-prob `[T]` and entropy `[T]`: fp32, or fp64 for fp64 inputs.
    """
    dtype = computing_dtype(hidden.dtype)
    logits = hidden.to(dtype) @ head.to(dtype).T * inverse_temperature  # [T, V]
    logprobs = logits.log_softmax(-1)
    probs = logprobs.exp()
    return logprobs.gather(-1, tokens[:, None]).squeeze(-1), -(probs * logprobs).sum(-1)


def linear_policy_loss(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    data: TokenData,
    loss: Surrogate,
    inverse_temperature: float = 1.0,
) -> Tensor:
    """Compute the loss of each token; the policy loss is their sum, divided by the normaliser."""
    logprob, entropy = linear_logprob(hidden, head, tokens, inverse_temperature)
    return token_losses(logprob, entropy, data, loss)
