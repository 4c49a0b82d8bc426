"""What games of other engines have in common: a list of them by name, played in free text.

A game is made anew from the name of its task variant for every episode, so a restart returns to its
beginning; nothing else is drawn. Engines that use the global random state get one of their own
(`OwnLuck`).
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np

from mage_async.environments.environment import Chance, Environment, Facts, Outcome, Play, Split
from mage_async.environments.scripted_returns import scripted_returns
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import Task

INVALID, OVER = "invalid", "over"
_HELDOUT_SHARE = 4  # one game in so many
_NUM_REFERENCE_TRIALS = 20


class Session(Protocol):
    """One run of an engine's game."""

    observation: str

    def legal(self) -> Sequence[str]:
        """What may be done now."""
        ...

    def step(self, action: str) -> tuple[str, float, bool]:
        """What is seen, what was earned by it, and whether the game is over."""
        ...


class OwnLuck:
    """The global random state while an engine runs, and as it was before and after.

    `with luck: …` around every call of an engine that draws from `random` or `numpy.random`.
    Calls are made one after another (`TextGames.called`); one that overran its deadline, and
    returns while another is under way, leaves the state to that one.
    """

    _inside: "ClassVar[OwnLuck | None]" = None

    def __init__(self, seed: int) -> None:
        numbers = np.random.RandomState(seed)
        self._own: tuple[Any, Any] = random.Random(seed).getstate(), numbers.get_state()
        self._outside: tuple[Any, Any] | None = None
        self._around: OwnLuck | None = None

    def __enter__(self) -> None:
        self._outside, self._around = (random.getstate(), np.random.get_state()), OwnLuck._inside
        OwnLuck._inside = self
        _set_luck(self._own)

    def __exit__(self, *_: object) -> None:
        assert self._outside is not None, "entered"
        if OwnLuck._inside is not self:
            return
        OwnLuck._inside = self._around
        self._own = random.getstate(), np.random.get_state()
        _set_luck(self._outside)


def _set_luck(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


class TextPlay:
    """One episode. The anchor is all that was seen last."""

    __slots__ = ("_session", "_turns_left", "anchor", "chance", "done", "earned", "is_done")

    def __init__(self, session: Session, turns: int, chance: Chance) -> None:
        self._session, self._turns_left, self.chance = session, turns, chance
        self.anchor = one_line(session.observation)
        self.is_done = False
        self.done: list[str] = []
        """Actions so far."""
        self.earned = 0.0

    @property
    def observation(self) -> str:
        """What the agent sees first."""
        return one_line(self._session.observation)

    def legal_actions(self) -> Sequence[str]:
        """What the game offers, until it is over."""
        return () if self.is_done else self._session.legal()

    def act(self, action: str) -> Outcome:
        """Do what the game offers; anything else is not told to it, and uses up the turn."""
        assert not self.is_done, "the episode is done"
        self._turns_left -= 1
        if action not in self._session.legal():
            self.is_done = not self._turns_left
            return self._outcome(INVALID, 0.0, is_valid=False)
        self.done.append(action)
        said, reward, is_over = self._session.step(action)
        self.is_done = is_over or not self._turns_left
        self.anchor = one_line(said)
        self.earned += reward
        return self._outcome(self.anchor, reward, is_valid=True)

    def _outcome(self, said: str, reward: float, *, is_valid: bool) -> Outcome:
        said = f"{said} {OVER}".lstrip() if self.is_done else said
        return Outcome(said, reward, is_valid, self.is_done)


@dataclass(slots=True)
class RepeatScript:
    """Does anything, or what it did in the earlier episode that earned most."""

    source: random.Random
    memory: float
    _plays: list[TextPlay] = field(default_factory=list)

    def choose(self, play: Play) -> str:
        """The next action."""
        assert isinstance(play, TextPlay)
        if not self._plays or self._plays[-1] is not play:
            self._plays.append(play)
        best = max(self._plays, key=lambda each: each.earned)
        taken = len(play.done)
        goes_on = best is not play and best.done[:taken] == play.done and len(best.done) > taken
        if goes_on and self.source.random() < self.memory:
            return best.done[taken]
        return self.source.choice(play.legal_actions())


class TextGames(Environment, ABC):
    """Games of an engine by name.

    Args:
        name: of the environment.
        games: names of the games of each split.
        turns: most turns of an episode.
        example: an action that a game offers at its beginning.
    """

    called = "in_turn"
    """Engines take long, and draw from the random state of the whole process."""

    def __init__(
        self, name: str, games: Mapping[Split, tuple[str, ...]], turns: int, example: str
    ) -> None:
        self._games, self._turns = games, turns
        self._names = frozenset(each for members in games.values() for each in members)
        self.facts = Facts(
            name=name,
            num_seats=1,
            max_turns=turns,
            min_return=0.0,
            max_return=1.0,
            units=1,
            has_chance=False,
            words=(example, INVALID, OVER),
            has_open_text=True,
        )

    @abstractmethod
    def session(self, member: str) -> Session:
        """Begin the game of a name."""

    @abstractmethod
    def kind(self, member: str) -> str:
        """The kind of a game, for reports."""

    def members(self, split: Split) -> tuple[str, ...]:
        """Names of the games."""
        return self._games[split]

    def family(self, member: str) -> str:
        """The kind of a game."""
        self._check(member)
        return self.kind(member)

    def seats(self) -> tuple[int, ...]:
        """The agent is alone."""
        return (0,)

    def begin(self, task: Task, episode: int) -> TextPlay:
        """Begin the game anew."""
        self._check(task.member)
        return TextPlay(self.session(task.member), self._turns, Chance(task.seed, episode))

    def script(self, source: random.Random) -> RepeatScript:
        """Its memory is drawn for the trial."""
        return RepeatScript(source, source.choice((0.0, 0.5, 0.95)))

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """All other games of the split."""
        self._check(member)
        return tuple(each for each in self._games[split] if each != member)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Returns in 20 trials, per episode: `random`; `repeat` does again what earned most."""
        players = {"random": 0.0, "repeat": 1.0}
        return {
            name: scripted_returns(
                self,
                split,
                num_episodes,
                partial(RepeatScript, memory=memory),
                _NUM_REFERENCE_TRIALS,
            )
            for name, memory in players.items()
        }

    def _check(self, member: str) -> None:
        if member not in self._names:
            name, example = self.facts.name, self._games["train"][0]
            raise EnvironmentFault(f"{name}: no game is called {member!r}, as is e.g. {example!r}")


def numbered(num_games: int) -> dict[Split, tuple[str, ...]]:
    """Names of games that are made from their number; a quarter of them is held out."""
    names = tuple(f"game-{number}" for number in range(num_games))
    num_heldout = num_games // _HELDOUT_SHARE
    return {"train": names[num_heldout:], "heldout": names[:num_heldout]}


def number_of(member: str) -> int:
    """The number of a game that is made from it."""
    return int(member.removeprefix("game-"))


def one_line(text: str) -> str:
    """The same in one line of single spaces, a bar where a line ended."""
    return " | ".join(" ".join(line.split()) for line in text.splitlines() if line.strip())
