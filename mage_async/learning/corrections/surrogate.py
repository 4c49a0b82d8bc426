"""The input and the output of every correction.

A correction is a function of `Tokens` and its own constants. It returns one loss per token, zero
for a masked token, so that the sum is divided by the number of tokens *before* masking and a mask
never makes the gradient of the remaining tokens larger.

Shapes: `N` sampled tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Sampled tokens under three policies. Log-probs are in nats, after temperature."""

    logprobs: torch.Tensor
    """float32 [N]: under the policy being optimised; the only one with a gradient"""
    proximal: torch.Tensor
    """float32 [N]: under the weights at the beginning of the step"""
    behaviour: torch.Tensor
    """float32 [N]: under the policy that drew them"""
    advantages: torch.Tensor
    """float32 [N]"""
    staleness: torch.Tensor
    """int32 [N]: steps"""
    turns: torch.Tensor
    """int64 [N]: the number of the token's turn, from 0 without gaps; a turn is one completion, and
    what papers call a sequence
    """

    def at(self, logprobs: torch.Tensor) -> "Tokens":
        """The same under other weights."""
        return replace(self, logprobs=logprobs)


@dataclass(frozen=True, slots=True, eq=False)
class Surrogate:
    """The objective of each token and what was done to it: all [N]."""

    losses: torch.Tensor
    """The loss to be minimised, with its gradient."""
    weights: torch.Tensor
    """Importance weight it was given; 0 where masked."""
    is_clipped: torch.Tensor
    """Whether a clip or a truncation bound it."""
    is_masked: torch.Tensor
    """Whether it was left out."""


Correction = Callable[[Tokens], Surrogate]


def clipped_gain(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pessimistic one of the plain and the clipped gain (PPO, Schulman et al. 2017, eq. 7), and
    whether the clip bound it: both [N].
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    is_clipped = (clipped * advantages < ratio * advantages) & (advantages != 0)
    return gain, is_clipped


def weighted(
    tokens: Tokens,
    weights: torch.Tensor,
    is_masked: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """The clip around the proximal policy under any weights, in which most corrections end: with
    `r = current / proximal`, a token's loss is `-weight * min(r A, clip(r) A)`; 0 where masked.

    Args:
        weights: [N], without a gradient.
        is_masked: [N], bool.
    """
    ratio = (tokens.logprobs - tokens.proximal).exp()
    gain, is_clipped = clipped_gain(ratio, tokens.advantages, clip_low, clip_high)
    weights = weights.masked_fill(is_masked, 0.0)
    losses = (-weights * gain).masked_fill(is_masked, 0.0)  # also where a ratio overflowed
    return Surrogate(losses, weights, is_clipped & ~is_masked, is_masked)


def importance(tokens: Tokens) -> torch.Tensor:
    """Proximal over behaviour probability of each token: [N]."""
    return (tokens.proximal - tokens.behaviour).exp()


def nowhere(tokens: Tokens) -> torch.Tensor:
    """False for every token: [N]."""
    return torch.zeros_like(tokens.advantages, dtype=torch.bool)


def turn_sums(values: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """The sum over the turn of each token: [N]."""
    totals = values.new_zeros(int(turns.max()) + 1 if len(turns) else 0)
    return totals.index_add(0, turns, values)[turns]


def turn_means(values: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """The mean over the turn of each token: [N]."""
    return turn_sums(values, turns) / turn_sums(torch.ones_like(values), turns)
