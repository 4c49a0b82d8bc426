"""The token-level policy loss as a function of a token's log-prob and entropy.

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
"""Bound of log-ratios before `exp`; beyond it a token has no gradient through its ratio."""

SUMS = (
    "tokens",
    "loss",
    "surrogate",
    "logprob",
    "entropy",
    "reference_k3",
    "ratio",
    "clipped",
    "dual_clipped",
    "weight",
    "weight_squared",
    "weight_capped",
    "behaviour_k3",
)
"""Names of the sums over masked tokens in `PolicyLoss.sums`, in order."""


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Parameters of the loss: clipping, truncated weight, KL term, entropy bonus."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio is clipped to `1 - clip_low .. 1 + clip_high`."""
    dual_clip: float | None = None
    """For negative advantages, upper bound of the surrogate divided by `|advantage|` (Ye et al.
    2020, arXiv 1912.09729)."""
    weight_cap: float | None = None
    """Upper bound of the weight `exp(proximal - behaviour)`; None: no bound."""
    kl_coefficient: float = 0.0
    """Above 0 it needs `TokenData.reference_logprobs`."""
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ValueError(
                "clip_low must lie in 0..1 and clip_high be at least 0, "
                f"got {self.clip_low} and {self.clip_high}"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1 or None, got {self.dual_clip}")
        if self.weight_cap is not None and self.weight_cap <= 0:
            raise ValueError(f"weight_cap must be above 0 or None, got {self.weight_cap}")


class TokenData(NamedTuple):
    """Data of the tokens, `[T]` each, without gradient; log-probs in nats."""

    behaviour_logprobs: Tensor
    """Under the policy that sampled the tokens."""
    proximal_logprobs: Tensor | None
    """Under the policy that the ratio is clipped around, that at the beginning of the step; None:
    the behaviour policy's."""
    reference_logprobs: Tensor | None
    """Under the frozen policy of the KL term."""
    advantages: Tensor
    mask: Tensor
    """bool: the tokens of the loss. Data of other tokens never reaches a result, not even NaN."""
    entropy_weights: Tensor | None = None
    """Factor of `entropy_coefficient` for each token; None: 1."""

    def rows(self, index: slice | Tensor) -> "TokenData":
        """Select tokens."""
        return TokenData(*(None if field is None else field[index] for field in self))


class TokenTerms(NamedTuple):
    """The loss of each token, and its terms for metrics; 0 outside the mask."""

    loss: Tensor
    """`[T]`, not normalised."""
    sums: Tensor
    """`[len(SUMS), T]`, without gradient."""


def token_terms(logprob: Tensor, entropy: Tensor, data: TokenData, loss: Surrogate) -> TokenTerms:
    """Compute the loss of each token, and its terms for metrics.

    The loss is `weight * surrogate + kl_coefficient * k3(reference - logprob) - bonus * entropy`:

    - `ratio = exp(logprob - proximal)`
    - `surrogate = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))`, PPO's clip (Schulman
      et al. 2017, arXiv 1707.06347, eq. 7); for `A < 0` at most `-A dual_clip` (arXiv 1912.09729,
      eq. 5)
    - `weight = min(exp(proximal - behaviour), weight_cap)`, a constant
    - `bonus = entropy_coefficient * entropy_weights`
    """
    mask = data.mask
    behaviour = _masked(data.behaviour_logprobs, mask, logprob.dtype)
    proximal = _masked(data.proximal_logprobs, mask, logprob.dtype)
    proximal = behaviour if proximal is None else proximal
    reference = _masked(data.reference_logprobs, mask, logprob.dtype)
    advantage = _masked(data.advantages, mask, logprob.dtype)
    bonus = _masked(data.entropy_weights, mask, logprob.dtype)
    bonus = loss.entropy_coefficient * (1.0 if bonus is None else bonus)
    logprob, entropy = _masked(logprob, mask), _masked(entropy, mask)

    ratio = (logprob - proximal).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_ratio = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    plain, clipped = -advantage * ratio, -advantage * clipped_ratio
    is_clipped = clipped > plain
    surrogate = torch.where(is_clipped, clipped, plain)
    is_dual = torch.zeros_like(mask)
    if loss.dual_clip is not None:
        bound = -advantage * loss.dual_clip
        is_dual = (advantage < 0) & (surrogate > bound)
        surrogate = torch.where(is_dual, bound, surrogate)
    raw_weight = (proximal - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight = raw_weight if loss.weight_cap is None else raw_weight.clamp(max=loss.weight_cap)
    reference_k3 = torch.zeros_like(logprob) if reference is None else k3(reference - logprob)
    value = weight * surrogate + loss.kl_coefficient * reference_k3 - bonus * entropy
    pieces = {
        "tokens": mask,
        "loss": value,
        "surrogate": surrogate,
        "logprob": logprob,
        "entropy": entropy,
        "reference_k3": reference_k3,
        "ratio": ratio,
        "clipped": is_clipped,
        "dual_clipped": is_dual,
        "weight": weight,
        "weight_squared": weight.square(),
        "weight_capped": weight < raw_weight,
        "behaviour_k3": k3(logprob - behaviour),
    }
    sums = torch.stack([pieces[name].detach().to(value.dtype) for name in SUMS])
    return TokenTerms(_masked(value, mask), sums.where(mask, 0.0))


def k3(log_ratio: Tensor) -> Tensor:
    """Compute `e^d - d - 1`, an estimate of the KL divergence that is never negative (Schulman
    2020).

    Its mean over samples of p is KL(p || q) for `d = log q - log p`.
    """
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


def token_derivatives(
    logprob: Tensor, entropy: Tensor, data: TokenData, loss: Surrogate
) -> tuple[TokenTerms, Tensor, Tensor]:
    """Compute `token_terms`, and derivatives of the loss by log-prob and by entropy: `[T]` each."""
    with torch.enable_grad():
        logprob, entropy = logprob.detach().requires_grad_(), entropy.detach().requires_grad_()
        terms = token_terms(logprob, entropy, data, loss)
        d_logprob, d_entropy = torch.autograd.grad(terms.loss.sum(), (logprob, entropy))
    return TokenTerms(terms.loss.detach(), terms.sums), d_logprob, d_entropy


def _masked(values: Tensor | None, mask: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
    """Set values outside the mask to 0, by selection: NaN times 0 would be NaN."""
    return None if values is None else torch.where(mask, values.to(dtype or values.dtype), 0.0)
