"""Provide the base classes of environments on text engines (TextWorld, ALFWorld): a list of games
by name, whose actions and observations are free text.

Every episode creates its game anew from the name of the task variant, so it starts from the game's
beginning; nothing else is random. Engines that use the global random state run inside
`IsolatedRandomState` (`loaders/loader.py`).
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from mage_async.environments.environment import Chance, Outcome, Split, named
from mage_async.environments.games.game import Game, SoloPlay, TrialScript, facts_of
from mage_async.trajectory import Task

INVALID, OVER = "invalid", "over"


class EngineGame(Protocol):
    """Run an engine's game once, from its beginning."""

    observation: str
    """The game's first text."""

    def legal(self) -> Sequence[str]:
        """Return the legal actions."""

    def step(self, action: str) -> tuple[str, float, bool]:
        """Return the observation and the reward of an action, and whether the game is over."""


class TextPlay(SoloPlay):
    """Play one episode. The anchor, which is equal for equal states, is the last observation."""

    def __init__(self, session: EngineGame, turns: int, chance: Chance) -> None:
        self._session, self._turns_left, self.chance = session, turns, chance
        self.observation = self.anchor = one_line(session.observation)
        self.done: list[str] = []
        """Valid actions so far."""
        self.earned = 0.0
        """Sum of the rewards so far."""

    def actions(self) -> Sequence[str]:
        """Return the actions that the game offers."""
        return self._session.legal()

    def apply(self, action: str) -> Outcome:
        """Take an action; an action that the game does not offer only uses up the turn."""
        self._turns_left -= 1
        observation, reward, is_over = INVALID, 0.0, False
        is_valid = action in self._session.legal()
        if is_valid:
            text, reward, is_over = self._session.step(action)
            observation = self.anchor = one_line(text)
            self.done.append(action)
            self.earned += reward
        if is_over or not self._turns_left:
            return Outcome(f"{observation} {OVER}".lstrip(), reward, is_valid, True)
        return Outcome(observation, reward, is_valid)


@dataclass(slots=True)
class RepeatScript(TrialScript[TextPlay]):
    """Take any action, or the next action of the earlier episode that earned most."""

    memory: float
    """Probability of repeating the episode that earned most, as long as the current one has begun
    in the same way.
    """

    def action(self, play: TextPlay) -> str:
        """Return the next action."""
        best = max(self.plays, key=lambda each: each.earned)
        num_done = len(play.done)
        can_follow = best.done[:num_done] == play.done and len(best.done) > num_done
        if best is not play and can_follow and self.source.random() < self.memory:
            return best.done[num_done]
        return self.source.choice(play.legal_actions())


class TextGames(Game[str], ABC):
    """Offer games of an engine by name; base class.

    Args:
        name: Name of the environment.
        games: Names of the games of each split.
        turns: Largest number of turns in an episode.
        example: Action that a game offers at its beginning.
    """

    called = "in_turn"
    """One call at a time in the whole process (`CallMode`), because engines draw from its global
    random state and are slow."""
    num_reference_trials = 20  # few, because engines are slow

    def __init__(
        self, name: str, games: Mapping[Split, Iterable[str]], turns: int, example: str
    ) -> None:
        self._turns = turns
        facts = facts_of(name, turns, (example, INVALID, OVER), has_open_text=True)
        super().__init__(facts, {split: named(names) for split, names in games.items()}, "game")

    @abstractmethod
    def session(self, game: str) -> EngineGame:
        """Start the game of this name."""

    @abstractmethod
    def kind(self, game: str) -> str:
        """Return the kind of the game of this name, for reports."""

    def family(self, member: str) -> str:
        """Return `kind` of the game of a task variant."""
        return self.kind(self.variant(member))

    def begin(self, task: Task, episode: int) -> TextPlay:
        """Start the game from its beginning."""
        session = self.session(self.variant(task.member))
        return TextPlay(session, self._turns, Chance(task.seed, episode))

    def script(self, source: random.Random) -> RepeatScript:
        """Return a script whose memory is drawn for the trial."""
        return RepeatScript(source, source.choice((0.0, 0.5, 0.95)))

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return mean returns over 20 trials, per episode, of `random` and of `repeat`, which
        repeats what has earned most.
        """
        return self.measured(
            split,
            num_episodes,
            random=partial(RepeatScript, memory=0.0),
            repeat=partial(RepeatScript, memory=1.0),
        )


def one_line(text: str) -> str:
    """Return the text in one line of single spaces, with a bar for each line break."""
    return " | ".join(" ".join(line.split()) for line in text.splitlines() if line.strip())
