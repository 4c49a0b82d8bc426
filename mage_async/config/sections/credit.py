"""From rewards to advantages."""

from typing import Literal

from msgspec import field

from mage_async.config.sections.section import NonNegative, Section, Share

Key = Literal["group", "member", "seat", "kind", "episode", "index", "anchor", "memory"]
CreditKind = Literal[
    "differential",
    "differential_dense",
    "cumulative_paper",
    "cumulative_code",
    "single_episode",
    "final_only",
]


class Credit(Section):
    """Rewards to returns; see `mage_async/credit/returns.py`."""

    kind: CreditKind = "final_only"
    """Which rewards a turn is paid, across episodes."""
    turn_discount: Share = 1.0
    """Discount a turn, inside an episode."""
    episode_discount: Share = 1.0
    """Discount an episode, between episodes."""
    exploration_share: Share = 1.0
    """Share of the environment's return that turns before the last episode are credited with."""
    information_bonus: NonNegative = 0.0
    """Reward per nat that a turn gains about the hidden member, in all episodes but the last; needs
    an environment with a Bayes filter (`mage_async/credit/exploration_bonus.py`)."""


class Advantage(Section):
    """Returns to advantages; see `mage_async/learning/advantages.py`."""

    estimator: Literal["group_mean", "leave_one_out", "gigpo"] = "group_mean"
    """Return against the mean of its cell, or of the others in it (RLOO); or GiGPO's two terms."""
    baseline: list[Key] = field(default_factory=lambda: ["group", "kind", "episode", "index"])
    """What turns of one cell share, which are compared; for gigpo the cells of its first term."""
    scale: list[Key] | Literal["none"] = field(default_factory=lambda: ["member"])
    """What turns share whose standard deviation an advantage is divided by; [] is all of them."""
    weight: Literal["trial", "sample"] = "trial"
    """Whether a mean is over trials, or over turns, so that long trials weigh more."""
    epsilon: NonNegative = 0.05
    """Added to the standard deviation, in units of return."""
    anchor_weight: NonNegative = 0.0
    """Weight of the comparison with turns taken in the same state."""
    format_penalty: NonNegative = 1.0
    """Penalty of a turn without a valid action or remark, in every episode."""
    length_penalty: NonNegative = 0.0
    """Penalty of a completion as long as its limit; from half of it on, linearly."""
    penalise: Literal["advantage", "return", "score"] = "advantage"
    """Where penalties are taken: from the advantage after all normalisation; from returns (and
    scores) before it; or from gigpo's first term alone, as the reference does."""
