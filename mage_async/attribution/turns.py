"""What a step made of every turn of a trial: its return, its advantage and how old its tokens were.

The numbers are those of the learner: the same functions on the same batch (`learning/
training_sequences.py`), so a CPU repeats a CPU's bits.

Shapes: `n` sampled tokens of a turn.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from mage_async.attribution.journal_steps import JournalStep
from mage_async.learning.training_sequences import batch_advantages, credited
from mage_async.trajectory import Group, Segment, Trial, Turn

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, special tokens kept: `ChatFormat.decode`."""


@dataclass(frozen=True, slots=True, eq=False)
class AttributedTurn:
    """One completion, what led to it and what came of it."""

    turn: Turn
    """Its place, action, reward, anchor, and the environment's `info`."""
    told: str
    """The observation: what the context grew by since the completion before, with the chat
    template's tokens; for the first turn of a context that is the whole prompt.
    """
    said: str
    """The completion."""
    tokens: np.ndarray
    """int32 [n]"""
    logprobs: np.ndarray
    """float32 [n]: natural, after temperature, under the policy that drew the token"""
    versions: np.ndarray
    """int32 [n]: the policy version that drew each token"""
    staleness: np.ndarray | None
    """int32 [n]: the version that the step began with minus the one that drew the token, in steps;
    None where no step consumed the trial.
    """
    return_to_go: float
    """What the credit rule pays from this turn on, bonuses among it, penalties not."""
    advantage: float | None
    """What the step multiplied the log-probs' gradients with, penalties among it; None where no
    step consumed the trial, or its batch is not complete any more.
    """


@dataclass(frozen=True, slots=True, eq=False)
class AttributedTrial:
    """A trial with what a step made of it."""

    grant: int
    step: int | None
    """The policy version that the step made; None where no step consumed the trial."""
    granted_at: int
    """The policy version when the trial's group was granted."""
    trial: Trial
    turns: tuple[AttributedTurn, ...]
    ending: str
    """What the agent was told after its last completion."""

    def episodes(self) -> list[tuple[AttributedTurn, ...]]:
        """The turns by episode, in order."""
        by_episode = groupby(self.turns, key=lambda each: each.turn.episode)
        return [tuple(turns) for _, turns in by_episode]


def attributed(step: JournalStep, decode: Decode) -> Iterator[AttributedTrial]:
    """The trials of a step, group by group; text is decoded as they are asked for.

    Raises:
        ConfigError: the credit needs the environment (`credit.information_bonus`), and it cannot be
            made here.
    """
    table = credited(step.groups, step.config)
    advantages: list[float | None] = [None] * len(table)
    if step.is_whole:
        advantages = batch_advantages(table, step.config, "cpu").tolist()
    numbers = iter(zip(table.returns.tolist(), advantages, strict=True))
    for group in step.groups:
        for trial in group.trials:
            yield _trial(step.step, group, trial, numbers, decode)


def _trial(
    step: int | None,
    group: Group,
    trial: Trial,
    numbers: Iterator[tuple[float, float | None]],
    decode: Decode,
) -> AttributedTrial:
    told = [0] * len(trial.segments)
    """How far each context has been told."""
    turns = []
    for turn in trial.turns:
        segment = trial.segments[turn.segment]
        before = segment.tokens[told[turn.segment] : turn.start]
        told[turn.segment] = turn.stop
        turns.append(_turn(turn, segment, decode(before.tolist()), step, next(numbers), decode))
    ending = trial.segments[-1].tokens[told[-1] :]
    return AttributedTrial(
        group.grant, step, group.version, trial, tuple(turns), decode(ending.tolist())
    )


def _turn(
    turn: Turn,
    segment: Segment,
    told: str,
    step: int | None,
    numbers: tuple[float, float | None],
    decode: Decode,
) -> AttributedTurn:
    tokens = segment.tokens[turn.start : turn.stop]
    versions = drawn_by(segment)[turn.start : turn.stop]
    return AttributedTurn(
        turn,
        told,
        decode(tokens.tolist()),
        tokens,
        segment.logprobs[turn.start : turn.stop],
        versions,
        None if step is None else step - 1 - versions,
        *numbers,
    )


def drawn_by(segment: Segment) -> np.ndarray:
    """The policy version that drew each token: int32 [T]; -1 before the first that was drawn."""
    versions = np.full(len(segment.tokens), -1, np.int32)
    for run in segment.versions:
        versions[run.start :] = run.policy
    return versions
