"""Measure whether dropped groups bias the mix of tasks that are trained.

A group that was dropped is not trained. If long groups, or those of one kind, are dropped more
often than others, the policy is trained on another mix of tasks than the configuration names. The
*ratio of selection*, trained groups ÷ started groups, is therefore compared between lengths, kinds
and tasks. Groups in flight are not counted yet.

`Selection` counts the groups of a run by its lines of metrics.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mage_async.admission.ledger import DroppedGroup
from mage_async.environments.environment import Environment
from mage_async.environments.user_calls import as_config_error
from mage_async.errors import MageError, in_utf8
from mage_async.results.intervals import Z_95, wilson
from mage_async.results.progress import drop_kind
from mage_async.tasks.league import is_policy
from mage_async.trajectory import Group

UNKNOWN_KIND = "?"
"""Kind of a task whose `family` raises."""

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
        share = self.trained / self.started
        low, high = wilson(self.trained, self.started, z)
        # Rounding may put a bound of 0 or 1 beyond the share itself.
        return Ratio(share, min(share, low), max(share, high))


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


# The next two functions compute the metrics `trained_groups` and `dropped_groups` of a step.


def trained_groups(groups: Iterable[Group], kinds: "Kinds") -> list[list[Any]]:
    """Count groups of a batch: lists of kind, task, turns of all trials, and number of groups."""
    counts = Counter[tuple[str, str, int]]()
    for group in groups:
        member = group.trials[0].task.member
        num_turns = sum(len(trial.turns) for trial in group.trials)
        counts[kinds.of(member), member, num_turns] += 1
    return [[*key, count] for key, count in sorted(counts.items())]


def dropped_groups(drops: Iterable[DroppedGroup], kinds: "Kinds") -> list[list[Any]]:
    """Count dropped groups: lists of kind, task, turns so far, cause, and number of groups."""
    counts = Counter(
        (
            kinds.of(drop.member),
            drop.member,
            drop.num_turns,
            drop_kind(drop.reason).name,
        )
        for drop in drops
    )
    return [[*key, count] for key, count in sorted(counts.items())]


class Kinds:
    """Find the kind of each task, once: `family` may be a user's, so it may be slow or raise.

    Args:
        note: Called with a sentence at the first exception of `family`. The exception is not
            raised, because the step has been committed and must be recorded.
    """

    def __init__(self, environment: Environment, note: Callable[[str], None]) -> None:
        self._environment, self._note = environment, note
        self._known: dict[str, str] = {}
        self._is_noted = False

    def of(self, member: str) -> str:
        """Return the kind of a group's tasks: the family of what they hide (`member`), or
        `UNKNOWN_KIND` if `family` raises; all past policies are one kind.
        """
        if is_policy(member):
            return "past policies"
        if member not in self._known:
            self._known[member] = self._family(member)
        return self._known[member]

    def _family(self, member: str) -> str:
        """Call `family`; see `of`."""
        try:
            with as_config_error(self._environment.facts.name):
                return in_utf8(str(self._environment.family(member)))
        except MageError as error:
            if not self._is_noted:
                self._is_noted = True
                self._note(
                    f"family({member!r}) raised, so the task counts as one of the kind "
                    f"{UNKNOWN_KIND!r}: {error}"
                )
            return UNKNOWN_KIND


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

    def wasted_share(self) -> float:
        """Return the share of dropped groups in the turns of all groups; 0 if none has ended."""
        trained, dropped = (
            sum(turns * count for turns, count in groups.items())
            for groups in (self._trained, self._dropped)
        )
        return dropped / max(1, trained + dropped)

    def by_kind(self) -> list[Share]:
        """Return the share of every kind, the smallest ratio first."""
        return _shares(*self._kinds, self._kinds[0].keys() | self._kinds[1].keys())

    def by_task(self) -> list[Share]:
        """Return the share of every task that lost a group, the smallest ratio first."""
        return _shares(*self._tasks, self._tasks[1].keys())

    def by_length(self, num_trials: int) -> list[Share]:
        """Return the share of each class of lengths, shortest first; one class if all are equal.

        A dropped group is shorter than it would have become, so counting it by the turns that it
        had would count the drops of long groups as drops of short ones. Instead, the hazard of a
        drop is estimated for each number of turns from all groups that reached it (Kaplan and
        Meier 1958). Each trained group is weighted by 1 / (estimated probability that a group of
        its length is not dropped), so that it also represents the dropped groups of its length.
        Dropped groups that were longer than any trained one count as long. Intervals of these
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

    def contrasts_by_kind(self, z: float) -> list[tuple[Share, Ratio]]:
        """Return each kind with its ratio of selection over that of all other kinds together; empty
        if there is only one kind.
        """
        shares = self.by_kind()
        if len(shares) < 2:
            return []
        trained = sum(share.trained for share in shares)
        started = sum(share.started for share in shares)
        return [
            (share, contrast(share, Share("", trained - share.trained, started - share.started), z))
            for share in shares
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
    """Return the label of a class of lengths, with its range of turns per trial."""
    span = f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
    return f"{name}: {span} turns a trial"


def ratio_text(ratio: Ratio) -> str:
    """Return a ratio with its interval, as `0.98 (0.95 to 1.00)`."""
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
