"""Compute the losses of tokens that an older policy sampled, by a class for each correction.

The class of a correction is also its configuration: its fields are the keys of
`[learner.correction]`, and its method `surrogate` turns tokens into losses. To add a correction,
copy a class and give it a `tag`, which is its name. A class outside of this package is named by its
module: `learner.correction.kind = "my_losses:Squared"`.

A masked token has loss 0, and still counts in the number of tokens by which the sum of losses is
divided, so masking never makes the gradient of the other tokens larger.

Notation: `r` is the ratio of the current policy to another one, `A` the advantage, `w = proximal /
behaviour` the importance weight; `sg` stops the gradient. Shapes: `N` sampled tokens.

torch is imported inside of functions only, because processes that never need torch import this
module with the configuration.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

from mage_async.config.section import Natural, NonNegative, Positive, Share, Variant
from mage_async.errors import ConfigError
from mage_async.user_modules import as_config_error, place_of

if TYPE_CHECKING:
    import torch

Weight = Annotated[float, Meta(ge=1)]
"""A bound of importance weights: at least 1, the weight of a token that is not stale."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Hold sampled tokens with their log-probs (nats, after temperature) under three policies."""

    logprobs: "torch.Tensor"
    """float32 [N]: under the policy being optimised; the only tensor with a gradient."""
    proximal: "torch.Tensor"
    """float32 [N]: under the weights at the beginning of the step."""
    behaviour: "torch.Tensor"
    """float32 [N]: under the behaviour policy, which sampled the tokens."""
    advantages: "torch.Tensor"
    """float32 [N]"""
    staleness: "torch.Tensor"
    """int32 [N]: version at the beginning of the step minus the version that sampled the token."""
    turns: "torch.Tensor"
    """int64 [N]: number of the token's turn, from 0 without gaps. A turn is one completion, which
    papers of a single turn call a sequence."""
    sequences: "torch.Tensor"
    """int64 [N]: number of the token's training sequence, from 0 without gaps. It is the trajectory
    of papers, or one episode of it in trials in which every episode begins a new context."""

    def at(self, logprobs: "torch.Tensor") -> "Tokens":
        """Return the same tokens with log-probs of other weights."""
        return replace(self, logprobs=logprobs)


@dataclass(frozen=True, slots=True, eq=False)
class Surrogate:
    """Hold the result of a correction for N tokens, as tensors [N]: loss and weight of each token,
    and whether it was clipped or masked.
    """

    losses: "torch.Tensor"
    """Loss to be minimised, with its gradient."""
    weights: "torch.Tensor"
    """Importance weight that the correction gave the token; 0 where masked."""
    is_clipped: "torch.Tensor"
    """Whether a clip bounds the loss; for `tis`, `cispo`, `dppo` and `vcpo`, whether the weight
    was truncated."""
    is_masked: "torch.Tensor"
    """Whether the token was left out."""


class Correction(Variant):
    """The loss on stale tokens."""

    needs_whole_minibatch: ClassVar[bool] = False
    """Whether the loss of a token depends on tokens beyond its sequence."""

    def surrogate(self, tokens: Tokens) -> Surrogate:
        """Return the loss of each token."""
        raise NotImplementedError("write its method `surrogate`")

    def checked(self, tokens: Tokens) -> Surrogate:
        """Return the result of `surrogate`, and check it if the class is a user's own.

        Raises:
            ConfigError: a user's own class raised, or returned something else than a number for
                each token, which would be broadcast over all of them.
        """
        if ":" not in self.kind:
            return self.surrogate(tokens)
        what = f"correction {self.kind!r}"
        with as_config_error(what):
            found = self.surrogate(tokens)
        what += f": `surrogate`{place_of(type(self).surrogate)} returned"
        if not isinstance(found, Surrogate):
            raise ConfigError(f"{what} a {type(found).__name__}, not a `Surrogate`")
        expected = tuple(tokens.logprobs.shape)
        for field in fields(found):
            value = getattr(found, field.name)
            shape = tuple(value.shape) if hasattr(value, "shape") else f"none ({value!r:.40})"
            if shape != expected:
                raise ConfigError(
                    f"{what} `{field.name}` of shape {shape} for {expected[0]} tokens: return a "
                    f"tensor of shape {expected}, with a number for each token"
                )
        return found

    def try_out(self, oldest: int) -> None:
        """Compute the losses of made-up tokens, to find the mistakes of a user's own class before a
        run.

        Args:
            oldest: Staleness in steps of some of these tokens; others are 0 to 3 steps old.

        Raises:
            ConfigError: as `checked`; or a loss or its gradient is not finite, or no loss has a
                gradient.
        """
        import torch

        # The policy has moved little on the first four tokens, and far on the others.
        behaviour = torch.tensor([-0.2, -1.0, -1.5, -3.0, -9.0, -0.1, -1.0, -2.0])
        moved = behaviour + torch.tensor([0.0, 0.1, -0.1, 0.2, 8.9, -8.9, 0.0, 0.0])
        advantages = torch.tensor([1.0, -1.0, 0.5, 0.0, 1.0, -1.0, 0.0, -0.5])
        ages, turns = torch.tensor([0, 1, 2, 3, *[oldest] * 4]).int(), torch.arange(8) // 2
        logprobs = moved.clone().requires_grad_()
        losses = self.checked(
            Tokens(logprobs, moved, behaviour, advantages, ages, turns, turns // 2)
        ).losses
        what = f"correction {self.kind!r}: `surrogate`{place_of(type(self).surrogate)} returned"
        if not losses.requires_grad:
            raise ConfigError(
                f"{what} losses without a gradient, so nothing would be learned: compute them from "
                "`tokens.logprobs`, and detach weights alone"
            )
        (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
        for values, noun in (
            (losses, "losses that are"),
            (gradient, "losses with gradients that are"),
        ):
            if not values.isfinite().all():
                raise ConfigError(
                    f"{what} {noun} not finite: {values.tolist()}, of tokens that are "
                    f"{ages.tolist()} steps old"
                )


class WithClip(Correction):
    """A loss with PPO's clip of a ratio of probabilities."""

    clip_low: Share = 0.2
    """The ratio is clipped below at one minus this."""
    clip_high: NonNegative = 0.28
    """The ratio is clipped above at one plus this."""
    dual_clip: NonNegative = 0.0
    """Bound of the loss of a token with a negative advantage, in units of that advantage; above 1,
    or 0 for no bound."""

    def clipped(
        self,
        tokens: Tokens,
        ratio: "torch.Tensor",
        weights: "torch.Tensor",
        is_masked: "torch.Tensor",
    ) -> Surrogate:
        """Return the losses `-weight * min(r A, clip(r) A)` (PPO, Schulman et al. 2017, eq. 7),
        with the dual clip; they are 0 at masked tokens.
        """
        plain = ratio * tokens.advantages
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * tokens.advantages
        is_clipped = (clipped < plain) & (tokens.advantages != 0) & ~is_masked
        weights = weights.masked_fill(is_masked, 0.0)
        # The losses are masked too: zero times a ratio that overflowed is no number.
        losses = (-weights * plain.minimum(clipped)).masked_fill(is_masked, 0.0)
        if self.dual_clip:
            # Dual clip (Ye et al. 2020, arXiv 1912.09729, eq. 5). Where the advantage is negative,
            # PPO's loss of a token that became much likelier has no bound. LaMer and MAGE use 3.
            weighted = weights * tokens.advantages
            bound = -self.dual_clip * weighted
            is_bound = (weighted < 0) & (losses > bound)
            losses, is_clipped = bound.where(is_bound, losses), is_clipped | is_bound
        return Surrogate(losses, weights, is_clipped, is_masked)

    def check(self, config: Any) -> None:
        """Refuse a dual clip of 1 or less, which bounds the loss of tokens that have not moved."""
        if 0 < self.dual_clip <= 1:
            raise ConfigError(
                f"learner.correction.dual_clip must be above 1, or 0, got {self.dual_clip}"
            )


class Clipped(WithClip):
    """PPO's clipped loss under a weight of each token that does not depend on the current policy.

    `-weight * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`: most corrections are a choice of
    weights. `mage_kernels.linear_policy_loss` computes such a loss while it computes log-probs.
    """

    anchor: ClassVar[Literal["proximal", "behaviour"]] = "proximal"
    """The policy in the denominator of the ratio."""

    def weigh(self, tokens: Tokens) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return the weight of each token, without a gradient, and whether it is masked: [N]; by
        default 1, and no token.
        """
        return ones(tokens), no_token(tokens)

    def surrogate(self, tokens: Tokens) -> Surrogate:
        """Return the clipped losses under `weigh`'s weights."""
        ratio = (tokens.logprobs - getattr(tokens, self.anchor)).exp()
        return self.clipped(tokens, ratio, *self.weigh(tokens))


class Truncated(Clipped):
    """A clipped loss whose importance weights have a largest value."""

    max_weight: Weight = 2.0
    """Largest importance weight. Truncating corrections cut larger weights to it; masking
    corrections leave their tokens out.
    """


class NoCorrection(Clipped, tag="none"):
    """Stale tokens are treated as fresh ones."""

    # GRPO (Shao et al. 2024, arXiv 2402.03300, eq. 3) as most systems run it: the "old" policy of
    # the clip is the trainer's own at the beginning of the step, `r = current / proximal`, and the
    # distance of that policy to the behaviour policy is ignored.


class Ppo(Clipped, tag="ppo"):
    """PPO's clip around the behaviour policy."""

    # Schulman et al. 2017, arXiv 1707.06347, eq. 7, with `r = current / behaviour`: one ratio both
    # corrects and bounds. With stale tokens the clip is anchored at a policy some steps old: a
    # token that has moved since then may move no further in that direction, and one that moved
    # against its advantage has an unbounded ratio.

    anchor: ClassVar[Literal["proximal", "behaviour"]] = "behaviour"

    def surrogate(self, tokens: Tokens) -> Surrogate:
        """Return the clipped losses; the importance weight is the ratio itself."""
        ratio = (tokens.logprobs.detach() - tokens.behaviour).exp()
        return replace(super().surrogate(tokens), weights=ratio)


class Decoupled(Truncated, tag="decoupled"):
    """The clip around the proximal policy, under truncated importance weights."""

    # `-min(w, max_weight) min(r A, clip(r) A)` with `r = current / proximal`. The clip is anchored
    # at the proximal policy, and a truncated weight corrects the gap between the proximal and the
    # behaviour policy (Hilton et al. 2021, "Batch size-invariance for policy optimization"; AReaL,
    # arXiv 2505.24298).

    def weigh(self, tokens: Tokens) -> "tuple[torch.Tensor, torch.Tensor]":
        """Truncate the importance weights."""
        return importance(tokens).clamp(max=self.max_weight), no_token(tokens)


class Tis(Correction, tag="tis"):
    """Truncated importance sampling, without a clip."""

    # `-sg(min(current / behaviour, max_weight)) A log current` (Ionides 2008; IMPALA, Espeholt et
    # al. 2018, eq. 1). The weight has no gradient, so a token keeps a gradient however far it has
    # moved. In other systems TIS is the name of what is called `decoupled` here.

    max_weight: Weight = 2.0
    """Importance weights are truncated here."""

    def surrogate(self, tokens: Tokens) -> Surrogate:
        """Return the policy gradient loss under truncated weights."""
        ratio = (tokens.logprobs.detach() - tokens.behaviour).exp()
        weights = ratio.clamp(max=self.max_weight)
        losses = -weights * tokens.advantages * tokens.logprobs
        return Surrogate(losses, weights, ratio > self.max_weight, no_token(tokens))


class Icepop(Clipped, tag="icepop"):
    """Tokens whose importance weight is too small or too large are masked."""

    # IcePop (Ring-1T, arXiv 2510.18855, with 0.5 and 5): inside the band a token keeps its full
    # weight. A token with a weight below the band was sampled by the behaviour policy, and the
    # proximal policy would hardly sample it. Truncation from above alone keeps such tokens.

    keep_low: Share = 0.5
    """Tokens with a smaller weight are masked."""
    keep_high: Weight = 5.0
    """Tokens with a larger weight are masked."""

    def weigh(self, tokens: Tokens) -> "tuple[torch.Tensor, torch.Tensor]":
        """Mask weights outside the band."""
        weights = importance(tokens)
        return weights, ~((weights >= self.keep_low) & (weights <= self.keep_high))


class Kpop(Clipped, tag="kpop"):
    """Tokens whose probability has moved too far, by a KL divergence of two events, are masked."""

    # KPop (Guo, Sun et al. 2026, https://ringtech.notion.site/kpop; the authors' code is the metric
    # `binary_kl` of AReaL): a token is one event and all others together are the second one,
    #
    #     D(p || q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q))
    #
    # and a token is kept with its full weight where neither D(proximal || behaviour) nor
    # D(behaviour || proximal) is over the bound. IcePop's band of ratios is as wide for a token of
    # probability 0.9 as for one of 0.001; this band is narrow for the first and wide for the other.

    max_divergence: Positive = 0.1
    """Largest divergence of a token's probability, in nats, in either direction."""

    def weigh(self, tokens: Tokens) -> "tuple[torch.Tensor, torch.Tensor]":
        """Mask tokens over the bound."""
        divergence = binary_divergence(tokens.proximal, tokens.behaviour).maximum(
            binary_divergence(tokens.behaviour, tokens.proximal)
        )
        return importance(tokens), divergence > self.max_divergence


# Masked importance sampling at three levels (Liu, Li et al. 2025, "When Speed Kills Stability"): a
# token, or its whole turn, whose weight is too large is masked. Truncation would trust the
# direction of such a token's gradient, although it does not trust the size.


class MisToken(Truncated, tag="mis_token"):
    """Tokens whose importance weight is too large are masked."""

    def weigh(self, tokens: Tokens) -> "tuple[torch.Tensor, torch.Tensor]":
        """Mask tokens whose weight is above `max_weight`."""
        weights = importance(tokens)
        return weights, weights > self.max_weight


class MisSequence(Truncated, tag="mis_sequence"):
    """Turns whose product of importance weights is too large are masked."""

    # The product is the unbiased weight of the turn, and of large variance.

    def weigh(self, tokens: Tokens) -> "tuple[torch.Tensor, torch.Tensor]":
        """Weigh each token with the product of its turn's weights, and mask large products."""
        weights = sums_within(tokens.proximal - tokens.behaviour, tokens.turns).exp()
        return weights, weights > self.max_weight


class MisGeometric(Truncated, tag="mis_geometric"):
    """Turns whose geometric mean of importance weights lies outside a band are masked."""

    # The geometric mean, unlike the product, does not grow with the length of a turn. Turns inside
    # the band are weighed as by `decoupled`.
    # With the defaults this is `decoupled_geo_rs_token_tis` of the authors' code in verl.

    keep_low: Share = 0.999
    """Turns with a smaller mean are masked. The default band is the authors' in verl, for answers
    of hundreds of tokens: it masks nearly all stale turns of a few tokens, which need a wider one.
    """
    keep_high: Weight = 1.001
    """Turns with a larger mean are masked."""

    def weigh(self, tokens: Tokens) -> "tuple[torch.Tensor, torch.Tensor]":
        """Truncate the weights of turns inside the band, and mask the other turns."""
        mean = turn_means(tokens.proximal - tokens.behaviour, tokens.turns).exp()
        is_masked = ~((mean >= self.keep_low) & (mean <= self.keep_high))
        return importance(tokens).clamp(max=self.max_weight), is_masked


class Cispo(Correction, tag="cispo"):
    """The importance weight is clipped, never the gradient."""

    # `-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log current` with `r = current / behaviour`
    # (MiniMax-M1, arXiv 2506.13585, eq. 4-5). PPO's clip removes rare but decisive tokens from
    # every later update; here they keep a gradient, under a bounded weight. The paper has no lower
    # bound: with one, a token with a negative advantage is pushed down as hard when it has become
    # a hundred times rarer as at first.

    clip_low: Share = 1.0
    """The weight is clipped below at one minus this; 1, as in the paper, is no bound."""
    clip_high: NonNegative = 0.28
    """The weight is clipped above at one plus this. The default is ours: the paper tunes it."""

    def surrogate(self, tokens: Tokens) -> Surrogate:
        """Return the policy gradient loss under clipped weights."""
        ratio = (tokens.logprobs.detach() - tokens.behaviour).exp()
        weights = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        losses = -weights * tokens.advantages * tokens.logprobs
        return Surrogate(losses, weights, weights != ratio, no_token(tokens))


class Gspo(WithClip, tag="gspo"):
    """One clipped ratio per completion."""

    # `-min(s A, clip(s) A)` with `s = sg(S) current / sg(current)` and `S = exp(mean over the turn
    # of log(current / behaviour))` (Zheng et al. 2025, arXiv 2507.18071, eq. 5-7; GSPO-token for
    # advantages per token, eq. 13-14). The noise of S does not grow with the turn's length, and the
    # clip takes whole turns. The paper clips at 3e-4 and 4e-4 on data a few minibatches old; with
    # stale data use PPO's. Its objective is a mean over completions: `learner.average = "turn"`.

    def surrogate(self, tokens: Tokens) -> Surrogate:
        """Return the clipped losses under one ratio per turn."""
        gap = tokens.logprobs - tokens.behaviour
        of_turn = turn_means(gap.detach(), tokens.turns).exp()
        ratio = of_turn * (tokens.logprobs - tokens.logprobs.detach()).exp()
        surrogate = self.clipped(tokens, ratio, ones(tokens), no_token(tokens))
        return replace(surrogate, weights=of_turn)


class Dppo(Correction, tag="dppo"):
    """Tokens whose probability has moved too far are masked."""

    # `-keep w A` with `w = min(current / behaviour, max_weight)`, whose gradient is that of `w log
    # current` with `w` held fixed; keep is 0 for a masked token and 1 otherwise. A ratio of 2
    # changes a probability of 0.001 by 0.001 and one of 0.4 by 0.4, so the bound is on the change
    # of the probability, in the direction of the advantage (Qi et al. 2026, "Rethinking the trust
    # region in LLM RL", arXiv 2602.04879, binary total variation; prime-rl's default loss, without
    # its penalty on the squared log-ratio). An advantage of 0 counts as negative. The truncation is
    # of the authors' code (10 in their repository, 20 in verl).

    max_probability_change: Share = 0.2
    """Largest change of a token's probability."""
    max_weight: Weight = 20.0
    """Importance weights are truncated here."""

    def surrogate(self, tokens: Tokens) -> Surrogate:
        """Return the losses of tokens whose probability moved by at most the bound."""
        ratio = (tokens.logprobs.detach() - tokens.behaviour).exp()
        change = tokens.logprobs.detach().exp() - tokens.behaviour.exp()
        towards = change.where(tokens.advantages > 0, -change)
        is_masked = towards > self.max_probability_change
        # The second factor is 1, with the gradient of the log-prob.
        weight = (
            ratio.clamp(max=self.max_weight) * (tokens.logprobs - tokens.logprobs.detach()).exp()
        )
        is_clipped = (ratio > self.max_weight) & ~is_masked
        return replace(_masked_losses(tokens, weight, is_masked), is_clipped=is_clipped)


Selection = Callable[["torch.Tensor", float], "torch.Tensor"]
"""The signature of `largest_set_under`."""


def largest_set_under(values: "torch.Tensor", bound: float) -> "torch.Tensor":
    """Select the largest set of values with a mean of at most `bound`: bool [N].

    The set is the k smallest values: their mean grows with k.
    """
    import torch

    ordered, places = values.double().sort(stable=True)
    means = ordered.cumsum(0) / torch.arange(1, len(values) + 1, device=values.device)
    kept = torch.zeros_like(values, dtype=torch.bool)
    kept[places[: int((means <= bound).sum())]] = True
    return kept


class M2po(Correction, tag="m2po"):
    """The second moment of the log-ratio over a minibatch is held under a bound."""

    # Zheng et al. 2025, arXiv 2510.01161. The few tokens with the largest squared log-ratio are
    # masked, until the mean over the others is at most the bound. A second moment has no signs that
    # cancel and, unlike a variance of ratios, no heavy tail. As in the authors' code, and not in
    # the paper's formula, only tokens count that would be pushed further away (made likelier with a
    # positive advantage, or less likely with a negative one); a token that is pulled back is never
    # masked. Their code bounds another mean, in which masked tokens count with the square of the
    # threshold, and keeps all ratios between 0.7 and 1.5.

    max_second_moment: Positive = 0.04
    """Bound of the mean squared log-ratio, in nats squared."""

    needs_whole_minibatch: ClassVar[bool] = True

    def surrogate(self, tokens: Tokens, largest: Selection = largest_set_under) -> Surrogate:
        """Return the losses of as many tokens as the bound admits.

        Args:
            largest: selects the tokens to keep; ranks that share a minibatch select together.
        """
        gap = tokens.logprobs - tokens.behaviour
        is_pushed = gap.detach() * tokens.advantages > 0
        is_masked = is_pushed.clone()
        is_masked[is_pushed] = ~largest(gap.detach()[is_pushed] ** 2, self.max_second_moment)
        return _masked_losses(tokens, gap.exp(), is_masked)


class Vcpo(Correction, tag="vcpo"):
    """Truncated weights of whole sequences, smaller steps, and the baseline of least variance."""

    # Huang et al. 2026, arXiv 2602.17616. A sequence i of a minibatch of B has the weight
    # w_i = product over its tokens of current / behaviour, the score s_i = grad log current(i) and
    # the advantage A_i. The loss is `-sg(min(w_i, max_weight)) (A_i - b) log current`, and
    #
    #     learning rate *= sqrt(min(1, (sum w)^2 / (B sum w^2) / full_share))      effective sample
    #     b = sum(w^2 |s|^2 A) / sum(w^2 |s|^2)              off-policy optimal baseline
    #
    # with weights that are not truncated. As in the authors' code with the scope "minibatch", the
    # baseline is subtracted from advantages. (Their scripts subtract it from the rewards of a
    # group, which lies in one minibatch there.) If the turns of a sequence differ in their
    # advantages, A_i is the mean over its tokens.

    max_weight: Weight = 8.0
    """Largest importance weight of a sequence; larger ones are truncated."""
    full_share: Share = 1.0
    """The learning rate is reduced if the effective sample size of a minibatch, as a share of its
    sequences, is smaller."""

    def surrogate(self, tokens: Tokens) -> Surrogate:
        """Return the policy gradient loss under the truncated weights of sequences."""
        gap = tokens.logprobs.detach() - tokens.behaviour
        ratio = sums_within(gap, tokens.sequences).exp()
        weights = ratio.clamp(max=self.max_weight)
        losses = -weights * tokens.advantages * tokens.logprobs
        return Surrogate(losses, weights, ratio > self.max_weight, no_token(tokens))

    def variance_controls(
        self, log_weights: "torch.Tensor", squared_norms: "torch.Tensor", advantages: "torch.Tensor"
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return the baseline and the factor of the learning rate of a minibatch: two scalars.

        Args:
            log_weights: float64 [S]: logarithm of each sequence's weight.
            squared_norms: float64 [S]: squared norm of the gradient of each sequence's log-prob.
            advantages: float64 [S]
        """
        # Baseline and factor are ratios of sums of weights, so the largest weight may be set to 1.
        weights = (log_weights - log_weights.max()).exp()
        share = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
        factor = (share / max(self.full_share, 1e-8)).clamp(max=1.0).sqrt()
        counts = weights**2 * squared_norms
        # The bound replaces 0 / 0 by 0, where no sequence has a gradient.
        baseline = (counts * advantages).sum() / counts.sum().clamp(min=1e-300)
        return baseline, factor

    def check(self, config: Any) -> None:
        """Refuse every `learner.average` but "token": the weights of any other would be part of the
        advantages that the baseline is computed from. Refuse several ranks, each of which has only
        a share of a minibatch.
        """
        if config.learner.average != "token" or config.learner.ranks > 1:
            raise ConfigError(
                'learner.correction = "vcpo" takes its baseline among the whole sequences of a '
                'minibatch, in one process: set learner.average = "token" '
                f"(got {config.learner.average!r}) "
                f"and learner.ranks = 1 (got {config.learner.ranks})"
            )


# Two corrections that depend on the age of a token. A mask by age masks most tokens in the first
# episode of a trial, which is the oldest and, in meta-RL, the one that explores. Therefore
# `age_mask` is not the default, and metrics report staleness by episode.


class DecoupledAged(Truncated, tag="decoupled_aged"):
    """`decoupled`, whose bound shrinks with a token's staleness."""

    age_decay: Share = 0.8
    """The bound of a token's weight is `1 + (max_weight - 1) * age_decay ** staleness`, with its
    staleness in steps."""

    def weigh(self, tokens: Tokens) -> "tuple[torch.Tensor, torch.Tensor]":
        """Truncate weights at `1 + (max_weight - 1) age_decay ** staleness`."""
        age = tokens.staleness.to(tokens.advantages.dtype)
        bound = 1 + (self.max_weight - 1) * self.age_decay**age
        return importance(tokens).minimum(bound), no_token(tokens)


class AgeMask(Truncated, tag="age_mask"):
    """`decoupled`, without the stalest tokens."""

    max_age: Natural = 1
    """Tokens of a larger staleness, in steps, are masked."""

    def weigh(self, tokens: Tokens) -> "tuple[torch.Tensor, torch.Tensor]":
        """Truncate the weights, and mask old tokens."""
        is_masked = tokens.staleness > self.max_age
        return importance(tokens).clamp(max=self.max_weight), is_masked


def interpolated(
    behaviour: "torch.Tensor",
    current: "torch.Tensor",
    staleness: "torch.Tensor",
    progress: float,
) -> "torch.Tensor":
    """Estimate the log-probs under the weights at the beginning of a step, without a forward.

    A token's log-prob is taken to have changed evenly from the weights that sampled it, `staleness`
    steps before the beginning, to the present ones, `progress` of a step after it (A-3PO, arXiv
    2512.06547). For a token sampled with the weights of the beginning, that is its behaviour
    log-prob. A-3PO's implementation in AReaL estimates another policy, the one a step before the
    beginning, because its present weights are those of the beginning: `staleness` less 1 and
    `progress` 1.

    Args:
        behaviour, current: float32 [N]: log-probs in nats under the weights that sampled the
            tokens, and under the present ones.
        staleness: int32 [N], in steps.
        progress: above 0.
    """
    age = staleness.clamp(min=0).to(current.dtype)
    return behaviour + age / (age + progress) * (current - behaviour)


def importance(tokens: Tokens) -> "torch.Tensor":
    """Return the ratio of the proximal to the behaviour policy for each token: [N]."""
    return (tokens.proximal - tokens.behaviour).exp()


def binary_divergence(logprobs: "torch.Tensor", others: "torch.Tensor") -> "torch.Tensor":
    """Return the KL divergence KL(p || q) between two probabilities of one event, in nats: float64
    [N].

    Args:
        logprobs: [N]: log-prob of the event under p, over which the expectation is.
        others: [N]: log-prob of the event under q.
    """
    log_p, log_q = logprobs.double(), others.double()
    # The complement of a probability that rounds to 1 would be 0, whose logarithm is -inf.
    rest_p, rest_q = ((-each.expm1()).clamp(min=1e-12) for each in (log_p, log_q))
    return log_p.exp() * (log_p - log_q) + rest_p * (rest_p / rest_q).log()


def ones(tokens: Tokens) -> "torch.Tensor":
    """Return a weight of 1 for each token: float32 [N]."""
    return tokens.advantages.new_ones(len(tokens.advantages))


def no_token(tokens: Tokens) -> "torch.Tensor":
    """Return False for each token: bool [N]."""
    return tokens.advantages.new_zeros(len(tokens.advantages)).bool()


def sums_within(values: "torch.Tensor", numbers: "torch.Tensor") -> "torch.Tensor":
    """Return, for each token, the sum of `values` over all tokens with the same number: [N].
    `numbers` has the number of each token's turn or sequence.
    """
    totals = values.new_zeros(int(numbers.max()) + 1 if len(numbers) else 0)
    return totals.index_add(0, numbers, values)[numbers]


def turn_means(values: "torch.Tensor", turns: "torch.Tensor") -> "torch.Tensor":
    """Return, for each token, the mean of `values` over its turn: [N]."""
    return sums_within(values, turns) / sums_within(values.new_ones(len(values)), turns)


def _masked_losses(tokens: Tokens, ratio: "torch.Tensor", is_masked: "torch.Tensor") -> Surrogate:
    """Return the losses `-r A`, which are 0 at masked tokens; `ratio` and `is_masked` are [N]."""
    losses = (-ratio * tokens.advantages).masked_fill(is_masked, 0.0)
    weights = ratio.detach().masked_fill(is_masked, 0.0)
    return Surrogate(losses, weights, no_token(tokens), is_masked)
