"""Compute the return, the advantage and the staleness of every turn of a journal.

`steps_of` reads the records of a journal once, in order, and yields the groups that each step
trained; only trials in flight are in memory. `attributed` computes the values of their turns by the
learner's own functions (`mage_async/learning/packing.py`) on the same batch; computed on a CPU, the
values are the same on every CPU, bit by bit.

Shapes: `n` sampled tokens of a turn.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np

from mage_async.admission.ledger import Ledger
from mage_async.admission.replay import RecordsWithConfig, replay
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.learning.packing import credited, trained_advantages, trained_kinds
from mage_async.protocol.journal_records import Dropped, Granted, Record, SegmentHeader
from mage_async.protocol.trial_arrays import TrialResult
from mage_async.tasks.league import League
from mage_async.trajectory import (
    Decode,
    Group,
    Segment,
    Trial,
    Turn,
    TurnText,
    turn_texts,
)


@dataclass(frozen=True, slots=True)
class JournalStep:
    """Hold the groups that one step trained, or groups that no step trained."""

    step: int | None
    """The policy version that the step made, from 1; None for groups that were dropped or are in
    flight."""
    groups: Sequence[Group]
    """The groups, in the order in which the step took them."""
    config: Config
    """The configuration in force at the step."""
    is_whole: bool
    """Whether the whole batch is there, so that advantages can be computed; False if a part of it
    lies in deleted files of the journal."""


def steps_of(records: Iterable[Record]) -> Iterator[JournalStep]:
    """Yield the steps of a journal, each after the groups that were dropped before it.

    The groups in flight come last.

    Args:
        records: Records of a journal, from the header of any of its files on.

    Raises:
        RunError: the records contradict each other.
    """
    pending = _PendingTrials(records)
    # A ledger of any sizes will do: a replay repeats the decisions that were recorded.
    for committed in replay(pending, Ledger(1, 0, 1), League()):
        if dropped := pending.pop_dropped():
            yield JournalStep(None, dropped, _config(pending.config), is_whole=False)
        # Pop the trials even if they are not used: after the step they are no longer in flight.
        groups, is_whole = pending.pop(committed.commit.grants), committed.groups is not None
        yield JournalStep(
            committed.commit.version,
            committed.groups if committed.groups is not None else groups,
            _config(committed.config),
            is_whole,
        )
    if rest := pending.pop(pending.grants()):
        yield JournalStep(None, rest, _config(pending.config), is_whole=False)


# Cached, because the header of every file of the journal repeats the configuration.
_config = lru_cache(maxsize=2)(config_file.loads)


class _PendingTrials(RecordsWithConfig):
    """Iterate over records, and keep the trials among them that no step has trained so far."""

    def __init__(self, records: Iterable[Record]) -> None:
        super().__init__(records)
        self._trials: dict[int, list[TrialResult]] = {}
        """Trials of each group that have arrived, by the group's number."""
        self._versions: dict[int, int] = {}
        """Policy version at each group's first grant, by the group's number."""
        self._dropped: list[int] = []
        """Numbers of the groups dropped since the last `pop_dropped`."""

    def __iter__(self) -> Iterator[Record]:
        """Yield all records, and remember their trials and drops."""
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
        """Return the groups dropped since the last call, with their trials that arrived."""
        dropped, self._dropped = tuple(self._dropped), []
        return self.pop(dropped)

    def pop(self, grants: Sequence[int]) -> list[Group]:
        """Return groups with their trials that arrived, and forget them. Groups without such a
        trial are left out.
        """
        groups = []
        for grant in grants:
            version = self._versions.pop(grant, 0)
            results = self._trials.pop(grant, ())
            trials = {trial.index: trial for result in results for trial in result.trials()}
            if trials:
                ordered = tuple(trials[index] for index in sorted(trials))
                groups.append(Group(grant, version, ordered))
        return groups


@dataclass(frozen=True, slots=True, eq=False)
class AttributedTurn:
    """Hold one completion, the observation before it, and its values in training."""

    turn: Turn
    text: TurnText
    tokens: np.ndarray
    """int32 [n]"""
    logprobs: np.ndarray
    """float32 [n]: behaviour log-probs in nats, after temperature."""
    versions: np.ndarray
    """int32 [n]: the policy version that sampled each token."""
    staleness: np.ndarray | None
    """int32 [n]: the version that the step began with minus the version that sampled the token, in
    steps; None if no step trained the trial."""
    return_to_go: float
    """The return from this turn on, with bonuses, without penalties."""
    advantage: float | None
    """The factor of the log-probs' gradients in the step, with penalties and the turn's weight in
    `learner.average`; 0 for a kind of turn that the step did not train on; None if no step trained
    the trial, or if its batch is not complete any more."""


@dataclass(frozen=True, slots=True, eq=False)
class AttributedTrial:
    """Hold a trial, and for each turn its return, its advantage and its staleness."""

    grant: int
    step: int | None
    """The policy version that the step made; None if no step trained the trial."""
    granted_at: int
    """The policy version when the trial's group was granted."""
    trial: Trial
    turns: tuple[AttributedTurn, ...]
    ending: str
    """The text after the last completion."""

    def episodes(self) -> list[tuple[AttributedTurn, ...]]:
        """Return the turns of each episode, in order."""
        by_episode = groupby(self.turns, key=lambda turn: turn.turn.episode)
        return [tuple(turns) for _, turns in by_episode]


def attributed(step: JournalStep, decode: Decode) -> Iterator[AttributedTrial]:
    """Yield the trials of a step, group by group; text is decoded lazily.

    Raises:
        ConfigError: a method's rewards need the environment, which cannot be created here.
    """
    table = credited(step.groups, step.config)  # one row per turn, in the order of the loops below
    advantages: list[float | None] = [None] * len(table)
    if step.is_whole and step.step is not None:
        trials = [trial for group in step.groups for trial in group.trials]
        # A step trains the version before the one that it makes.
        kinds = trained_kinds(step.config, step.step - 1)
        factors = trained_advantages(trials, table, step.config, "cpu", kinds)
        advantages = factors.tolist()
    return_and_advantage = iter(zip(table.returns.tolist(), advantages, strict=True))
    for group in step.groups:
        for trial in group.trials:
            texts, ending = turn_texts(trial, decode)
            turns = []
            for turn, text in zip(trial.turns, texts, strict=True):
                segment, completion = trial.segments[turn.segment], slice(turn.start, turn.stop)
                versions = token_versions(segment)[completion]
                return_to_go, advantage = next(return_and_advantage)
                turns.append(
                    AttributedTurn(
                        turn,
                        text,
                        segment.tokens[completion],
                        segment.logprobs[completion],
                        versions,
                        None if step.step is None else step.step - 1 - versions,
                        return_to_go,
                        advantage,
                    )
                )
            yield AttributedTrial(
                group.grant, step.step, group.version, trial, tuple(turns), ending
            )


def token_versions(segment: Segment) -> np.ndarray:
    """Return the policy version of each token, int32 [T]; -1 before the first sampled token."""
    versions = np.full(len(segment.tokens), -1, np.int32)
    for run in segment.versions:
        versions[run.start :] = run.policy
    return versions
