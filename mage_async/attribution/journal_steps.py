"""A journal as a sequence of steps, each with the groups of trials that it trained.

`steps_of` reads the records once, in order, and keeps only the trials in flight in memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mage_async.admission.ledger import Ledger
from mage_async.admission.recovery import RecordsWithConfig, replay
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.protocol.journal_records import Dropped, Granted, Record, SegmentHeader
from mage_async.protocol.trial_frames import TrialResult
from mage_async.tasks.league import League
from mage_async.trajectory import Group


@dataclass(frozen=True, slots=True)
class JournalStep:
    """Groups that one step trained, or groups that no step trained."""

    step: int | None
    """The policy version that the step made, from 1; None for groups that were dropped or are in
    flight."""
    groups: Sequence[Group]
    """In the order in which the step took them."""
    config: Config
    """The configuration in force at the step."""
    is_whole: bool
    """Whether the whole batch is there, so that advantages can be computed; False if a part of it
    lies in deleted segments."""


def steps_of(records: Iterable[Record]) -> Iterator[JournalStep]:
    """Yield the steps of a journal, each after the groups that were dropped before it.

    The groups in flight come last.

    Args:
        records: From the header of any segment on.

    Raises:
        RunError: the records contradict each other.
    """
    pending = _PendingTrials(records)
    for committed in replay(pending, Ledger(1, 0, 1), League()):
        if dropped := pending.pop_dropped():
            yield JournalStep(None, dropped, _config(pending.config), is_whole=False)
        groups, is_whole = pending.pop(committed.commit.grants), committed.groups is not None
        yield JournalStep(
            committed.commit.version,
            committed.groups if committed.groups is not None else groups,
            _config(committed.config),
            is_whole,
        )
    if rest := pending.pop(pending.grants()):
        yield JournalStep(None, rest, _config(pending.config), is_whole=False)


# Every segment's header repeats the configuration.
_config = lru_cache(maxsize=2)(config_file.loads)


class _PendingTrials(RecordsWithConfig):
    """Iterates over records, and keeps the trials among them that no step has trained so far."""

    def __init__(self, records: Iterable[Record]) -> None:
        super().__init__(records)
        self._trials: dict[int, list[TrialResult]] = {}
        self._versions: dict[int, int] = {}
        self._dropped: list[int] = []

    def __iter__(self) -> Iterator[Record]:
        for record in super().__iter__():
            match record:
                case SegmentHeader():
                    for granted in record.groups:
                        self._versions.setdefault(granted.grant.grant, granted.version)
                case Granted():
                    self._versions.setdefault(record.grant.grant, record.version)
                case TrialResult():
                    self._trials.setdefault(record.grant, []).append(record)
                case Dropped():
                    self._dropped.append(record.grant)
            yield record

    def grants(self) -> tuple[int, ...]:
        """Return the groups with a trial, in the order in which their first trials arrived."""
        return tuple(self._trials)

    def pop_dropped(self) -> list[Group]:
        """Return the groups dropped since the last call, as far as their trials arrived."""
        dropped, self._dropped = tuple(self._dropped), []
        return self.pop(dropped)

    def pop(self, grants: Sequence[int]) -> list[Group]:
        """Return groups as far as their trials arrived, and forget them."""
        groups = []
        for grant in grants:
            version = self._versions.pop(grant, 0)
            results = self._trials.pop(grant, ())
            trials = {trial.index: trial for result in results for trial in result.trials()}
            if trials:
                ordered = tuple(trials[index] for index in sorted(trials))
                groups.append(Group(grant, version, ordered))
        return groups
