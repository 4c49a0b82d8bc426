"""Measure whether dropped groups bias the tasks that are trained: groups trained ÷ groups started.

A group that was dropped is not trained. If long groups, or those of one kind, are dropped more
often than others, the policy is trained on other tasks than the configuration names. The ratio of
selection is 1 if every group that started was trained; groups in flight are not counted yet.

`Selection` counts the groups of a whole run, and reads its metrics. `TrialDurations` counts the
trials of one learner process by their seconds; its `length_bias` and `wasted_share` are metrics.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mage_async.admission.ledger import DroppedGroup
from mage_async.environments.environment import Environment
from mage_async.results.progress import drop_kind
from mage_async.tasks.league import is_policy
from mage_async.trajectory import Group

Z_95 = 1.96
"""Number of standard deviations of a 95 % interval."""
LENGTH_CLASSES = ("short", "middle", "long")
"""Names of the classes of lengths; each class has equally many started groups, as far as groups of
equal length allow it.
"""


class Ratio(NamedTuple):
    """Hold a ratio of selection with its interval."""

    value: float
    low: float
    high: float


class Share(NamedTuple):
    """Count the groups of one length, kind or task."""

    label: str
    trained: int
    started: float
    """Number of groups trained or dropped; an estimate for a class of lengths."""

    def ratio(self, z: float = Z_95) -> Ratio:
        """Return trained ÷ started with Wilson's interval of `z` standard deviations."""
        share, scale = self.trained / self.started, 1 + z * z / self.started
        centre = (share + z * z / (2 * self.started)) / scale
        variance = share * (1 - share) / self.started + (z / (2 * self.started)) ** 2
        half = z / scale * math.sqrt(max(0.0, variance))
        # Rounding may put a bound of 0 or 1 beyond the share itself.
        return Ratio(
            share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))
        )


def contrast(one: Share, other: Share, z: float = Z_95) -> Ratio:
    """Return the ratio of selection of `one` over that of `other`, with its interval.

    The interval is made of the Wilson intervals of both on the scale of logarithms (the method of
    variance estimates recovery, Zou and Donner 2008), so it has a positive width even if nothing
    was dropped.
    """
    (p, p_low, p_high), (q, q_low, q_high) = one.ratio(z), other.ratio(z)
    if not q:
        return Ratio(math.inf if p else 1.0, p_low / q_high, math.inf)
    if not p:
        return Ratio(0.0, 0.0, p_high / q_low)
    value = p / q
    below = math.hypot(math.log(p / p_low), math.log(q_high / q))
    above = math.hypot(math.log(p_high / p), math.log(q / q_low))
    return Ratio(value, value * math.exp(-below), value * math.exp(above))


# The next two functions compute the metrics of a step that have their names.


def trained_groups(groups: Iterable[Group], environment: Environment) -> list[list[Any]]:
    """Count groups of a batch: lists of kind, task, turns of all trials, and number of groups."""
    counts = Counter(
        (kind_of(environment, task.member), task.member, num_turns)
        for group in groups
        # A list of one pair, which only gives names to its two values.
        for task, num_turns in [
            (group.trials[0].task, sum(len(trial.turns) for trial in group.trials))
        ]
    )
    return [[*key, count] for key, count in sorted(counts.items())]


def dropped_groups(drops: Iterable[DroppedGroup], environment: Environment) -> list[list[Any]]:
    """Count dropped groups: lists of kind, task, turns so far, cause, and number of groups."""
    counts = Counter(
        (
            kind_of(environment, drop.member),
            drop.member,
            drop.num_turns,
            drop_kind(drop.reason).name,
        )
        for drop in drops
    )
    return [[*key, count] for key, count in sorted(counts.items())]


def kind_of(environment: Environment, member: str) -> str:
    """Return the kind of a group's tasks: the family of what they hide (`member`); all past
    policies are one kind.
    """
    return "past policies" if is_policy(member) else environment.family(member)


@dataclass(slots=True)
class Selection:
    """Count the groups of a run that have ended, trained or dropped."""

    _trained: Counter[int] = field(default_factory=Counter)
    """Number of trained groups, by the turns of all their trials."""
    _dropped: Counter[int] = field(default_factory=Counter)
    """Number of dropped groups, by the turns that their trials had had when they were dropped."""
    _kinds: tuple[Counter[str], Counter[str]] = field(
        default_factory=lambda: (Counter(), Counter())
    )
    """Numbers of trained and of dropped groups, by kind."""
    _tasks: tuple[Counter[str], Counter[str]] = field(
        default_factory=lambda: (Counter(), Counter())
    )
    """Numbers of trained and of dropped groups, by task."""
    causes: Counter[str] = field(default_factory=Counter)
    """Number of dropped groups, by cause."""

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> "Selection":
        """Return the selection of a run from its lines of metrics."""
        selection = cls()
        for record in records:
            selection.add(record)
        return selection

    def add(self, record: Mapping[str, Any]) -> None:
        """Count the groups of a line of metrics; a line without them changes nothing."""
        for kind, task, turns, count in record.get("trained_groups", ()):
            self._trained[turns] += count
            self._kinds[0][kind] += count
            self._tasks[0][task] += count
        for kind, task, turns, cause, count in record.get("dropped_groups", ()):
            self._dropped[turns] += count
            self._kinds[1][kind] += count
            self._tasks[1][task] += count
            self.causes[cause] += count

    def whole(self) -> Share | None:
        """Return the share of all groups; None if none has ended."""
        trained, dropped = self._trained.total(), self._dropped.total()
        return Share("all", trained, trained + dropped) if trained + dropped else None

    def by_kind(self) -> list[Share]:
        """Return the share of every kind, the smallest ratio first."""
        return _shares(*self._kinds, self._kinds[0].keys() | self._kinds[1].keys())

    def by_task(self) -> list[Share]:
        """Return the share of every task that lost a group, the smallest ratio first."""
        return _shares(*self._tasks, self._tasks[1].keys())

    def by_length(self, num_trials: int) -> list[Share]:
        """Return the share of each class of lengths, shortest first; one class if all are alike.

        A dropped group is shorter than it would have become, so counting it by the turns that it
        had would count the drops of long groups as drops of short ones. Instead, the hazard of a
        drop is estimated for each number of turns from all groups that came so far (Kaplan and
        Meier 1958), and a trained group stands for all groups of its length that were started.
        Dropped groups that came further than any trained one count as long. Intervals of these
        shares are too narrow if more than half of the groups are dropped.

        Args:
            num_trials: Number of trials of a group; labels give the number of turns of one trial.
        """
        survival = 1.0  # estimated share of groups that are not dropped before a number of turns
        started = dict[int, float]()  # estimated number of started groups, by their whole length
        at_risk = self._trained.total() + self._dropped.total()
        total = at_risk
        for turns in sorted(self._trained.keys() | self._dropped.keys()):
            # A trained group with this number of turns could have been dropped at every smaller
            # number, but not at this one: it leaves the groups at risk before drops are counted.
            if turns in self._trained:
                started[turns] = self._trained[turns] / survival
                at_risk -= self._trained[turns]
            if turns in self._dropped:
                survival *= 1 - self._dropped[turns] / at_risk
                at_risk -= self._dropped[turns]
        if not started:
            return []
        started[max(started)] += max(0.0, total - sum(started.values()))
        classes: list[list[int]] = [[] for _ in LENGTH_CLASSES]
        before = 0.0
        for turns, number in started.items():
            # The groups of one length stay together, in the class that their middle one falls into.
            middle = (before + number / 2) / total
            classes[min(len(classes) - 1, int(middle * len(classes)))].append(turns)
            before += number
        return [
            Share(
                _length_label(name, lengths[0] / num_trials, lengths[-1] / num_trials),
                sum(self._trained[turns] for turns in lengths),
                sum(started[turns] for turns in lengths),
            )
            for name, lengths in zip(LENGTH_CLASSES, classes, strict=True)
            if lengths
        ]

    def long_over_short(self, num_trials: int, z: float = Z_95) -> Ratio | None:
        """Return the ratio of the longest class over that of the shortest.

        Returns:
            `None` if all groups are of one class.
        """
        classes = self.by_length(num_trials)
        return contrast(classes[-1], classes[0], z) if len(classes) > 1 else None

    def apart(self, z: float) -> list[tuple[Share, Ratio]]:
        """Return each kind with its ratio of selection over that of all other kinds together; empty
        if there is only one kind.
        """
        shares = self.by_kind()
        trained = sum(share.trained for share in shares)
        started = sum(share.started for share in shares)
        return [
            (share, contrast(share, Share("", trained - share.trained, started - share.started), z))
            for share in shares
            if len(shares) > 1
        ]


def _shares(
    trained: Mapping[str, int], dropped: Mapping[str, int], labels: Iterable[str]
) -> list[Share]:
    """Return the share of each label, the smallest ratio first."""
    shares = [
        Share(label, trained.get(label, 0), trained.get(label, 0) + dropped.get(label, 0))
        for label in sorted(labels)
    ]
    return sorted(shares, key=lambda share: share.trained / share.started)


def _length_label(name: str, least: float, most: float) -> str:
    """Return the label of a class of lengths, with its range of turns a trial."""
    span = f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
    return f"{name}: {span} turns a trial"


def ratio_text(ratio: Ratio) -> str:
    """Return a ratio with its interval, as `0.98 (0.95 to 1.00)`."""
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


# The code below counts trials by their seconds, to see whether long ones are trained less often.

BINS_PER_DOUBLING = 64
"""Number of bins in which a duration doubles, so that a bin is about one percent wide. Counts by
bin take bounded memory, however long a run is.
"""
SHORTEST_S = 1e-6
"""Seconds below which a duration counts as this one, because log2(0) is not finite."""
NUM_REMEMBERED = 4096
"""Least number of groups, granted before the oldest group in flight, whose trials are remembered. A
trial of a still older group that arrives late may not be counted.
"""


@dataclass(slots=True)
class DurationHistogram:
    """Count durations in logarithmic bins, and sum them up."""

    counts: Counter[int] = field(default_factory=Counter)
    """Number of durations in each bin."""
    seconds: float = 0.0
    """Sum of all durations."""

    def add(self, durations_s: Iterable[float]) -> None:
        """Count durations in seconds."""
        for duration_s in durations_s:
            self.counts[round(BINS_PER_DOUBLING * math.log2(max(duration_s, SHORTEST_S)))] += 1
            self.seconds += duration_s

    def __add__(self, other: "DurationHistogram") -> "DurationHistogram":
        return DurationHistogram(self.counts + other.counts, self.seconds + other.seconds)


def length_bias(started: DurationHistogram, trained: DurationHistogram) -> float:
    """Return how much more often than others the longest tenth of the started trials is trained.

    That is the longest tenth's share of the trained trials over its share of the started ones: 1 is
    unbiased, 0 means that no long trial is trained. The tenth is rounded up to whole bins.
    """
    if not started.counts or not trained.counts:
        return 1.0
    total, num_longest, num_trained = started.counts.total(), 0, 0
    for index in sorted(started.counts, reverse=True):
        num_longest += started.counts[index]
        num_trained += trained.counts[index]
        if 10 * num_longest >= total:
            break
    return (num_trained / trained.counts.total()) / (num_longest / total)


@dataclass(slots=True)
class TrialDurations:
    """Collect the durations of the trials of one learner process, trained and not trained.

    A trial counts from its arrival on, even if its group was dropped before. Trials that have not
    arrived do not count.
    """

    _untrained_durations: dict[int, dict[int, float]] = field(default_factory=dict)
    """Duration in seconds by grant and trial index, for groups that were not trained so far."""
    _trained_durations: DurationHistogram = field(default_factory=DurationHistogram)
    _dropped_durations: DurationHistogram = field(default_factory=DurationHistogram)
    """Durations of the trials of dropped groups that are no longer remembered."""
    _trained_grants: set[int] = field(default_factory=set)
    """Grants of groups that were trained. A trial of theirs that arrives again must not count
    again.
    """
    _oldest_remembered: int = 0
    """Number of the oldest group that is remembered; late trials of older ones do not count."""

    def arrived(self, grant: int, index: int, duration_s: float) -> None:
        """Count a trial once, however often it arrives."""
        if grant >= self._oldest_remembered and grant not in self._trained_grants:
            self._untrained_durations.setdefault(grant, {}).setdefault(index, duration_s)

    def trained(self, grants: Collection[int]) -> None:
        """Count the trials of these groups as trained."""
        self._trained_grants.update(grants)
        for grant in grants:
            self._trained_durations.add(self._untrained_durations.pop(grant, {}).values())

    def forget_before(self, oldest_in_flight: int) -> None:
        """Forget the groups that ended long before the oldest group in flight was granted."""
        first = oldest_in_flight - NUM_REMEMBERED
        if first < self._oldest_remembered + NUM_REMEMBERED:
            return  # a scan of all remembered groups is worth it only once many can be forgotten
        self._oldest_remembered = first
        self._trained_grants = {grant for grant in self._trained_grants if grant >= first}
        for grant in [grant for grant in self._untrained_durations if grant < first]:
            self._dropped_durations.add(self._untrained_durations.pop(grant).values())

    def length_bias(self, in_flight: Collection[int]) -> float:
        """Return `length_bias` over the trials of all groups that are not in flight."""
        return length_bias(self._trained_durations + self._lost(in_flight), self._trained_durations)

    def wasted_share(self, in_flight: Collection[int]) -> float:
        """Return the share of playing time that went into trials which were never trained."""
        lost = self._lost(in_flight).seconds
        return lost / max(1e-9, lost + self._trained_durations.seconds)

    def _lost(self, in_flight: Collection[int]) -> DurationHistogram:
        """Return the durations of all trials that were never trained, except those of groups in
        flight.
        """
        lost = DurationHistogram()
        for grant, durations in self._untrained_durations.items():
            if grant not in in_flight:
                lost.add(durations.values())
        return lost + self._dropped_durations
