"""What the shipped games share.

A game's task variants have names. A quarter of them is held out. Its scripted players remember the
plays of their trial.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from mage_async.environments.environment import Environment, Facts, Play, Script, Split
from mage_async.environments.scripted_returns import NUM_TRIALS, Sampled, scripted_returns
from mage_async.errors import EnvironmentFault

HELDOUT_SHARE = 4
"""One task variant in so many is held out."""
T = TypeVar("T")
P = TypeVar("P", bound=Play)


def hold_out(variants: Sequence[T]) -> dict[Split, tuple[T, ...]]:
    """Divide task variants into the two splits; the first quarter is held out."""
    num_heldout = len(variants) // HELDOUT_SHARE
    return {"train": tuple(variants[num_heldout:]), "heldout": tuple(variants[:num_heldout])}


def numbered(noun: str, count: int) -> dict[Split, tuple[str, ...]]:
    """Return the splits of variants that are generated from their number, such as `maze-0`."""
    return hold_out([f"{noun}-{number}" for number in range(count)])


def remember(plays: list[P], play: P) -> bool:
    """Append `play` to a script's plays unless it is the current one; return whether it was new."""
    is_new = not plays or plays[-1] is not play
    if is_new:
        plays.append(play)
    return is_new


def num_equal(one: Sequence[object], other: Sequence[object]) -> int:
    """Count the positions at which two codes of the same length agree."""
    return sum(mine == theirs for mine, theirs in zip(one, other, strict=True))


def with_least(counts: Mapping[str, int]) -> tuple[str, ...]:
    """Return the names with the least count, in order."""
    least = min(counts.values())
    return tuple(name for name, count in counts.items() if count == least)


class Game(Environment):
    """A game whose task variants are known by name.

    Args:
        facts: what the game declares.
        splits: names of the task variants by split.
        noun: what error messages call a task variant, such as "code".
    """

    def __init__(
        self, facts: Facts, splits: Mapping[Split, tuple[str, ...]], noun: str = "code"
    ) -> None:
        self.facts, self._splits, self._noun = facts, splits, noun
        self._names = frozenset(name for names in splits.values() for name in names)

    def members(self, split: Split) -> tuple[str, ...]:
        """Return the names of the split's task variants."""
        return self._splits[split]

    def family(self, member: str) -> str:
        """Return the noun: all task variants are of one kind."""
        return self._noun

    def seats(self) -> tuple[int, ...]:
        """Return all seats."""
        return tuple(range(self.facts.num_seats))

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Return all other task variants of the split."""
        self.check(member)
        return tuple(name for name in self._splits[split] if name != member)

    def check(self, member: str) -> None:
        """Check that a task variant exists.

        Raises:
            EnvironmentFault: no task variant has this name.
        """
        if member not in self._names:
            name, example = self.facts.name, self._splits["train"][0]
            raise EnvironmentFault(
                f"{name}: no {self._noun} is called {member!r}, as is e.g. {example!r}"
            )

    def measured(
        self,
        split: Split,
        num_episodes: int,
        players: Mapping[str, Callable[[random.Random], Script]],
        num_trials: int = NUM_TRIALS,
    ) -> dict[str, Sampled]:
        """Measure the returns of scripted players, by the player's name, per unit and episode."""
        return {
            name: scripted_returns(self, split, num_episodes, player, num_trials)
            for name, player in players.items()
        }
