"""Losses on stale tokens by kind, each with its own constants.

`mage_async/learning/corrections/catalogue.py` has the function of each.
"""

from typing import Annotated

from msgspec import Meta

from mage_async.config.sections.section import (
    Natural,
    NonNegative,
    Positive,
    Share,
    Variant,
)
from mage_async.errors import ConfigError

Weight = Annotated[float, Meta(ge=1)]


class Correction(Variant):
    """The loss on stale tokens."""


class Clipped(Correction):
    """A loss that is a weight times PPO's clipped one."""

    clip_low: Share = 0.2
    """The ratio is clipped below at one minus this."""
    clip_high: NonNegative = 0.28
    """The ratio is clipped above at one plus this."""
    dual_clip: NonNegative = 0.0
    """Bound of the loss where an advantage is negative, in units of it; above 1, or 0 for none."""


class Truncated(Clipped):
    """Importance weights with a largest one."""

    max_weight: Weight = 2.0
    """Importance weights are truncated here, or masked above it."""


class NoCorrection(Clipped, tag="none"):
    """Stale tokens are taken for fresh ones."""


class Ppo(Clipped, tag="ppo"):
    """PPO's clip around the behaviour policy."""


class Decoupled(Truncated, tag="decoupled"):
    """The clip around the proximal policy, under truncated importance weights."""


class Tis(Correction, tag="tis"):
    """Truncated importance sampling, without a clip."""

    max_weight: Weight = 2.0
    """Importance weights are truncated here."""


class Icepop(Clipped, tag="icepop"):
    """Tokens on which two policies disagree too much, either way, are left out."""

    keep_low: Share = 0.5
    """Tokens with a smaller weight are masked."""
    keep_high: Weight = 5.0
    """Tokens with a larger weight are masked."""


class MisToken(Truncated, tag="mis_token"):
    """Tokens whose weight is too large are left out."""


class MisSequence(Truncated, tag="mis_sequence"):
    """Turns the product of whose weights is too large are left out."""


class MisGeometric(Truncated, tag="mis_geometric"):
    """Turns the geometric mean of whose weights lies outside a band are left out."""

    keep_low: Share = 0.5
    """Turns with a smaller mean are masked."""
    keep_high: Weight = 5.0
    """Turns with a larger mean are masked."""


class Cispo(Correction, tag="cispo"):
    """The importance weight is clipped, never the gradient."""

    clip_low: Share = 0.2
    """The weight is clipped below at one minus this."""
    clip_high: NonNegative = 0.28
    """The weight is clipped above at one plus this."""


class Gspo(Correction, tag="gspo"):
    """One clipped ratio per completion."""

    clip_low: Share = 0.2
    """The ratio is clipped below at one minus this."""
    clip_high: NonNegative = 0.28
    """The ratio is clipped above at one plus this."""


class Dppo(Correction, tag="dppo"):
    """Tokens whose probability has moved too far are left out."""

    max_probability_change: Share = 0.2
    """Largest change of a token's probability."""


class M2po(Correction, tag="m2po"):
    """The second moment of the log-ratio is held under a bound."""

    max_second_moment: Positive = 0.04
    """Bound of the mean squared log-ratio, in nats squared."""


class DecoupledAged(Truncated, tag="decoupled_aged"):
    """`decoupled`, whose bound shrinks with a token's staleness."""

    age_decay: Share = 0.8
    """What is left of `max_weight - 1` per step of staleness."""


class AgeMask(Truncated, tag="age_mask"):
    """`decoupled`, without the stalest tokens."""

    max_age: Natural = 1
    """Staler tokens are masked, in steps."""


AnyCorrection = (
    NoCorrection
    | Ppo
    | Decoupled
    | Tis
    | Icepop
    | MisToken
    | MisSequence
    | MisGeometric
    | Cispo
    | Gspo
    | Dppo
    | M2po
    | DecoupledAged
    | AgeMask
)


def check(correction: Correction) -> None:
    """Refuse a dual clip that would bound every loss.

    Raises:
        ConfigError: with the key and what was got.
    """
    if isinstance(correction, Clipped) and 0 < correction.dual_clip <= 1:
        raise ConfigError(
            f"learner.correction.dual_clip must be above 1, or 0, got {correction.dual_clip}"
        )
