"""A journal as the steps that a run computed, each with the trials it consumed.

`steps_of` reads records once, in order, and keeps no more than the trials in flight. Pure: records
in, steps out.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mage_async.admission.ledger import SlotLedger
from mage_async.admission.recovery import Committed, replay
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.protocol.journal_records import Dropped, Granted, Head, Record
from mage_async.protocol.trial_frames import TrialResult
from mage_async.tasks.population import League
from mage_async.trajectory import Group


@dataclass(frozen=True, slots=True)
class JournalStep:
    """Groups that one step trained, or groups that none did."""

    step: int | None
    """The policy version that the step made, from 1; None where the groups were dropped, or are in
    flight.
    """
    groups: Sequence[Group]
    """In the order in which the step took them."""
    config: Config
    """The configuration in force."""
    is_whole: bool
    """The batch is complete, so advantages can be computed: not where a part of it lies in segments
    that were deleted.
    """


def steps_of(records: Iterable[Record]) -> Iterator[JournalStep]:
    """Every step of a journal, each after the groups that were dropped before it; at the end, the
    groups in flight.

    Args:
        records: of a journal, from the head of a segment on.

    Raises:
        RunError: the records contradict each other.
    """
    seen = _Seen(records)
    for committed in replay(seen, SlotLedger(1, 0, 1), League()):
        if dropped := seen.pop_dropped():
            yield JournalStep(None, dropped, _config(seen.config), is_whole=False)
        yield _step(committed, seen.pop(committed.commit.grants))
    if rest := seen.pop(seen.grants()):
        yield JournalStep(None, rest, _config(seen.config), is_whole=False)


_config = lru_cache(maxsize=2)(config_file.loads)
"""Heads of a journal repeat the configuration."""


def _step(committed: Committed, there: Sequence[Group]) -> JournalStep:
    is_whole = committed.groups is not None
    groups = there if committed.groups is None else committed.groups
    return JournalStep(committed.commit.version, groups, _config(committed.config), is_whole)


class _Seen:
    """Records as they pass by, and the trials among them that no step has consumed yet."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = records
        self._trials: dict[int, list[TrialResult]] = {}
        self._versions: dict[int, int] = {}
        self._dropped: list[int] = []
        self.config = ""

    def __iter__(self) -> Iterator[Record]:
        for record in self._records:
            match record:
                case Head():
                    self.config = record.config
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
        """Groups of which a trial is there, in the order of arrival."""
        return tuple(self._trials)

    def pop_dropped(self) -> list[Group]:
        """What there is of the groups that were dropped since this was asked last."""
        dropped, self._dropped = tuple(self._dropped), []
        return self.pop(dropped)

    def pop(self, grants: Sequence[int]) -> list[Group]:
        """What there is of some groups; from here on they are over."""
        groups = []
        for grant in grants:
            version = self._versions.pop(grant, 0)
            results = self._trials.pop(grant, ())
            trials = {trial.index: trial for result in results for trial in result.trials()}
            if trials:
                ordered = tuple(trials[index] for index in sorted(trials))
                groups.append(Group(grant, version, ordered))
        return groups
