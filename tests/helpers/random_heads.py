"""Heads, gradients and what fp64 makes of them, for tests and benchmarks.

Shapes: `T` tokens, `V` vocabulary, `D` hidden.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mage_kernels import Surrogate, TokenData, linear_logprob
from mage_kernels.chunked import computing_dtype
from mage_kernels.surrogate import token_losses


class Head(NamedTuple):
    """Arguments of `linear_logprob`."""

    hidden: Tensor
    head: Tensor
    tokens: Tensor
    inverse_temperature: float = 1.0

    def double(self) -> "Head":
        """The same numbers in fp64."""
        return self._replace(hidden=self.hidden.double(), head=self.head.double())


class Results(NamedTuple):
    """What forward and backward gave."""

    logprob: Tensor
    entropy: Tensor
    d_hidden: Tensor
    d_head: Tensor


def random_head(
    num_tokens: int,
    vocabulary: int,
    width: int,
    *,
    device: str,
    inverse_temperature: float = 1.0,
    largest_logit: float = 8.0,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Head:
    """Normal hidden states and head; the largest raw logit is about `largest_logit`."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, width, generator=generator)
    head = torch.randn(vocabulary, width, generator=generator)
    head *= largest_logit / (hidden @ head.T).abs().max()
    tokens = torch.randint(vocabulary, (num_tokens,), generator=generator)
    return Head(
        hidden.to(device, dtype), head.to(device, dtype), tokens.to(device), inverse_temperature
    )


def exactly_summed_head(num_tokens: int, vocabulary: int, width: int, *, device: str) -> Head:
    """Quarters and eighths: their fp32 dot products are exact in whatever order they are summed.

    The BLAS under Triton's interpreter sums a row in another order at another place in its tile;
    with these numbers, results depend on a row's place only where a kernel makes them.
    """
    hidden, head, tokens, _ = random_head(num_tokens, vocabulary, width, device=device)
    return Head((hidden * 4).round() / 4, (head / head.abs().max() * 16).round() / 8, tokens)


def random_gradients(num_tokens: int, device: str, seed: int = 1) -> tuple[Tensor, Tensor]:
    """One for each log-prob, one for each entropy."""
    both = torch.randn(2, num_tokens, generator=torch.Generator().manual_seed(seed)).to(device)
    return both[0], both[1]


def run(arguments: Head, gradients: tuple[Tensor, Tensor], function=linear_logprob, **options):
    """Forward and backward."""
    hidden = arguments.hidden.clone().requires_grad_()
    head = arguments.head.clone().requires_grad_()
    outputs = function(hidden, head, *arguments[2:], **options)
    torch.autograd.backward(outputs, [g.to(outputs[0].dtype) for g in gradients])
    return Results(*(output.detach() for output in outputs), hidden.grad, head.grad)


# The functions below specify the LM head in plain PyTorch. They are written to be read, not to be
# fast: they store the whole `[T, V]` matrix of logits, and autograd computes the gradients. fp64
# inputs are computed in fp64, all others in fp32.


def plain_logprob(
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


def plain_policy_loss(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    data: TokenData,
    loss: Surrogate,
    inverse_temperature: float = 1.0,
) -> Tensor:
    """Compute the loss of each token; the policy loss is their sum, divided by the normaliser."""
    logprob, entropy = plain_logprob(hidden, head, tokens, inverse_temperature)
    return token_losses(logprob, entropy, data, loss)


def truth(arguments: Head, gradients: tuple[Tensor, Tensor]) -> Results:
    """The reference in fp64."""
    return run(arguments.double(), gradients, plain_logprob)


def relative_error(ours: Tensor, true: Tensor) -> float:
    """Relative Frobenius error."""
    return float((ours.double() - true).norm() / true.norm())
