"""Base of the games on other engines (TextWorld, ALFWorld): a list of games by name, played in free
text.

Every episode creates its game anew from the name of the task variant, so a restart returns to the
game's beginning; nothing else is drawn. Engines that use the global random state run inside
`IsolatedRandomState` (`random_state.py`).
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from mage_async.environments.environment import Chance, Facts, Outcome, Play, Split
from mage_async.environments.games.game import Game, remember
from mage_async.trajectory import Task

INVALID, OVER = "invalid", "over"
_NUM_REFERENCE_TRIALS = 20


class Session(Protocol):
    """One run of an engine's game."""

    observation: str

    def legal(self) -> Sequence[str]:
        """Return the legal actions."""
        ...

    def step(self, action: str) -> tuple[str, float, bool]:
        """Return the observation and the reward of an action, and whether the game is over."""
        ...


class TextPlay:
    """One episode. The anchor is the last observation."""

    def __init__(self, session: Session, turns: int, chance: Chance) -> None:
        self._session, self._turns_left, self.chance = session, turns, chance
        self.anchor = one_line(session.observation)
        self.is_done = False
        self.done: list[str] = []
        """Valid actions so far."""
        self.earned = 0.0

    @property
    def observation(self) -> str:
        """The first observation."""
        return one_line(self._session.observation)

    def legal_actions(self) -> Sequence[str]:
        """Return the actions that the game offers, until it is over."""
        return () if self.is_done else self._session.legal()

    def act(self, action: str) -> Outcome:
        """Take an action; an action that the game does not offer only uses up the turn."""
        assert not self.is_done, "the episode is done"
        self._turns_left -= 1
        if action not in self._session.legal():
            self.is_done = not self._turns_left
            return self._outcome(INVALID, 0.0, is_valid=False)
        self.done.append(action)
        observation, reward, is_over = self._session.step(action)
        self.is_done = is_over or not self._turns_left
        self.anchor = one_line(observation)
        self.earned += reward
        return self._outcome(self.anchor, reward, is_valid=True)

    def _outcome(self, observation: str, reward: float, *, is_valid: bool) -> Outcome:
        observation = f"{observation} {OVER}".lstrip() if self.is_done else observation
        return Outcome(observation, reward, is_valid, self.is_done)


@dataclass(slots=True)
class RepeatScript:
    """Takes any action, or the next one of the earlier episode that earned most."""

    source: random.Random
    memory: float
    _plays: list[TextPlay] = field(default_factory=list)

    def choose(self, play: Play) -> str:
        """Return the next action."""
        assert isinstance(play, TextPlay)
        remember(self._plays, play)
        best = max(self._plays, key=lambda each: each.earned)
        num_done = len(play.done)
        can_follow = best.done[:num_done] == play.done and len(best.done) > num_done
        if best is not play and can_follow and self.source.random() < self.memory:
            return best.done[num_done]
        return self.source.choice(play.legal_actions())


class TextGames(Game, ABC):
    """Games of an engine by name.

    Args:
        name: of the environment.
        games: names of the games of each split.
        turns: largest number of turns in an episode.
        example: an action that a game offers at its beginning.
    """

    called = "in_turn"
    """Engines are slow, and draw from the random state of the whole process."""

    def __init__(
        self, name: str, games: Mapping[Split, tuple[str, ...]], turns: int, example: str
    ) -> None:
        self._turns = turns
        facts = Facts(
            name=name,
            max_turns=turns,
            min_return=0.0,
            max_return=1.0,
            words=(example, INVALID, OVER),
            has_open_text=True,
        )
        super().__init__(facts, games, "game")

    @abstractmethod
    def session(self, member: str) -> Session:
        """Start a game."""

    @abstractmethod
    def kind(self, member: str) -> str:
        """Return the kind of a game, for reports."""

    def family(self, member: str) -> str:
        """Return the kind of a game."""
        self.check(member)
        return self.kind(member)

    def begin(self, task: Task, episode: int) -> TextPlay:
        """Start the game anew."""
        self.check(task.member)
        return TextPlay(self.session(task.member), self._turns, Chance(task.seed, episode))

    def script(self, source: random.Random) -> RepeatScript:
        """Return a script whose memory is drawn for the trial."""
        return RepeatScript(source, source.choice((0.0, 0.5, 0.95)))

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return the returns in 20 trials, per episode, of `random` and of `repeat`, which repeats
        what has earned most.
        """
        players = {
            "random": partial(RepeatScript, memory=0.0),
            "repeat": partial(RepeatScript, memory=1.0),
        }
        return {**self.measured(split, num_episodes, players, _NUM_REFERENCE_TRIALS)}


def one_line(text: str) -> str:
    """Return the text in one line of single spaces, with a bar for each line break."""
    return " | ".join(" ".join(line.split()) for line in text.splitlines() if line.strip())
