"""What was played, as frozen records: Task, Guidance, Turn, ExpertStep, Segment, Trial, Group.

A trial is the ordered episodes of one agent on one task. Its text is a list of append-only
*segments*: one for the whole trial where the history stays in the context, one per episode where
only reflections are carried over.

Shapes: `T` tokens of a segment.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from mage_async.policy_version import VersionRun


class Kind(IntEnum):
    """What a turn was for."""

    ACT = 0
    REFLECT = 1
    """A remark between two episodes."""
    STRATEGY = 2
    """A remark before an action, on what to do."""


@dataclass(frozen=True, slots=True)
class Task:
    """One environment and what a trial has to find out: hidden member, seat and luck."""

    environment: str
    member: str
    """The opponent in the other seats, or what is hidden: a name the environment declares."""
    seed: int
    """Decides every chance move of every episode; equal for all trials of a group."""
    seat: int = 0

    def across(self) -> "Task":
        """The same task from the other of two seats."""
        return replace(self, seat=1 - self.seat)


@dataclass(frozen=True, slots=True)
class Guidance:
    """What trials of a group are told of earlier tasks, by the graph memory."""

    version: int
    """Of the memory."""
    num_guided: int
    """The first so many trials of the group are told; what they earn is compared with the others.
    """
    decisions: tuple[tuple[str, str], ...]
    """State and action of each strategy, in the order in which they were drawn."""
    text: str
    logprob: float
    """Of drawing these strategies in this order, in nats."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion by the agent, and what the environment made of it."""

    kind: Kind
    episode: int
    index: int
    """Position among the turns of the same kind of its episode, from 0; a strategy has that of the
    action it precedes.
    """
    segment: int
    start: int
    """The completion is `segment.tokens[start:stop]`."""
    stop: int
    reward: float
    is_valid: bool
    action: str
    """What was parsed from the completion; a reflection's text for a reflection; empty where
    nothing was found.
    """
    anchor: str = ""
    """The state it was taken in, without memory: turns with equal anchors can share a baseline
    (GiGPO).
    """
    num_reused: int = 0
    """How many of the `start` prompt tokens the engine took from its prefix cache."""
    info: str = ""
    """What the environment said of the step beside the observation: a JSON object, or empty."""

    def is_act_of(self, episode: int) -> bool:
        """Whether it is an action of an episode."""
        return self.kind is Kind.ACT and self.episode == episode


def exploits_from(turns: Iterable[Turn], num_episodes: int) -> int:
    """Where the exploiter takes over in a segment in which the last episode is played: behind the
    last turn of an earlier one, so that how the last episode begins is the exploiter's to read.

    Args:
        turns: of that segment; of one without the last episode, where its last turn ends.
        num_episodes: of the whole trial.
    """
    return max((turn.stop for turn in turns if turn.episode + 1 < num_episodes), default=0)


@dataclass(frozen=True, slots=True)
class ExpertStep:
    """What an expert would have done at one of a trial's actions."""

    turn: int
    """The number of the action among the trial's `turns`."""
    action: str
    place: int = -1
    """Where in the turn's segment the completion would have become another one: the place of a
    sampled token; -1 where the actions are equal, or the completion has none.
    """
    token: int = -1
    """What would stand there; -1 with such a place."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """An append-only stretch of chat: every prompt of it is a prefix of the next.

    `logprobs` are natural, after temperature, under the behaviour policy; 0 where a token was not
    sampled.
    """

    tokens: np.ndarray
    """int32 [T]"""
    is_sampled: np.ndarray
    """bool [T]: drawn by the policy, and so trained on"""
    logprobs: np.ndarray
    """float32 [T]"""
    versions: tuple[VersionRun, ...]
    """Which weights drew the sampled tokens, by runs in order of position."""


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """The ordered episodes of one agent on one task, with its reflections between."""

    task: Task
    index: int
    """Which trial of its group, from 0."""
    num_episodes: int
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    num_prompt_tokens: int = 0
    """Prompt tokens over all turns, each turn's whole context counted."""
    num_reused_tokens: int = 0
    """How many of those the engine took from its prefix cache."""
    num_repeated_tokens: int = 0
    """Context tokens computed although they had been computed before (evicted or refreshed)."""
    num_extension_faults: int = 0
    """Turns whose prompt did not extend the context before it, token by token; should be 0."""
    num_injections: int = 0
    """Observations that held the text of a special token; the agent was told it as plain text."""
    duration_s: float = 0.0
    memory: int | None = None
    """Version of the graph memory that the trial was told strategies of; None: it was told of none.
    """
    cut_at: int | None = None
    """The first episode that was not finished, where an evaluated trial outgrew the engine's
    context or had a call that failed. A trial in training never is: its group is dropped.
    """
    expert_steps: tuple[ExpertStep, ...] = ()
    """What an expert would have done, in order of turns, where one was asked and knew."""

    def episode_rewards(self) -> list[float]:
        """Undiscounted reward of every episode; one that was not played, because an earlier one was
        won, has the reward of the last that was.
        """
        rewards = [0.0] * self.num_played()
        for turn in self.turns:
            rewards[turn.episode] += turn.reward if turn.kind is Kind.ACT else 0.0
        return rewards + rewards[-1:] * (self.num_episodes - len(rewards))

    def is_before_last(self, episode: int) -> bool:
        """Whether an episode comes before the last of those that may be played."""
        return episode + 1 < self.num_episodes

    def num_played(self) -> int:
        """Episodes begun; less than `num_episodes` where a win ended the trial."""
        return self.turns[-1].episode + 1 if self.turns else 0

    def num_invalid(self) -> int:
        """Actions the environment refused or that could not be parsed."""
        return sum(not turn.is_valid for turn in self.turns if turn.kind is Kind.ACT)

    def num_tokens(self) -> int:
        """Tokens of all segments, sampled or not."""
        return sum(len(segment.tokens) for segment in self.segments)

    def num_sampled(self) -> int:
        """Tokens the policy drew."""
        return sum(int(segment.is_sampled.sum()) for segment in self.segments)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Trials on the same task, compared with each other."""

    grant: int
    """The number of its grant; groups are trained in this order."""
    version: int
    """The policy version it was granted at."""
    trials: tuple[Trial, ...]
    guidance: Guidance | None = None
    """What some of the trials were told of earlier tasks."""
