"""Compute the token-level policy loss as a function of a token's log-prob and entropy.

The derivative at a token depends on that token only, so the loss can be computed in a single pass
over the LM head (`mage_kernels.head.linear_policy_loss`). That excludes ratios that mix tokens, as
in GSPO: these need `linear_logprob`.

Shapes: `T` tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Largest absolute log-ratio: it is clamped before `exp`, which could overflow. Beyond it a token
has no gradient through its ratio.
"""


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Hold the parameters of the loss: clipping and KL term."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    """Bounds of the ratio: it is clipped to `1 - clip_low .. 1 + clip_high`."""
    dual_clip: float | None = None
    """Upper bound of the surrogate divided by `|advantage|`, for negative advantages (Ye et al.
    2020, arXiv 1912.09729); None for no bound.
    """
    kl_coefficient: float = 0.0
    """Coefficient of the KL term; above 0 it needs `TokenData.reference_logprobs`."""

    def __post_init__(self) -> None:
        """Check the parameters.

        Raises:
            ValueError: a parameter is out of range.
        """
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ValueError(
                "clip_low must lie in 0..1 and clip_high be at least 0, "
                f"got {self.clip_low} and {self.clip_high}"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1 or None, got {self.dual_clip}")


class TokenData(NamedTuple):
    """Hold data of the tokens, `[T]` each, without gradient; log-probs in nats."""

    advantages: Tensor
    """Advantage, times the token's weight if it has one, such as an importance weight."""
    anchor_logprobs: Tensor
    """Log-prob under the policy that the ratio is clipped around: the one that sampled the tokens,
    or that at the beginning of the step.
    """
    reference_logprobs: Tensor | None = None
    """Log-prob under the frozen policy of the KL term."""
    entropy_rates: Tensor | None = None
    """Coefficient of each token's entropy bonus; None for no bonus."""

    def rows(self, index: slice | Tensor) -> "TokenData":
        """Select tokens."""
        return TokenData._make(None if field is None else field[index] for field in self)


def token_losses(logprob: Tensor, entropy: Tensor, data: TokenData, loss: Surrogate) -> Tensor:
    """Compute the loss of each token, `[T]`, not normalised.

    It is `surrogate + kl_coefficient * k3(reference - logprob) - entropy_rates * entropy`:

    - `ratio = exp(logprob - anchor)`
    - `surrogate = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))`, PPO's clip (Schulman
      et al. 2017, arXiv 1707.06347, eq. 7); for `A < 0` at most `-A dual_clip` (arXiv 1912.09729,
      eq. 5)
    """
    advantage, anchor, reference, entropy_rates = data
    ratio = (logprob - anchor).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_ratio = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    plain, clipped = -advantage * ratio, -advantage * clipped_ratio
    # If both are equal, the gradient is that of the unclipped surrogate.
    losses = torch.where(clipped > plain, clipped, plain)
    if loss.dual_clip is not None:
        bound = -advantage * loss.dual_clip
        losses = torch.where((advantage < 0) & (losses > bound), bound, losses)
    if reference is not None:
        losses = losses + loss.kl_coefficient * k3(reference - logprob)
    return losses if entropy_rates is None else losses - entropy_rates * entropy


def k3(log_ratio: Tensor) -> Tensor:
    """Compute `e^d - d - 1`, an estimate of the KL divergence that is never negative (Schulman
    2020).

    Its mean over samples of p is KL(p || q) for `d = log q - log p`.
    """
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


def token_derivatives(
    logprob: Tensor, entropy: Tensor, data: TokenData, loss: Surrogate
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute `token_losses` and their derivatives with respect to log-prob and entropy.

    Returns:
        Losses, derivatives by log-prob, and derivatives by entropy or None without an entropy
        bonus: `[T]` each.
    """
    with torch.enable_grad():
        logprob = logprob.detach().requires_grad_()
        losses = token_losses(logprob, entropy, data, loss)
        (d_logprob,) = torch.autograd.grad(losses.sum(), logprob)
    d_entropy = None if data.entropy_rates is None else -data.entropy_rates
    return losses.detach(), d_logprob, d_entropy
