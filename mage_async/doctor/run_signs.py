"""Signatures of the run around the learning: who waits, what fails, what runs out."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from mage_async.doctor.finding import Case, Record, Sighting
from mage_async.doctor.windows import Recent, Streak

STARVING = 0.9
"""Share of the time of eight steps. The learner of a healthy quickstart waits for 0.3 to 0.5 of it
on two cores, where engines and learner share them."""
IDLE = 0.8
"""Share of the actors' time, mean of eight steps. Actors of a healthy Scout are idle for 0.35."""
FAILURES, LATELY = 3, 20
"""Groups of one member that were given up, within so many steps: with 24 members and 4 groups a
step, each is met three times."""
MOST_NAMED = 3
"""Where more members fail than these, the environment does."""
LEAST_FREE = 1_000_000_000
"""Bytes: less does not hold a journal segment, a checkpoint and the logs of a small run."""


@dataclass(slots=True)
class MemberFailing:
    """Groups in which one member is hidden are given up again and again."""

    case: Case
    _drops: deque[tuple[int, dict[str, int]]] = field(default_factory=deque)

    def step(self, record: Record) -> Iterable[Sighting]:
        """See `Watch`."""
        step, drops = record["step"], record.get("dropped_by_member", {})
        if drops:
            self._drops.append((step, drops))
        while self._drops and self._drops[0][0] <= step - LATELY:
            self._drops.popleft()
        if not drops:
            return
        counts: Counter[str] = Counter()
        for _, each in self._drops:
            counts.update(each)
        failing = {name: count for name, count in counts.items() if count >= FAILURES}
        if len(failing) > MOST_NAMED:
            total = f"{sum(failing.values())} groups of {len(failing)} members"
            yield Sighting(self._drops[0][0], f"{total} were given up in {LATELY} steps")
            return
        for member in sorted(failing):
            onset = next(at for at, each in self._drops if member in each)
            evidence = f"{failing[member]} of its groups were given up in {LATELY} steps"
            yield Sighting(onset, evidence, member)


@dataclass(slots=True)
class DiskSoonFull:
    """The disk will be full before the last step, or nearly is."""

    case: Case
    _free: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=8))
    _streak: Streak = field(default_factory=lambda: Streak(3))

    def step(self, record: Record) -> Iterable[Sighting]:
        """See `Watch`."""
        if (free := record.get("disk_free_bytes")) is None:
            return
        step = record["step"]
        self._free.append((step, free))
        began, had = self._free[0]
        used = max(0.0, (had - free) / max(1, step - began))
        left = self.case.config.learner.steps - step
        is_short = len(self._free) == self._free.maxlen and free < used * left
        if self._streak.add(step, is_short or free < LEAST_FREE):
            yield Sighting(
                self._streak.onset,
                f"{free / 1e9:.1f} GB are free, a step takes {used / 1e6:,.0f} MB and {left} steps "
                "are left",
            )


@dataclass(slots=True)
class LearnerStarving:
    """The learner waits for trials nearly all the time."""

    case: Case
    _waits: Recent = field(default_factory=lambda: Recent(8))
    _works: Recent = field(default_factory=lambda: Recent(8))
    _streak: Streak = field(default_factory=lambda: Streak(3))

    def step(self, record: Record) -> Iterable[Sighting]:
        """See `Watch`."""
        self._waits.add(record.get("waiting_s", 0.0))
        self._works.add(record.get("train_s", 0.0))
        waits, works = self._waits.mean(), self._works.mean()
        is_starving = self._waits.is_full and waits > STARVING * (waits + works)
        if self._streak.add(record["step"], is_starving):
            evidence = f"a step waits {waits:.1f} s for its batch and computes {works:.1f} s"
            yield Sighting(self._streak.onset, evidence)


@dataclass(slots=True)
class ActorsStarving:
    """The actors have nothing to play nearly all the time."""

    case: Case
    _idle: Recent = field(default_factory=lambda: Recent(8))
    _streak: Streak = field(default_factory=lambda: Streak(3))

    def step(self, record: Record) -> Iterable[Sighting]:
        """See `Watch`."""
        if (share := record.get("actors_idle_share")) is None:
            return
        self._idle.add(share)
        mean = self._idle.mean()
        if self._streak.add(record["step"], self._idle.is_full and mean > IDLE):
            yield Sighting(self._streak.onset, f"actors wait for {mean:.0%} of their time")
