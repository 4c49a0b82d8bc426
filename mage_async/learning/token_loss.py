"""The loss of a minibatch, up to its gradient: in one pass over the head, or after its log-probs.

A loss whose importance weights are known before the pass depends, at each token, on that token's
log-prob alone. `mage_kernels.linear_policy_loss` computes the head's gradients while it computes
the log-probs: three GEMMs instead of four where the logits cannot be kept. Where they can, as on a
laptop, both ways need three, and the single pass only adds half a millisecond of bookkeeping.

What was done to each token is asked of the correction itself, given those log-probs, so a metric is
defined once. A log-ratio beyond 20 nats has no gradient in the single pass; apart from that both
ways agree to rounding, as a test says.

Shapes: `N` sampled tokens, `D` hidden, `V` vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from mage_async.config import Learner
from mage_async.learning.corrections.catalogue import CLIPPED_AROUND, correction
from mage_async.learning.corrections.surrogate import Correction, Surrogate, Tokens
from mage_kernels import keeps_logits, linear_logprob, linear_policy_loss


@dataclass(frozen=True, slots=True, eq=False)
class HeadInputs:
    """Where log-probs come from."""

    hidden: torch.Tensor
    """[N, D]: the states that predict the sampled tokens"""
    head: torch.Tensor
    """[V, D]"""
    targets: torch.Tensor
    """int64 [N]"""
    inverse_temperature: float


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """A scalar with its gradient, and what it is made of, without."""

    loss: torch.Tensor
    made: Surrogate
    entropy: torch.Tensor
    """float32 [N], in nats"""


class LossPass(Protocol):
    """One way from hidden states to a loss."""

    def __call__(
        self, inputs: HeadInputs, tokens: Tokens, entropy_rates: torch.Tensor, scale: float
    ) -> TokenLoss:
        """`scale * sum(correction's losses - entropy_rates * entropy)`.

        Args:
            tokens: their `logprobs` are not looked at.
            entropy_rates: float32 [N]
        """
        ...


def loss_pass(rules: Learner) -> LossPass:
    """The way that the configured correction allows."""
    correct = correction(rules)
    after = TwoSteps(correct)
    if rules.correction not in CLIPPED_AROUND:
        return after
    anchor = CLIPPED_AROUND[rules.correction]
    return Fewest(SinglePass(correct, anchor, rules.clip_low, rules.clip_high), after)


@dataclass(frozen=True, slots=True)
class TwoSteps:
    """Log-probs and entropies first; autograd makes the rest. For any correction."""

    correct: Correction

    def __call__(
        self, inputs: HeadInputs, tokens: Tokens, entropy_rates: torch.Tensor, scale: float
    ) -> TokenLoss:
        """See `LossPass`."""
        logprobs, entropy = linear_logprob(
            inputs.hidden, inputs.head, inputs.targets, inputs.inverse_temperature
        )
        made = self.correct(tokens.at(logprobs))
        loss = scale * (made.losses - entropy_rates * entropy).sum()
        return TokenLoss(loss, made, entropy.detach())

    def __str__(self) -> str:
        return "loss after log-probs"


@dataclass(frozen=True, slots=True)
class SinglePass:
    """Loss and gradients in the pass over the head, for `-weight * min(r A, clip(r) A)`.

    The weights are what the correction gives at `r = 1`: they do not depend on `r`. They are never
    negative, so they may as well multiply the advantage.
    """

    correct: Correction
    anchor: str
    """Around which of `Tokens`' policies `r` is taken."""
    clip_low: float
    clip_high: float

    def __call__(
        self, inputs: HeadInputs, tokens: Tokens, entropy_rates: torch.Tensor, scale: float
    ) -> TokenLoss:
        """See `LossPass`."""
        anchor = getattr(tokens, self.anchor)
        weights = self.correct(tokens.at(anchor)).weights
        result = linear_policy_loss(
            inputs.hidden,
            inputs.head,
            inputs.targets,
            behaviour_logprobs=anchor,
            advantages=weights * tokens.advantages,
            mask=torch.ones(len(anchor), dtype=torch.bool),
            normaliser=1.0 / scale,
            inverse_temperature=inputs.inverse_temperature,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            entropy_coefficient=1.0,
            entropy_weights=entropy_rates,
        )
        return TokenLoss(result.loss, self.correct(tokens.at(result.logprob)), result.entropy)


@dataclass(frozen=True, slots=True)
class Fewest:
    """The single pass where it saves a GEMM: by shape and device, so that replays choose alike."""

    single: SinglePass
    after: TwoSteps

    def __call__(
        self, inputs: HeadInputs, tokens: Tokens, entropy_rates: torch.Tensor, scale: float
    ) -> TokenLoss:
        """See `LossPass`."""
        way = self.after if keeps_logits(inputs.hidden, inputs.head) else self.single
        return way(inputs, tokens, entropy_rates, scale)

    def __str__(self) -> str:
        return "loss in the head's pass unless its logits are kept"
