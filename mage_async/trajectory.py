"""Define the frozen records of play: Task, Guidance, Turn, Alternative, Segment, Trial, Group.

A trial is the ordered episodes of one agent on one task. Its text is a list of append-only
*segments*: one for the whole trial if the history stays in the context, one for each episode if
only reflections are carried over, and one more each time that the agent's notes, or its newest
turns, replace a context that is full.

Shapes: `T` tokens of a segment.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from mage_async.policy_version import VersionRun
from mage_async.restriction import AllowedSets

MIX = "mix"
"""Name of the environment that plays several others."""
MAX_NAME_CHARS = 200
"""Largest number of characters of the name of an environment, a task variant or a process."""


class Kind(IntEnum):
    """Enumerate the purposes of a turn: an action, or one of three kinds of remarks."""

    ACT = 0
    REFLECT = 1
    """A remark between two episodes."""
    STRATEGY = 2
    """A remark before an action, on what to do."""
    NOTES = 3
    """A remark that replaces the context before it, which has no room left."""


@dataclass(frozen=True, slots=True)
class Task:
    """Name what a trial plays: an environment, and the facts hidden from the agent, which are task
    variant, seat and seed.
    """

    environment: str
    member: str
    """The hidden opponent or hidden state, by a name that the environment declares."""
    seed: int
    """Seed of every chance move of every episode; equal for all trials of a group."""
    seat: int = 0
    """Number of the player that the agent is, if a game has several; from 0."""

    @property
    def component(self) -> tuple[str, str]:
        """Return the environment, and the label of the component that the task plays in a mix; ""
        if it plays no mix.
        """
        # `Mix` names its task variants `label/variant`.
        is_mix = self.environment == MIX
        return self.environment, self.member.partition("/")[0] if is_mix else ""

    def from_other_seat(self) -> "Task":
        """Return the same task from the other of two seats."""
        return replace(self, seat=1 - self.seat)


@dataclass(frozen=True, slots=True)
class Guidance:
    """Hold a method's text, such as advice from earlier tasks, with which some of a group's trials
    begin.
    """

    version: int
    """Version of the state of the method that gave the text."""
    num_guided: int
    """Number of trials, the first of the group, that begin with the text."""
    decisions: tuple[tuple[str, str], ...]
    """State and action of each piece of advice in the text, in the order of sampling."""
    text: str
    logprob: float
    """Log-prob of sampling these decisions, in nats."""

    def for_trial(self, index: int) -> "Guidance | None":
        """Return this guidance if the trial of this index in its group begins with it."""
        return self if index < self.num_guided else None


@dataclass(frozen=True, slots=True)
class Turn:
    """Record one completion by the agent, the action or remark in it, and the environment's
    response.
    """

    kind: Kind
    episode: int
    index: int
    """Position among the turns of the same kind of its episode, from 0. A strategy has the position
    of the action that follows it. Notes before an episode's first action belong to the previous
    episode.
    """
    segment: int
    start: int
    """The completion is `segment.tokens[start:stop]`."""
    stop: int
    reward: float
    """Reward of the action, without penalties; 0 for a remark."""
    is_valid: bool
    """Whether the environment accepted the action; of a remark, whether one was found."""
    action: str
    """The action or the remark that was parsed from the completion; empty where there is none."""
    anchor: str = ""
    """The state in which the turn was taken, without the agent's memory: turns with equal anchors
    can share a baseline (GiGPO).
    """
    num_reused: int = 0
    """Number of tokens of the prompt (the segment's first `start` tokens) that the engine took from
    its prefix cache.
    """
    info: str = ""
    """The environment's `info` of the step: a JSON object, or empty. The agent does not see it."""

    def is_act_of(self, episode: int) -> bool:
        """Return whether the turn is an action of an episode."""
        return self.kind is Kind.ACT and self.episode == episode

    def is_cut_at(self, most_tokens: int) -> bool:
        """Return whether the turn is an action that used up its tokens and is invalid."""
        is_long = self.stop - self.start >= most_tokens
        return self.kind is Kind.ACT and is_long and not self.is_valid


SecondRole = Callable[["Kind", bool], bool]
"""Returns whether the second of a policy's two roles, such as planner and executor, takes a turn,
by the turn's kind and whether the turn is in the trial's last episode."""


def role_changes(
    turns: Iterable[Turn],
    num_episodes: int,
    is_second: SecondRole,
    following: tuple["Kind", int] | None = None,
) -> tuple[int, ...]:
    """Return the indices in a segment at which the role changes; the tokens before the first of
    them are the first role's.

    The tokens of each role go through the model with its own adapter. A turn's tokens, prompt and
    completion, begin after the previous turn's completion; all of them belong to the role that
    takes the turn.

    Args:
        turns: turns of the segment, in order.
        num_episodes: number of episodes of the trial.
        following: kind and episode of the turn that follows these turns; None: no turn follows.
    """
    changes: list[int] = []
    stop, was_second = 0, False  # of the turn before
    all_turns = [(turn.kind, turn.episode, turn.stop) for turn in turns]
    if following is not None:
        # A role begins where the turn before ended, so the end of the last turn is not needed: 0.
        all_turns.append((*following, 0))
    for kind, episode, end in all_turns:
        is_second_now = is_second(kind, episode + 1 >= num_episodes)
        if is_second_now != was_second:
            changes.append(stop)
        stop, was_second = end, is_second_now
    return tuple(changes)


@dataclass(frozen=True, slots=True)
class Alternative:
    """Record the action that a method's adviser would take instead of the agent's."""

    turn: int
    """Index of the action among the trial's `turns`."""
    action: str
    place: int = -1
    """Index, in the turn's segment, of the first sampled token that differs from the adviser's
    action; -1 where no token differs.
    """
    token: int = -1
    """The adviser's token at `place`; -1 if `place` is -1."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Hold a part of a chat that is only appended to: each of its prompts is a prefix of the next.

    `logprobs` are natural logarithms of probabilities under the behaviour policy, after
    temperature; 0 where a token was not sampled.
    """

    tokens: np.ndarray
    """int32 [T]"""
    is_sampled: np.ndarray
    """bool [T]: sampled by the policy, and therefore trained on; False for tokens of a prompt and
    for tokens of a restricted turn that had no alternative.
    """
    logprobs: np.ndarray
    """float32 [T]"""
    versions: tuple[VersionRun, ...]
    """Versions that sampled the tokens, as runs in order of position."""
    allowed: AllowedSets | None = None
    """The sets that the sampled tokens were drawn from; None: all from the whole vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """Record the episodes of one agent on one task, in order, with the remarks between them."""

    task: Task
    index: int
    """Index of the trial in its group, from 0."""
    num_episodes: int
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    num_prompt_tokens: int = 0
    """Prompt tokens summed over all turns, each with its whole context."""
    num_reused_tokens: int = 0
    """Number of these prompt tokens that the engine took from its prefix cache."""
    num_repeated_tokens: int = 0
    """Context tokens computed once more, because their keys and values had been evicted, or had to
    be replaced by those of newer weights (`refresh_kv` of a prompt).
    """
    num_extension_faults: int = 0
    """Turns whose prompt did not extend the previous context token by token; should be 0."""
    num_injections: int = 0
    """Observations with the text of a special token, which was encoded as plain text."""
    num_cut_episodes: int = 0
    """Episodes that were ended early, with their return so far, because they had used their share
    of the engine's context.
    """
    num_retries: int = 0
    """Number of earlier tries of the trial, each of which ended with a fault of its environment."""
    num_kept_episodes: int = 0
    """Number of episodes that an earlier try, or an actor that has ended, had already finished."""
    duration_s: float = 0.0
    memory: int | None = None
    """Field `version` of the `Guidance` with which the prompts began; None: the trial had no
    guidance. (On the wire this field is called `memory` too.)
    """
    cut_at: int | None = None
    """The first episode that was not finished, where an evaluated trial outgrew the engine's
    context, or its environment or engine failed in every try. None for a trial of training, whose
    group is dropped instead.
    """
    alternatives: tuple[Alternative, ...] = ()
    """Answers of the adviser, in order of turns; no entry for turns at which it knew no action."""

    def episode_rewards(self) -> list[float]:
        """Return the undiscounted reward of every episode.

        Episodes that were not played because an earlier one was won have the reward of the last one
        that was played.
        """
        rewards = [0.0] * self.num_played()
        for turn in self.turns:
            rewards[turn.episode] += turn.reward if turn.kind is Kind.ACT else 0.0
        return rewards + rewards[-1:] * (self.num_episodes - len(rewards))

    def turn_rewards(self) -> list[list[float]]:
        """Return the rewards of the actions of every episode. Episodes that were not played have
        those of the last one that was played.
        """
        rewards: list[list[float]] = [[] for _ in range(self.num_played())]
        for turn in self.turns:
            if turn.kind is Kind.ACT:
                rewards[turn.episode].append(turn.reward)
        return rewards + rewards[-1:] * (self.num_episodes - len(rewards))

    def is_before_last(self, episode: int) -> bool:
        """Return whether an episode comes before the last planned one."""
        return episode + 1 < self.num_episodes

    def num_played(self) -> int:
        """Return the number of begun episodes, fewer than `num_episodes` after a win."""
        return self.turns[-1].episode + 1 if self.turns else 0

    def num_actions(self) -> int:
        """Count the actions, valid or not, those of an unfinished episode included."""
        return sum(turn.kind is Kind.ACT for turn in self.turns)

    def num_invalid(self) -> int:
        """Count the actions that the environment refused or that could not be parsed."""
        return sum(not turn.is_valid for turn in self.turns if turn.kind is Kind.ACT)

    def num_tokens(self) -> int:
        """Count the tokens of all segments, sampled or not."""
        return sum(len(segment.tokens) for segment in self.segments)

    def num_sampled(self) -> int:
        """Count the tokens that the policy sampled."""
        return sum(int(segment.is_sampled.sum()) for segment in self.segments)

    def sampled_by_turn(self) -> np.ndarray:
        """Count the sampled tokens of each turn: int64 [turns]."""
        places = np.array([(turn.segment, turn.start, turn.stop) for turn in self.turns], np.int64)
        segments, starts, stops = places.reshape(-1, 3).T
        counts = np.zeros(len(self.turns), np.int64)
        for number, segment in enumerate(self.segments):
            before = np.concatenate(([0], np.cumsum(segment.is_sampled)))
            own = segments == number
            counts[own] = before[stops[own]] - before[starts[own]]
        return counts


@dataclass(frozen=True, slots=True, eq=False)
class FinishedEpisodes:
    """Hold the finished episodes of a trial in progress, from which the next one can begin."""

    trial: Trial
    """The trial so far."""
    last_message: str
    """The environment's last words, which precede the next episode's first observation."""

    @property
    def num_episodes(self) -> int:
        """Number of finished episodes."""
        return self.trial.num_played()


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Hold trials on the same task, whose returns are compared with each other."""

    grant: int
    """Number of the group, in the order in which the learner first grants groups to actors. The
    groups of a step are trained in this order.
    """
    version: int
    """Policy version when the group was granted."""
    trials: tuple[Trial, ...]
    guidance: Guidance | None = None
    """Guidance with which some of the trials begin."""


Decode = Callable[[Sequence[int]], str]
"""Token ids -> text that keeps special tokens: `ChatFormat.decode`."""


class TurnText(NamedTuple):
    """Hold the text of one turn: what came before the completion, and the completion."""

    observation: str
    """Text between the completion before and this one, with the tokens of the chat template; for
    the first turn of a context the whole prompt.
    """
    completion: str


def turn_texts(trial: Trial, decode: Decode) -> tuple[list[TurnText], str]:
    """Split the contexts of a trial into turns.

    Returns:
        The text of each turn, and the text after the last completion.
    """
    ends = [0] * len(trial.segments)
    texts = []
    for turn in trial.turns:
        tokens = trial.segments[turn.segment].tokens
        observation = tokens[ends[turn.segment] : turn.start]
        completion = tokens[turn.start : turn.stop]
        texts.append(TurnText(decode(observation.tolist()), decode(completion.tolist())))
        ends[turn.segment] = turn.stop
    ending = decode(trial.segments[-1].tokens[ends[-1] :].tolist()) if trial.segments else ""
    return texts, ending


def trial_as_dict(trial: Trial, decode: Decode, version: int) -> dict[str, Any]:
    """Return a trial as plain data: the task, rewards, turns, and the text of every context.

    Args:
        version: policy version to state for the trial.
    """
    # Actions that a method's adviser would have taken, by the index of the turn.
    alternatives = {each.turn: each.action for each in trial.alternatives}
    texts, ending = turn_texts(trial, decode)
    return {
        "version": version,
        "environment": trial.task.environment,
        "member": trial.task.member,
        "seat": trial.task.seat,
        "seed": trial.task.seed,
        "reward_by_episode": trial.episode_rewards(),
        **({} if trial.memory is None else {"memory": trial.memory}),
        **({} if trial.cut_at is None else {"cut_at": trial.cut_at}),
        "turns": [
            {
                "episode": turn.episode,
                "kind": turn.kind.name.lower(),
                "observation": text.observation,
                "completion": text.completion,
                "action": turn.action,
                "reward": turn.reward,
                "is_valid": turn.is_valid,
                "info": turn.info,
            }
            | ({"alternative": alternatives[number]} if number in alternatives else {})
            for number, (turn, text) in enumerate(zip(trial.turns, texts, strict=True))
        ],
        "ending": ending,
        "contexts": [decode(segment.tokens.tolist()) for segment in trial.segments],
    }


def num_decimals(returns: Iterable[float]) -> int:
    """Return the number of decimals with which returns are shown: 3; more if all are smaller than
    0.01, so that the largest keeps two or three significant digits; 1 if one is 100 or larger.

    Args:
        returns: The returns that are shown together, and half-widths of their intervals. Values
            that are not finite are ignored.
    """
    largest = max(map(abs, filter(math.isfinite, returns)), default=0.0)
    if largest >= 100:
        return 1
    # Values of 1e-9 or less are rounding errors of 0.
    return 3 + int(-math.log10(largest)) if 1e-9 < largest < 0.01 else 3
