"""Every turn of a trial with its return, its advantage and the staleness of its tokens.

The values are those of the learner: the same functions (`learning/training_sequences.py`) on the
same batch, so one CPU repeats the bits of another. `n` is the number of sampled tokens of a turn.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from mage_async.attribution.journal_steps import JournalStep
from mage_async.learning.packing import batch_advantages, credited
from mage_async.policy_version import oldest
from mage_async.trajectory import Segment, Trial, Turn
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.trial_as_dict import Decode, TurnText, trial_as_dict, turn_texts


@dataclass(frozen=True, slots=True, eq=False)
class AttributedTurn:
    """One completion, the observation before it, and what training made of it."""

    turn: Turn
    """Its position, action, reward, anchor, and the environment's `info`."""
    text: TurnText
    """Its observation and its completion."""
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
    """The factor of the log-probs' gradients in the step, with penalties; None if no step trained
    the trial, or if its batch is not complete any more."""


@dataclass(frozen=True, slots=True, eq=False)
class AttributedTrial:
    """A trial with the values of its turns."""

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
        ConfigError: the returns need the environment (`credit.information_bonus`), which cannot be
            created here.
    """
    table = credited(step.groups, step.config)
    advantages: list[float | None] = [None] * len(table)
    if step.is_whole:
        advantages = batch_advantages(table, step.config, "cpu").tolist()
    numbers = iter(zip(table.returns.tolist(), advantages, strict=True))
    for group in step.groups:
        for trial in group.trials:
            texts, ending = turn_texts(trial, decode)
            turns = []
            for turn, text in zip(trial.turns, texts, strict=True):
                segment, completion = trial.segments[turn.segment], slice(turn.start, turn.stop)
                versions = token_versions(segment)[completion]
                turns.append(
                    AttributedTurn(
                        turn,
                        text,
                        segment.tokens[completion],
                        segment.logprobs[completion],
                        versions,
                        None if step.step is None else step.step - 1 - versions,
                        *next(numbers),
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


def trial_row(attributed_trial: AttributedTrial, chat: ChatFormat) -> dict[str, Any]:
    """Return a trial as plain data: its group and step, its text, the values of each turn."""
    trial = attributed_trial.trial
    version = oldest(run for segment in trial.segments for run in segment.versions)
    row = trial_as_dict(trial, chat, version)
    turns = [
        turn | _turn_values(values)
        for turn, values in zip(row["turns"], attributed_trial.turns, strict=True)
    ]
    ids = {"grant": attributed_trial.grant, "trial": trial.index, "step": attributed_trial.step}
    return ids | row | {"turns": turns}


def token_columns(attributed_trial: AttributedTrial) -> dict[str, list[np.ndarray]]:
    """Return the values of every token of a trial, by name; one array per segment.

    Versions, staleness and advantages are 0 where the policy did not sample the token, and the
    latter two also where no step trained it.
    """
    segments = attributed_trial.trial.segments
    columns: dict[str, list[np.ndarray]] = {
        "tokens": [segment.tokens for segment in segments],
        "logprobs": [segment.logprobs for segment in segments],
        "is_sampled": [segment.is_sampled for segment in segments],
        "versions": [np.where(part.is_sampled, token_versions(part), 0) for part in segments],
        "staleness": [np.zeros(len(part.tokens), np.int32) for part in segments],
        "advantages": [np.zeros(len(part.tokens), np.float32) for part in segments],
    }
    for values in attributed_trial.turns:
        turn = values.turn
        completion = slice(turn.start, turn.stop)
        if values.staleness is not None:
            columns["staleness"][turn.segment][completion] = values.staleness
        columns["advantages"][turn.segment][completion] = values.advantage or 0.0
    return columns


def _turn_values(values: AttributedTurn) -> dict[str, Any]:
    has_tokens = values.staleness is not None and len(values.staleness) > 0
    return {
        "return": values.return_to_go,
        "advantage": values.advantage,
        "staleness": int(values.staleness.max()) if has_tokens else None,
        "context": values.turn.segment,
        "start": values.turn.start,
        "stop": values.turn.stop,
    }
