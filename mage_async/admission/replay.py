"""Replay the journal's records: rebuild the ledger (groups in flight), the league (past policies
that play as opponents) and the methods' states of a run.

The records are an argument: nothing here reads a file. `services/mage_services/learner/resume.py`
reads them after a restart of the learner, and trains the steps after its checkpoint again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mage_async.admission.ledger import DroppedGroup, Ledger
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import RunError, RunFailed
from mage_async.methods.method import Methods
from mage_async.protocol.journal_records import (
    Commit,
    Dropped,
    Granted,
    LoadedWeights,
    Published,
    Record,
    SegmentHeader,
)
from mage_async.protocol.messages import TrialResult
from mage_async.tasks.league import League
from mage_async.trajectory import Group, Task

CONFIG_CHANGED = "the configuration was changed"
"""Reason for dropping the groups in flight of a run resumed under an incompatible configuration."""
CLASS_EDITED = "a class of the user was edited"
"""Reason for dropping the groups in flight of a run resumed with another source of its environment,
agent or method."""
NO_EFFECT_ON_TRIALS = {
    "environment": (
        "step_deadline_s",
        "retries",
        "workers",
        "most_open",
        "idle_s",
        "wait_for_room_s",
    ),
    "admission": ("max_groups_in_play", "over_age_target", "grant_deadline_s"),
}
"""Keys by section that change how long, how often and where trials are played, but not what they
contain. People are advised to change some of these keys after faults, and `--resume` then keeps the
groups in flight.
"""


@dataclass(frozen=True, slots=True)
class Committed:
    """Hold one step that the journal recorded, with the groups that it trained."""

    commit: Commit
    groups: list[Group] | None
    """Groups of the step, in order of grant; None if one of their trials was in a deleted
    segment.
    """
    config: str
    """The configuration of the step, as TOML."""
    drops: list[DroppedGroup] = field(default_factory=list)
    """Groups dropped between the previous step and this one."""


def replay(
    records: Iterable[Record],
    ledger: Ledger,
    league: League,
    methods: Methods | None = None,
) -> Iterator[Committed]:
    """Replay records into a new ledger, league and methods, and yield each step.

    At the end, the three are in the state that they had when the last record was written. The
    states of methods are computed again from the trials, and must have the digests that the
    records hold.

    Args:
        records: Records in order; the first one is a `SegmentHeader`.
        methods: Methods of the run. None: no states are computed, and no method is imported.

    Raises:
        RunError: the records contradict each other.
        RunFailed: a method's state or guidance differs.
    """
    config, states = "", None if methods is None else ReplayedMethods(methods)
    for number, record in enumerate(records):
        match record:
            case SegmentHeader():
                if number == 0:
                    ledger.begin(record)
                else:  # groups that its header does not name were dropped at a restart
                    ledger.follow(record)
                config = record.config
                league.restore(record.population)
                if states is not None:
                    states.begin(record)
            case Granted():
                if states is not None:
                    states.check_grant(record)
                ledger.replay_grant(record)
            case TrialResult():
                ledger.receive(record)
            case Dropped():
                ledger.replay_drop(record.grant, record.reason, record.num_turns)
            case Commit():
                if record.version != ledger.version + 1:
                    raise RunError(
                        f"the journal has step {record.version} after {ledger.version}: records "
                        "between them are missing"
                    )
                groups = ledger.replay_commit(record)
                if groups is not None:
                    league.trained(groups)
                if states is not None:
                    states.trained(record, groups)
                yield Committed(record, groups, config, ledger.take_drops())
            case Published():
                league.published(record.version)
            case LoadedWeights():
                pass  # it changes none of the three


class RecordsWithConfig:
    """Iterate over records; `config` is the configuration in force at the last one, as TOML, and
    `sources` the digests of the user's own classes."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = records
        self.config, self.sources = "", dict[str, str]()

    def __iter__(self) -> Iterator[Record]:
        for record in self._records:
            if isinstance(record, SegmentHeader):
                self.config, self.sources = record.config, record.sources
            yield record


@dataclass(slots=True)
class ReplayedMethods:
    """Compute the states of methods from the journal again, and compare them with its records."""

    methods: Methods
    _is_known: bool = False
    """Whether the states are those at the last record. It is false after a step whose trials were
    in a deleted segment, until the next segment header, which holds the whole states.
    """

    def begin(self, header: SegmentHeader) -> None:
        """Take over the states of a segment header, and the configuration from there on."""
        if header.config:
            self.methods.adopt(config_file.loads(header.config))
        self.methods.begin(header.methods, header.version)
        self._is_known = True

    def check_grant(self, granted: Granted) -> None:
        """Check that the methods give a new group the guidance that its record holds (the texts
        that methods add to a group's prompts).

        Raises:
            RunFailed: the guidance and the record differ.
        """
        grant = granted.grant
        # A group that is granted again (epoch above 0) keeps the guidance of its first grant, while
        # the states have changed since.
        if not self._is_known or grant.epoch:
            return
        task = Task(grant.environment, grant.member, grant.seed, grant.seat)
        if self.methods.guidance(grant.grant, task) != grant.guidance:
            raise RunFailed(
                f"group {grant.grant}: the methods' states computed again give another guidance"
            )

    def trained(self, commit: Commit, groups: Sequence[Group] | None) -> None:
        """Let the methods learn from the groups of a step, if all of them are there.

        Raises:
            RunFailed: a state differs from the one that was committed.
        """
        self._is_known = self._is_known and groups is not None
        if not self._is_known or groups is None:
            return
        self.methods.learn(groups)
        digests = self.methods.digests()
        for name in sorted(digests.keys() | commit.methods.keys()):
            if digests.get(name) != commit.methods.get(name):
                raise RunFailed(
                    f"step {commit.version}: the state of the method {name} computed again differs "
                    "from the committed one; another machine or version of Python computes "
                    "otherwise"
                )


def plays_the_same(one: Config, other: Config) -> bool:
    """Return whether groups granted under one configuration may be trained under the other."""
    return _what_is_played(one) == _what_is_played(other)


def _what_is_played(config: Config) -> dict[str, Any]:
    """Return the values that groups in flight depend on, without those of `NO_EFFECT_ON_TRIALS`."""
    parts = ("seed", "environment", "trial", "transcript", "sampling", "admission")
    values = {part: msgspec.to_builtins(getattr(config, part)) for part in parts}
    for part, keys in NO_EFFECT_ON_TRIALS.items():
        for key in keys:
            del values[part][key]
    return values


def first_difference(expected: Commit, tensors: dict[str, str]) -> str:
    """Return the first tensor, in the commit's order, whose digest differs from the commit's.

    Args:
        tensors: Digests by name, of which at least one differs from the commit's.
    """
    names = [*expected.tensors, *(name for name in tensors if name not in expected.tensors)]
    return next(name for name in names if expected.tensors.get(name) != tensors.get(name))
