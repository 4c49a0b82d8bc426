"""Signatures of the policy: its entropy, its actions, and what it earns by them.

Thresholds come from recorded runs of the quickstart, Scout and Kuhn poker (three seeds of each of
the first two, one of the third), whose figures stand beside them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from mage_async.doctor.finding import Case, Record, Sighting
from mage_async.doctor.progress import Progress
from mage_async.doctor.windows import Level, Lowest, Recent, Streak

COLLAPSED_SHARE = 0.05
"""Of the first steps' entropy. Healthy runs went down to 0.15 of it in Kuhn poker, 0.22 in the
quickstart, and 0.06 in Scout, which was solved by then."""
NO_ENTROPY = 0.01
"""Nats: a token in a thousand is drawn otherwise than the likeliest; no sampling explores so."""
RUNAWAY_TIMES, RUNAWAY_NATS = 2.0, 0.3
"""Above the lowest entropy so far, both. The largest rise of a healthy run was 0.12 nats."""
INVALID_RISE = 0.1
"""Share of actions, above the lowest mean so far. The largest in a healthy run was 0.04."""
TRUNCATED = 0.1
"""Share of actions: of ten trials with ten actions each, nearly all would be hurt."""
GAMED_VALID, GAMED_LEAST = 0.05, 0.95
"""Rise of the share of valid actions, and what it reaches. In healthy runs it starts there."""
GAMED_RETURN = 0.05
"""Fall of the return meanwhile, of the span of returns: 0.1 per unit in the quickstart, where the
mean of five batches varies by 0.02."""


@dataclass(slots=True)
class EntropyCollapse:
    """Entropy near nothing while the return does not rise and could."""

    case: Case
    progress: Progress = field(init=False)
    _level: Level = field(default_factory=lambda: Level(5))
    _recent: Recent = field(default_factory=lambda: Recent(3))
    _streak: Streak = field(default_factory=lambda: Streak(2))

    def __post_init__(self) -> None:
        self.progress = Progress(self.case)

    def step(self, record: Record) -> Iterable[Sighting]:
        """See `Watch`."""
        if (entropy := record.get("entropy")) is None:
            return
        self._level.add(entropy)
        self._recent.add(entropy)
        self.progress.add(record["return_by_episode"][-1])
        level, mean = self._level.value, self._recent.mean()
        is_low = level is not None and mean < max(NO_ENTROPY, COLLAPSED_SHARE * level)
        is_stuck = not self.progress.is_solved() and not self.progress.is_rising()
        if self._streak.add(record["step"], is_low and is_stuck):
            yield Sighting(
                self._streak.onset,
                f"entropy is {mean:.3g} nats, at first {level:.3g}; the last episode's return "
                f"stays at {self.progress.latest():+.2f}",
            )


@dataclass(slots=True)
class EntropyRunaway:
    """Entropy far above what the policy had come down to."""

    case: Case
    _lowest: Lowest = field(default_factory=lambda: Lowest(Recent(3)))
    _streak: Streak = field(default_factory=lambda: Streak(2))

    def step(self, record: Record) -> Iterable[Sighting]:
        """See `Watch`."""
        if "entropy" not in record or (mean := self._lowest.add(record["entropy"])) is None:
            return
        low = self._lowest.value or 0.0
        is_high = mean > max(RUNAWAY_TIMES * low, low + RUNAWAY_NATS)
        if self._streak.add(record["step"], is_high):
            yield Sighting(
                self._streak.onset, f"entropy is {mean:.3g} nats, after as little as {low:.3g}"
            )


@dataclass(slots=True)
class InvalidRising:
    """More and more actions that are refused or cannot be parsed."""

    case: Case
    _lowest: Lowest = field(default_factory=lambda: Lowest(Recent(4)))
    _streak: Streak = field(default_factory=lambda: Streak(2))

    def step(self, record: Record) -> Iterable[Sighting]:
        """See `Watch`."""
        if "valid_action_share" not in record:
            return
        mean = self._lowest.add(1.0 - record["valid_action_share"])
        if mean is None:
            return
        low = self._lowest.value or 0.0
        if self._streak.add(record["step"], mean > low + INVALID_RISE):
            evidence = f"{mean:.0%} of actions are invalid, after as few as {low:.1%}"
            yield Sighting(self._streak.onset, evidence)


@dataclass(slots=True)
class Truncation:
    """Actions that are cut off before they are complete."""

    case: Case
    _streak: Streak = field(default_factory=lambda: Streak(3))

    def step(self, record: Record) -> Iterable[Sighting]:
        """See `Watch`."""
        share = record.get("truncated_action_share", 0.0)
        if self._streak.add(record["step"], share > TRUNCATED):
            most = self.case.config.transcript.max_action_tokens
            evidence = f"{share:.0%} of actions used up their {most} tokens and are invalid"
            yield Sighting(self._streak.onset, evidence)


@dataclass(slots=True)
class FormatGaming:
    """More valid actions and less return: the form is learned in place of the task."""

    case: Case
    _valid: Recent = field(default_factory=lambda: Recent(10))
    _returns: Recent = field(default_factory=lambda: Recent(10))
    _streak: Streak = field(default_factory=lambda: Streak(2))

    def step(self, record: Record) -> Iterable[Sighting]:
        """See `Watch`."""
        if "valid_action_share" not in record:
            return
        self._valid.add(record["valid_action_share"])
        self._returns.add(record["return_by_episode"][-1])
        if not self._valid.is_full:
            return
        (was, now), (earned, earns) = _halves(self._valid), _halves(self._returns)
        is_formal = now > max(was + GAMED_VALID, GAMED_LEAST)
        is_poorer = earns < earned - GAMED_RETURN * self.case.span()
        if self._streak.add(record["step"], is_formal and is_poorer):
            yield Sighting(
                self._streak.onset,
                f"valid actions rose from {was:.0%} to {now:.0%} in ten steps while the last "
                f"episode's return fell from {earned:+.2f} to {earns:+.2f}",
            )


def _halves(recent: Recent) -> tuple[float, float]:
    middle = recent.size // 2
    return recent.mean(0, middle), recent.mean(middle)
