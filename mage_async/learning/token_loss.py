"""The loss of sampled tokens, up to its gradient: in the pass over the head, or after log-probs.

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

from mage_async.config.schema import Learner
from mage_async.config.sections.corrections import Clipped
from mage_async.learning.corrections.catalogue import anchor_of, correction
from mage_async.learning.corrections.surrogate import Correction, Surrogate, Tokens
from mage_kernels import keeps_logits, linear_logprob, linear_policy_loss
from mage_kernels.surrogate import k3


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
    reference_k3: torch.Tensor
    """float32 []: summed over tokens, in nats; 0 without a reference policy"""


class LossPass(Protocol):
    """One way from hidden states to a loss."""

    def __call__(
        self,
        inputs: HeadInputs,
        tokens: Tokens,
        entropy_rates: torch.Tensor,
        scale: float,
        reference: torch.Tensor | None = None,
    ) -> TokenLoss:
        """`scale * sum(correction's losses + kl * k3 - entropy_rates * entropy)`.

        Args:
            tokens: their `logprobs` are not looked at.
            entropy_rates: float32 [N]
            reference: float32 [N]: log-probs under the frozen policy of the KL term, which is
                `k3 = e^d - d - 1` with `d = reference - current` (Schulman 2020).
        """
        ...


def loss_pass(rules: Learner) -> LossPass:
    """The way that the configured correction allows."""
    own = rules.correction
    correct = correction(own)
    after = TwoSteps(correct, rules.kl)
    if not isinstance(own, Clipped):
        return after
    clips = own.clip_low, own.clip_high, own.dual_clip or None
    single = SinglePass(correct, anchor_of(own), *clips, rules.kl)
    return Fewest(single, after)


@dataclass(frozen=True, slots=True)
class TwoSteps:
    """Log-probs and entropies first; autograd makes the rest. For any correction."""

    correct: Correction
    kl: float = 0.0

    def __call__(
        self,
        inputs: HeadInputs,
        tokens: Tokens,
        entropy_rates: torch.Tensor,
        scale: float,
        reference: torch.Tensor | None = None,
    ) -> TokenLoss:
        """See `LossPass`."""
        logprobs, entropy = linear_logprob(
            inputs.hidden, inputs.head, inputs.targets, inputs.inverse_temperature
        )
        made = self.correct(tokens.at(logprobs))
        apart = _reference_k3(reference, logprobs)
        loss = scale * ((made.losses - entropy_rates * entropy).sum() + self.kl * apart)
        return TokenLoss(loss, made, entropy.detach(), apart.detach())

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
    dual_clip: float | None = None
    kl: float = 0.0

    def __call__(
        self,
        inputs: HeadInputs,
        tokens: Tokens,
        entropy_rates: torch.Tensor,
        scale: float,
        reference: torch.Tensor | None = None,
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
            dual_clip=self.dual_clip,
            reference_logprobs=reference,
            kl_coefficient=self.kl,
            entropy_coefficient=1.0,
            entropy_weights=entropy_rates,
        )
        made = self.correct(tokens.at(result.logprob))
        apart = _reference_k3(reference, result.logprob)
        return TokenLoss(result.loss, made, result.entropy, apart)


@dataclass(frozen=True, slots=True)
class Fewest:
    """The single pass where it saves a GEMM: by shape and device, so that replays choose alike."""

    single: SinglePass
    after: TwoSteps

    def __call__(
        self,
        inputs: HeadInputs,
        tokens: Tokens,
        entropy_rates: torch.Tensor,
        scale: float,
        reference: torch.Tensor | None = None,
    ) -> TokenLoss:
        """See `LossPass`."""
        way = self.after if keeps_logits(inputs.hidden, inputs.head) else self.single
        return way(inputs, tokens, entropy_rates, scale, reference)

    def __str__(self) -> str:
        return "loss in the head's pass unless its logits are kept"


def _reference_k3(reference: torch.Tensor | None, logprobs: torch.Tensor) -> torch.Tensor:
    """How far the policy is from the reference, summed: []."""
    return logprobs.new_zeros(()) if reference is None else k3(reference - logprobs).sum()
