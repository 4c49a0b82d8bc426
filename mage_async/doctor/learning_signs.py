"""Signatures of what a step learns from, and of what it computes of that: nothing to compare, data
that the policy did not draw, numbers that are none.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from mage_async.admission.staleness import OLDEST_AGE
from mage_async.doctor.finding import Case, Record, Sighting
from mage_async.doctor.progress import Progress
from mage_async.doctor.windows import Streak

NO_VARIANCE = 0.98
"""Share of tokens without advantage. Kuhn poker, whose groups share their cards, ends at 0.8, with
single steps at 1; five steps in a row are not chance."""
FEW_EFFECTIVE = 0.3
"""Effective share of tokens. The lowest single step of a healthy run had 0.47 (Scout)."""
MOST_MASKED = 0.5
"""Share of tokens that the correction leaves out: above it a step learns from the lesser half."""
MISMATCH = 0.05
"""Nats, mean, at equal version. Engines in bfloat16 are 0.01 to 0.03 off, this one's 1e-7."""
YOUNG_K3 = 0.3
"""Nats, of the youngest tokens of a batch. The largest in a healthy run was 0.22, for one step."""
STALE_SHARE = 0.01
"""Share of all tokens, by one actor; the rule `slots` allows none."""
MAIN_SHARE = 0.6
"""Of the tokens over the bound: one actor has most of them, so the rule of admission is not why."""


@dataclass(slots=True)
class NotFinite:
    """The loss or the gradient is no number. One such step spoils the weights."""

    case: Case
    _streak: Streak = field(default_factory=lambda: Streak(1))

    def step(self, record: Record) -> Iterable[Sighting]:
        """See `Watch`."""
        values = {name: record.get(name, 0.0) for name in ("loss", "grad_norm")}
        wrong = [f"{name} is {at}" for name, at in values.items() if not math.isfinite(at)]
        if self._streak.add(record["step"], bool(wrong)):
            yield Sighting(self._streak.onset, " and ".join(wrong))


@dataclass(slots=True)
class NoVariance:
    """Trials of a group earn the same, and it is not the most that can be earned."""

    case: Case
    progress: Progress = field(init=False)
    _streak: Streak = field(default_factory=lambda: Streak(5))

    def __post_init__(self) -> None:
        self.progress = Progress(self.case)

    def step(self, record: Record) -> Iterable[Sighting]:
        """See `Watch`."""
        if (share := record.get("zero_advantage_share")) is None:
            return
        self.progress.add(record["return_by_episode"][-1])
        is_flat = share > NO_VARIANCE and not self.progress.is_solved()
        if self._streak.add(record["step"], is_flat):
            yield Sighting(
                self._streak.onset,
                f"{share:.0%} of sampled tokens have advantage 0; the last episode's return is "
                f"{self.progress.latest():+.2f}",
            )


@dataclass(slots=True)
class OffPolicy:
    """The policy has gone so far from the one that played that few tokens count."""

    case: Case
    _streak: Streak = field(default_factory=lambda: Streak(3))

    def step(self, record: Record) -> Iterable[Sighting]:
        """See `Watch`."""
        effective, masked = record.get("effective_share", 1.0), record.get("masked_share", 0.0)
        age = record.get("staleness_mean", 0.0)
        if self._streak.add(record["step"], effective < FEW_EFFECTIVE or masked > MOST_MASKED):
            yield Sighting(
                self._streak.onset,
                f"importance weights leave {effective:.0%} of the tokens effective, and the "
                f"correction masks {masked:.0%}; mean staleness {age:.2g}",
            )


@dataclass(slots=True)
class EngineMismatch:
    """The engine's log-probs are not those of the weights it says it draws with."""

    case: Case
    _streak: Streak = field(default_factory=lambda: Streak(3))

    def step(self, record: Record) -> Iterable[Sighting]:
        """See `Watch`."""
        gap = record.get("logprob_mismatch_mean", 0.0)
        age, k3 = _youngest(record)
        if self._streak.add(record["step"], gap > MISMATCH or k3 > YOUNG_K3):
            equal = f"{gap:.2g} nats at equal version, and " if gap else ""
            yield Sighting(
                self._streak.onset,
                f"log-probs of engine and learner differ by {equal}k3 {k3:.2g} nats on tokens said "
                f"to be {age} steps old",
            )


@dataclass(slots=True)
class OverBoundByActor:
    """One actor plays with weights that are older than the bound."""

    case: Case
    _streaks: dict[str, Streak] = field(default_factory=dict)

    def step(self, record: Record) -> Iterable[Sighting]:
        """See `Watch`."""
        shares = record.get("over_bound_by_actor", {})
        total = sum(shares.values())
        kept: dict[str, Streak] = {}
        for actor, share in shares.items():
            streak = kept[actor] = self._streaks.get(actor, Streak(3))
            if streak.add(record["step"], share > max(STALE_SHARE, MAIN_SHARE * total)):
                rules = self.case.config.admission
                evidence = f"{share:.0%} of all tokens are older than {rules.max_staleness}"
                behind = f" + {rules.lag}" if rules.lag else ""
                yield Sighting(
                    streak.onset, f"{evidence}{behind} steps and were played there", actor
                )
        self._streaks = kept


def _youngest(record: Record) -> tuple[int, float]:
    """The least age that the batch has tokens of, and their k3; 0 of both where no age is said."""
    for age in range(OLDEST_AGE + 1):
        if f"k3_mean_age_{age}" in record:
            return age, record[f"k3_mean_age_{age}"]
    return 0, 0.0
