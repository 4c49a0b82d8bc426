"""Trials as soft actor-critic trains on them: states, actions, valid actions, rewards, and copies
with goals that were reached.

A state is a context, and a context only grows: all states of a segment are places in one row of
tokens, and the state that follows an action is the next place. An action is one token.

Shapes: `T` tokens of a segment, `n` actions in it, `A` actions of the environment.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mage_async.assembly import rules_of
from mage_async.config.schema import Config
from mage_async.environments.environment import Environment
from mage_async.errors import RunError
from mage_async.learning.soft_actor_critic.played_again import PlayedAgain, play_again
from mage_async.policy_version import oldest
from mage_async.trajectory import Group, Trial, Turn
from mage_async.trials.chat_format import ChatFormat


@dataclass(frozen=True, slots=True, eq=False)
class SoftSequence:
    """One segment with its transitions."""

    tokens: np.ndarray
    """int32 [T], up to the last action"""
    places: np.ndarray
    """int64 [n]: where the actions stand"""
    actions: np.ndarray
    """int64 [n]: which action was drawn; -1 where the critic has nothing to learn: no action of the
    environment was drawn, or what followed is unknown"""
    valid: np.ndarray
    """bool [n, A]: what could be done"""
    rewards: np.ndarray
    """float32 [n]"""
    discounts: np.ndarray
    """float32 [n]: what the value of the next state counts; 0 where there is none"""
    version: int
    """The oldest weights that drew an action."""


Copy = tuple[SoftSequence, ...]
"""The segments of a trial, with its own goal or another one."""
Experience = tuple[Copy, ...]
"""A trial with its own goal, and then with goals that it reached."""


def action_tokens(environment: Environment, chat: ChatFormat) -> dict[int, int]:
    """The environment's words that are one token: the place of each among the actions, by token."""
    encoded = (chat.encode(f" {word}") for word in environment.facts.words)
    tokens = sorted({ids[0] for ids in encoded if len(ids) == 1})
    return {token: place for place, token in enumerate(tokens)}


def experiences(
    groups: Sequence[Group],
    config: Config,
    environment: Environment,
    chat: ChatFormat,
    most_goals: int,
) -> list[Experience]:
    """What a batch adds to the replay buffer, in the order of its trials.

    Each trial comes with at most `most_goals` copies that have another goal. Goals are drawn by the
    run's seed, the grant and the trial, so a replay draws the same.

    Raises:
        RunError: an action of the environment is not one token.
    """
    rules = rules_of(
        config,
        environment,
        chat,
        config.trial.episodes,
        stops_on_success=config.trial.stop_on_success,
    )
    reader = _Reader(config, environment, chat)
    found: list[Experience] = []
    for group in groups:
        for trial in group.trials:
            own = play_again(environment, trial, rules, chat)
            source = random.Random(f"{config.seed}/hindsight/{group.grant}/{trial.index}")
            goals = goals_in_hindsight(environment, own, most_goals, source)
            others = [play_again(environment, trial, rules, chat, goal) for goal in goals]
            found.append(tuple(reader.copy_of(each) for each in (own, *others)))
    return found


def goals_in_hindsight(
    environment: Environment, played: PlayedAgain, most: int, source: random.Random
) -> list[str]:
    """Goals that a trial came to and did not have, none of them held out: at most so many."""
    not_wanted = {None, played.trial.task.member, *environment.members("heldout")}
    reached = dict.fromkeys(goal for goal in played.reached if goal not in not_wanted)
    goals = [goal for goal in reached if goal is not None]
    return source.sample(goals, min(most, len(goals)))


class _Reader:
    """From played trials to arrays."""

    def __init__(self, config: Config, environment: Environment, chat: ChatFormat) -> None:
        self._inside = config.credit.turn_discount
        is_chained = config.credit.kind == "cumulative_code"
        self._across = config.credit.episode_discount if is_chained else 0.0
        self._places = action_tokens(environment, chat)
        self._valid = _Valid(self._places, chat)

    def copy_of(self, played: PlayedAgain) -> Copy:
        """The segments in which an action was taken."""
        by_segment: dict[int, list[int]] = {}
        for number, turn in enumerate(played.trial.turns):
            by_segment.setdefault(turn.segment, []).append(number)
        return tuple(self._sequence(played, numbers) for numbers in by_segment.values())

    def _sequence(self, played: PlayedAgain, numbers: Sequence[int]) -> SoftSequence:
        trial = played.trial
        turns = [trial.turns[number] for number in numbers]
        segment = trial.segments[turns[0].segment]
        places = np.array([turn.start for turn in turns], np.int64)
        drawn = [self._places.get(int(token), -1) for token in segment.tokens[places]]
        if self._ends_unknown(trial, turns[-1]):
            drawn[-1] = -1
        return SoftSequence(
            segment.tokens[: int(places[-1]) + 1],
            places,
            np.array(drawn, np.int64),
            np.stack([self._valid[played.valid[number]] for number in numbers]),
            np.array([turn.reward for turn in turns], np.float32),
            np.array([*map(self._discount, turns, turns[1:]), 0.0], np.float32),
            oldest(segment.versions),
        )

    def _discount(self, turn: Turn, after: Turn) -> float:
        return self._inside if turn.episode == after.episode else self._across

    def _ends_unknown(self, trial: Trial, last: Turn) -> bool:
        """Whether a state follows a cut trial's last turn that the trial does not hold."""
        if trial.cut_at is None or last is not trial.turns[-1]:
            return False
        return trial.cut_at == last.episode or self._across > 0.0


class _Valid(dict[tuple[str, ...], np.ndarray]):
    """Rows of valid actions, bool [A], by their words."""

    def __init__(self, places: Mapping[int, int], chat: ChatFormat) -> None:
        super().__init__()
        self._places, self._chat = places, chat

    def __missing__(self, words: tuple[str, ...]) -> np.ndarray:
        row = np.zeros(len(self._places), bool)
        for word in words:
            ids = self._chat.encode(f" {word}")
            if len(ids) != 1 or ids[0] not in self._places:
                raise RunError(
                    f"sac scores actions of one token, and {word!r} is none of the environment's "
                    "words that the tokenizer writes as one: play another environment, or leave "
                    "the section sac out"
                )
            row[self._places[ids[0]]] = True
        return self.setdefault(words, row)
