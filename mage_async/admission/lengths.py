"""How long trials took, and which of them were trained: what a rule does to long ones.

Lengths are counted in bins of one percent, so a learner of a million trials keeps no more than one
of a thousand and answers as fast.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

BINS_A_DOUBLING = 64
SHORTEST_S = 1e-6
REMEMBERED = 4096
"""Grants before the oldest group in flight of which a late result still counts."""


@dataclass(slots=True)
class Histogram:
    """Lengths in seconds by bin, and their sum."""

    counts: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, lengths_s: Iterable[float]) -> None:
        """Count some."""
        for length_s in lengths_s:
            self.counts[round(BINS_A_DOUBLING * math.log2(max(length_s, SHORTEST_S)))] += 1
            self.seconds += length_s

    def __add__(self, other: "Histogram") -> "Histogram":
        return Histogram(self.counts + other.counts, self.seconds + other.seconds)


def bias(started: Histogram, trained: Histogram) -> float:
    """`length_bias` of binned lengths: the longest tenth of the started ones, rounded up to whole
    bins, as a share of the trained ones over its share of the started ones.
    """
    if not started.counts or not trained.counts:
        return 1.0
    total, longest, of_trained = started.counts.total(), 0, 0
    for place in sorted(started.counts, reverse=True):
        longest += started.counts[place]
        of_trained += trained.counts[place]
        if 10 * longest >= total:
            break
    return (of_trained / trained.counts.total()) / (longest / total)


@dataclass(slots=True)
class Lengths:
    """Of one learner since it began.

    A trial counts once it has come in, also where its group was dropped meanwhile; those still in
    flight at the end do not count.
    """

    _open: dict[int, dict[int, float]] = field(default_factory=dict)
    """Seconds by grant and trial, of groups that are not trained."""
    _trained: Histogram = field(default_factory=Histogram)
    _dropped: Histogram = field(default_factory=Histogram)
    """Of groups that were dropped and are forgotten."""
    _ended: set[int] = field(default_factory=set)
    """Grants that were trained: a late duplicate of theirs does not count."""
    _first: int = 0
    """Grants before this one are forgotten."""

    def arrived(self, grant: int, trial: int, length_s: float) -> None:
        """A trial came in; again is the same as once."""
        if grant >= self._first and grant not in self._ended:
            self._open.setdefault(grant, {}).setdefault(trial, length_s)

    def trained(self, grants: Collection[int]) -> None:
        """Groups were trained."""
        self._ended.update(grants)
        for grant in grants:
            self._trained.add(self._open.pop(grant, {}).values())

    def forget_before(self, oldest_in_flight: int) -> None:
        """Forget which groups ended long before all in flight were granted."""
        first = oldest_in_flight - REMEMBERED
        if first < self._first + REMEMBERED:
            return
        self._first = first
        self._ended = {grant for grant in self._ended if grant >= first}
        for grant in [grant for grant in self._open if grant < first]:
            self._dropped.add(self._open.pop(grant).values())

    def bias(self, in_flight: Collection[int]) -> float:
        """`bias` of the trials of all groups but those in flight."""
        return bias(self._trained + self._lost(in_flight), self._trained)

    def wasted_share(self, in_flight: Collection[int]) -> float:
        """Share of playing time that was spent on trials which were not trained."""
        lost = self._lost(in_flight).seconds
        return lost / max(1e-9, lost + self._trained.seconds)

    def _lost(self, in_flight: Collection[int]) -> Histogram:
        lost = Histogram()
        for grant, ends in self._open.items():
            if grant not in in_flight:
                lost.add(ends.values())
        return lost + self._dropped
