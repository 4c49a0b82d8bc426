"""The decoupled clipped loss with truncated importance weights, token by token.

Two ratios are kept apart (Hilton et al. 2021, "Batch size-invariance for policy optimization";
AReaL): the clip is anchored at the *proximal* policy, the weights at the beginning of this step,
and the gap between the proximal and the behaviour policy is corrected by a weight that is truncated
from above.

Shapes: `N` sampled tokens.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LossRules:
    """Constants of the loss."""

    clip_low: float
    clip_high: float
    max_weight: float


def truncated_weights(
    proximal: torch.Tensor, behaviour: torch.Tensor, max_weight: float
) -> torch.Tensor:
    """Importance of each token under the proximal policy, at most `max_weight`: [N]."""
    return (proximal - behaviour).exp().clamp(max=max_weight)


def policy_loss(
    logprobs: torch.Tensor,
    proximal: torch.Tensor,
    weights: torch.Tensor,
    advantages: torch.Tensor,
    rules: LossRules,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped surrogate of each token, to be minimised, and whether the clip bound it: both
    [N].

    Args:
        logprobs: under the policy being optimised; the only argument with a gradient.
        proximal: under the weights at the beginning of the step.
        weights: from `truncated_weights`.
    """
    ratio = (logprobs - proximal).exp()
    clipped = ratio.clamp(1 - rules.clip_low, 1 + rules.clip_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    is_clipped = (clipped * advantages < ratio * advantages) & (advantages != 0)
    return -weights * gain, is_clipped
