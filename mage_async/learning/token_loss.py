"""Compute the loss of sampled tokens, in a single pass over the LM head or after the log-probs.

If the importance weights are known before the forward, a token's loss depends on that token's
log-prob alone. `mage_kernels.linear_policy_loss` then computes the LM head's gradients together
with the log-probs: three GEMMs instead of four where the logits do not fit in memory. Where they
fit, as on a laptop, both ways need three, and the single pass would add half a millisecond.

Both ways compute the metrics with the correction itself, so each metric is defined once. Both agree
to rounding (`tests/learning/test_token_loss.py`), except that a log-ratio beyond 20 nats has no
gradient in the single pass.

Shapes: `N` sampled tokens, `D` hidden, `V` vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from mage_async.config.schema import Learner
from mage_async.learning.corrections import Clipped, Ppo, Surrogate, Tokens
from mage_async.learning.packing import MicroBatch, RestrictedTargets
from mage_kernels import Surrogate as HeadLoss
from mage_kernels import (
    TokenData,
    keeps_logits,
    linear_logprob,
    linear_policy_loss,
    restricted_logprob,
)
from mage_kernels.surrogate import k3


@dataclass(frozen=True, slots=True, eq=False)
class HeadInputs:
    """Hold the inputs of the log-probs: final hidden states and the LM head."""

    hidden: Tensor
    """[N, D]: the hidden states that predict the sampled tokens."""
    head: Tensor
    """[V, D]: weight of the LM head."""
    targets: Tensor
    """int64 [N]: the sampled tokens."""
    inverse_temperature: float | Tensor
    """1 / sampling temperature, by which logits are multiplied; float32 [N] if tokens were sampled
    at different ones."""
    restricted: RestrictedTargets | None = None
    """The targets that were drawn from sets of allowed tokens; None: there are none."""

    def logprobs(self) -> tuple[Tensor, Tensor]:
        """Compute log-prob and entropy of each target in nats: two float32 [N], differentiable.

        The distribution is the one that the token was drawn from: over its allowed set, or over the
        whole vocabulary.
        """
        scales, restricted = self.inverse_temperature, self.restricted
        if restricted is None:
            return linear_logprob(self.hidden, self.head, self.targets, scales)
        of_restricted = restricted_logprob(
            self.hidden.index_select(0, restricted.index),
            self.head,
            restricted.columns,
            restricted.mask,
            restricted.targets,
            scales[restricted.index] if isinstance(scales, Tensor) else scales,
        )
        if not restricted.free.any():  # no target was drawn from the whole vocabulary
            return of_restricted
        of_free = linear_logprob(self.hidden, self.head, self.targets, scales, mask=restricted.free)
        # `of_free` has 0 at restricted targets; their results are put there.
        logprob, entropy = (
            whole.index_copy(0, restricted.index, part)
            for whole, part in zip(of_free, of_restricted, strict=True)
        )
        return logprob, entropy


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """Hold the loss of a micro-batch, a scalar with a gradient, and its parts for metrics."""

    loss: Tensor
    surrogate: Surrogate
    entropy: Tensor
    """float32 [N], in nats."""
    reference_k3: Tensor
    """float32 []: KL estimate k3, summed over tokens, in nats; 0 without a reference policy."""


@dataclass(frozen=True, slots=True)
class CorrectedLoss:
    """Compute the policy loss under a correction of `corrections.py`, with KL term and entropy
    bonus.
    """

    correct: Callable[[Tokens], Surrogate]
    """Turns tokens into losses: the correction's method `checked`."""
    kl: float = 0.0
    """Coefficient of the KL term."""
    clipped: Clipped | None = None
    """The correction, if a single pass over the LM head can compute its loss."""
    is_single_pass: bool | None = None
    """Whether a single pass computes the loss; None: where it saves a GEMM. That depends on shapes
    and device only, so a replay makes the same choice."""

    def __call__(
        self,
        inputs: HeadInputs,
        tokens: Tokens,
        entropy_rates: Tensor,
        scale: float,
        reference: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> TokenLoss:
        """Return `scale * sum(correction's losses + kl * weights * k3 - entropy_rates * entropy)`.

        Args:
            tokens: inputs of the correction; their `logprobs` are not read.
            entropy_rates: float32 [N]: coefficient of each token's entropy bonus.
            scale: factor of every token's loss: 1 / (mean number of sampled tokens of the step's
                minibatches).
            reference: float32 [N]: log-probs in nats under the reference policy. The KL term is
                `k3 = e^d - d - 1` with `d = reference - current` (Schulman 2020,
                http://joschu.net/blog/kl-approx.html).
            weights: float32 [N]: weight of each token's KL term; None: 1. With weights, the loss is
                computed after the log-probs, because the single pass has no input for them.
        """
        loss = None
        if self.clipped is not None and weights is None and self._takes_single_pass(inputs):
            loss, logprobs, entropy = self._single_pass(
                self.clipped, inputs, tokens, entropy_rates, scale, reference
            )
        else:
            logprobs, entropy = inputs.logprobs()
        surrogate = self.correct(tokens.at(logprobs))
        reference_k3 = penalty = logprobs.new_zeros(())
        if reference is not None:
            divergences = k3(reference - logprobs)
            reference_k3 = divergences.sum()
            penalty = reference_k3 if weights is None else (weights * divergences).sum()
        if loss is None:
            losses = surrogate.losses - entropy_rates * entropy
            loss = scale * (losses.sum() + self.kl * penalty)
        return TokenLoss(loss, surrogate, entropy.detach(), reference_k3.detach())

    def _takes_single_pass(self, inputs: HeadInputs) -> bool:
        """Return `is_single_pass`, or whether a single pass saves a GEMM."""
        if self.is_single_pass is not None:
            return self.is_single_pass
        # Tokens drawn from a set of allowed tokens need only the rows of these tokens in the LM
        # head, which cost little: a single pass would save nothing.
        return inputs.restricted is None and not keeps_logits(inputs.hidden, inputs.head)

    def _single_pass(
        self,
        clip: Clipped,
        inputs: HeadInputs,
        tokens: Tokens,
        entropy_rates: Tensor,
        scale: float,
        reference: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, and log-probs and entropy of each token, by one pass over the LM
        head.
        """
        # The loss is `-weight * min(r A, clip(r) A)`. The weight does not depend on the ratio `r`,
        # so it is read from the correction at `r = 1`. It is never negative, so it can be
        # multiplied into the advantage `A`.
        anchor = getattr(tokens, clip.anchor)
        advantages = self.correct(tokens.at(anchor)).weights * tokens.advantages
        return linear_policy_loss(
            inputs.hidden,
            inputs.head,
            inputs.targets,
            TokenData(advantages, anchor, reference, entropy_rates),
            HeadLoss(clip.clip_low, clip.clip_high, clip.dual_clip or None, self.kl),
            1.0 / scale,
            inputs.inverse_temperature,
        )

    def __str__(self) -> str:
        if self.clipped is None:
            return "loss after log-probs"
        return "loss in one pass over the LM head, or after log-probs where all logits are kept"


def corrected_loss(learner: Learner) -> CorrectedLoss:
    """Return the loss of the configured correction."""
    chosen = learner.correction
    # A user's own subclass of a clipped loss may compute another one.
    computed = (Clipped.surrogate, Ppo.surrogate)
    is_known = type(chosen).surrogate in computed
    clipped = chosen if isinstance(chosen, Clipped) and is_known else None
    return CorrectedLoss(chosen.checked, learner.kl, clipped)


class LossTerm(Protocol):
    """Compute a term that a method adds to the loss, from the hidden states and the LM head;
    protocol.

    Shapes: `N` sampled tokens of a micro-batch, `C` numbers that the term sums up for its metrics.
    """

    needs_reference: bool
    """Whether `prepare` needs the reference policy, by default the one that training began with."""
    reference_cycle: int
    """After every so many steps the reference gets the weights under training; 0: it never does."""

    def prepare(
        self, batch: MicroBatch, reference: HeadInputs | None, frozen: HeadInputs | None
    ) -> Any:
        """Compute the inputs of the term that do not depend on the weights under training.

        Called once a step, without gradient.

        Args:
            reference: states under the reference policy; None: no term needs it.
            frozen: states under `Method.frozen_policy`; None: there is none.
        """
        ...

    def loss(self, prepared: Any, inputs: HeadInputs, scale: float) -> tuple[Tensor, Tensor]:
        """Return the term of a micro-batch, a scalar, and float32 [C] without a gradient.

        Args:
            prepared: result of `prepare`.
            inputs: states under the weights in training.
            scale: factor of every token's loss: 1 / (mean number of sampled tokens of the step's
                minibatches).
        """
        ...

    def metrics(self, counted: np.ndarray) -> dict[str, float]:
        """Return metrics of a step by name.

        Args:
            counted: float32 [C], summed over the micro-batches of the step.
        """
        ...
