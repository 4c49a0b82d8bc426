"""Provide base classes and helpers of the shipped games.

Base classes: `Game`, whose task variants have names; `SoloPlay`, an episode of a single player;
`TrialScript`, a scripted player of a whole trial. Helpers for boards: directions, names of rows and
columns, sets of cells as integers, boards as text.
"""

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeGuard, TypeVar, cast

from mage_async.environments.environment import (
    HELDOUT_EVERY,
    Environment,
    Facts,
    Ladders,
    Outcome,
    Play,
    Script,
    Split,
    Splits,
    V,
    is_finite,
)
from mage_async.environments.game_references import NUM_TRIALS, scripted_returns
from mage_async.errors import EnvironmentFault

P = TypeVar("P", bound=Play)


def facts_of(
    name: str,
    max_turns: int,
    words: tuple[str, ...],
    returns: tuple[float, float] = (0.0, 1.0),
    threshold: float = 0.0,
    **more: Any,
) -> Facts:
    """Return the facts of a game.

    Args:
        name: Name of the game.
        max_turns: Upper bound on the agent's turns in one episode.
        words: All words of observations and actions; the first one is an action.
        returns: Least and largest return of an episode.
        threshold: Return above which an episode is won, and below which it is lost.
        more: Further fields of `Facts`.
    """
    least, most = returns
    return Facts(
        name=name,
        max_turns=max_turns,
        words=words,
        min_return=least,
        max_return=most,
        wins_above=threshold,
        loses_below=threshold,
        **more,
    )


def ladders_of(**ladders: Iterable[object]) -> Ladders:
    """Return ladders, for curricula and harder evaluations, of one option each.

    Each argument names an option of the game, and lists the option's values, easiest first.
    """
    return MappingProxyType(
        {option: tuple({option: each} for each in values) for option, values in ladders.items()}
    )


def is_number(value: object) -> TypeGuard[float]:
    """Return whether an option is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)


def num_equal(one: Sequence[object], other: Sequence[object]) -> int:
    """Count the positions at which two codes of the same length agree."""
    return sum(mine == theirs for mine, theirs in zip(one, other, strict=True))


def is_heldout_text(text: str) -> bool:
    """Return whether a generated variant is held out. A quarter of all possible ones is, chosen by
    the hash of a text that is equal for equal variants.
    """
    return zlib.crc32(text.encode()) % HELDOUT_EVERY == 0


class SoloPlay(ABC):
    """Play an episode of a single player; base class. A subclass adds the other attributes of a
    `Play`: `chance`, `observation` and `anchor`.
    """

    is_over = False
    """Whether the episode has ended."""

    @abstractmethod
    def actions(self) -> Sequence[str]:
        """Return the legal actions of an episode that is not over."""

    @abstractmethod
    def apply(self, action: str) -> Outcome:
        """Apply an action to an episode that is not over."""

    def legal_actions(self) -> Sequence[str]:
        """Return the legal actions; empty when the episode is over."""
        return () if self.is_over else self.actions()

    def act(self, action: str) -> Outcome:
        """Apply an action; an illegal one yields an outcome that is not valid."""
        assert not self.is_over, "the episode is done"
        outcome = self.apply(action)
        self.is_over = outcome.is_done
        return outcome


@dataclass(slots=True)
class TrialScript(Generic[P]):
    """Play one trial by a script that can look at all episodes so far; base class."""

    source: random.Random
    """Random source of the script."""
    plays: list[P] = field(default_factory=list, init=False)
    """Episodes so far; the last one is in progress."""

    def choose(self, play: Play) -> str:
        """Return the next action."""
        if not self.plays or self.plays[-1] is not play:
            self.plays.append(cast("P", play))
            self.begin()
        return self.action(self.plays[-1])

    def begin(self) -> None:
        """Prepare for a new episode. The default does nothing."""

    def facts(self) -> Sequence[str] | None:
        """Return what the player knows, each fact in the words of an observation, oldest first;
        `None`, the default, if the game defines no facts.

        Where a trial replaces a full context by notes, a warm start writes some of these facts:
        those that the context holds (`NoteTaker`).
        """
        return None

    def action(self, play: P) -> str:
        """Return the next action in the current episode."""
        raise NotImplementedError


class Game(Environment, Generic[V]):
    """Describe a game whose task variants are known by name; base class.

    Args:
        facts: Declarations of the game.
        splits: Task variants by name, for each split.
        noun: Word for a task variant in error messages, such as "code".
        unsplit: Further task variants, which exist but belong to no split.
    """

    num_reference_trials = NUM_TRIALS
    """Number of trials for each measured return."""

    def __init__(
        self,
        facts: Facts,
        splits: Splits[V],
        noun: str = "code",
        unsplit: Mapping[str, V] | None = None,
    ) -> None:
        self.facts, self._splits, self._noun = facts, splits, noun
        self._variants = {**(unsplit or {}), **splits["train"], **splits["heldout"]}

    def members(self, split: Split) -> tuple[str, ...]:
        """Return the names of the split's task variants."""
        return tuple(self._splits[split])

    def variant(self, member: str) -> V:
        """Return what the game hides in a task variant.

        Raises:
            EnvironmentFault: no task variant has this name.
        """
        if member not in self._variants:
            name, example = self.facts.name, next(iter(self._splits["train"]))
            raise EnvironmentFault(
                f"{name}: no {self._noun} is called {member!r}; one is called {example!r}"
            )
        return self._variants[member]

    def family(self, member: str) -> str:
        """Return the noun, because all task variants are of one kind."""
        return self._noun

    def seats(self) -> tuple[int, ...]:
        """Return all seats."""
        return tuple(range(self.facts.num_seats))

    def overlap(self, one: V, other: V) -> int:
        """Return how much the knowledge of one task variant helps against another. The default is 0
        for all pairs.
        """
        return 0

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Return the other task variants of the split that overlap least with `member`, so that
        knowledge of it helps as little as possible.
        """
        hidden = self.variant(member)
        overlaps = {
            name: self.overlap(hidden, other)
            for name, other in self._splits[split].items()
            if name != member
        }
        least = min(overlaps.values(), default=0)
        return tuple(name for name, overlap in overlaps.items() if overlap == least)

    def measured(
        self, split: Split, num_episodes: int, **players: Callable[[random.Random], Script]
    ) -> dict[str, tuple[float, ...]]:
        """Return the mean returns of scripted players by name: a value for each episode, divided by
        `Facts.units`.

        Args:
            players: Called with a random source, each returns the script of one trial.
        """
        return {
            name: scripted_returns(self, split, num_episodes, player, self.num_reference_trials)
            for name, player in players.items()
        }


Cell = tuple[int, int]
"""Row and column, from 0. Below, `cells_of` and `set_of` number cells instead, row by row."""
DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
"""For each direction, the numbers that a step adds to row and column."""
ROWS = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "tau", "zeta", "kappa")
COLUMNS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def step(cell: Cell, direction: str) -> Cell:
    """Return the cell one step away."""
    down, right = DIRECTIONS[direction]
    return cell[0] + down, cell[1] + right


def cell_text(cell: Cell, separator: str = " ") -> str:
    """Return a cell's row and column in words, such as `beta three`."""
    return f"{ROWS[cell[0]]}{separator}{COLUMNS[cell[1]]}"


def cells_of(cells: int) -> Iterator[int]:
    """Iterate over the cells of a set, in increasing order; bit `i` of the integer stands for cell
    `i`.
    """
    while cells:
        # `cells & -cells` is the lowest set bit alone.
        lowest = cells & -cells
        yield lowest.bit_length() - 1
        cells ^= lowest


def set_of(cells: Iterable[int]) -> int:
    """Return the set of some distinct cells."""
    return sum(1 << cell for cell in cells)


def in_rows(observation: str, size: int, refusal: str) -> str:
    """Break the words of a board of `size` times `size` cells into lines, a row a line.

    The refusal that may precede the board, and the words that follow the board, get lines of their
    own. An observation with fewer words than a board has cells is returned unchanged.
    """
    words = observation.split()
    start = int(words[:1] == [refusal])
    end = start + size * size
    if len(words) < end:
        return observation
    rows = [words[first : first + size] for first in range(start, end, size)]
    parts = (words[:start], *rows, words[end:])
    return "\n".join(" ".join(part) for part in parts if part)
