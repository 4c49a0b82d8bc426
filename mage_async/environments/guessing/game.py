"""What the games of guessing share: the code of a trial is the same in all episodes.

What an episode has been told, even one that was lost, still holds in the next; a code that was
found is guessed at once.
"""

import random
from collections.abc import Sequence
from functools import partial
from types import MappingProxyType

from mage_async.environments.environment import Chance, Environment, Facts, Ladders, Split
from mage_async.environments.guessing.play import (
    INVALID,
    OVER,
    SOLVED,
    GuessingPlay,
    GuessingScript,
)
from mage_async.environments.guessing.puzzle import Code, Puzzle, farthest
from mage_async.environments.guessing.values import random_return
from mage_async.environments.scripted_returns import scripted_returns
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import Task

_HELDOUT_SHARE = 4  # one code in so many

REWARDS = """Half of the reward is for what stands in its place, half for the solution, which is \
worth more the sooner it comes. You have {turns} guesses.
The {what} is the same in all episodes."""


FEWER_GUESSES: Ladders = MappingProxyType(
    {"turns": tuple({"turns": count} for count in range(10, 1, -1))}
)
"""Rungs keep what is held out apart from what is trained on: longer codes do, and so do fewer
guesses. Among codes of more symbols, or more words, some would be held out that a run has trained
on.
"""


class Guessing(Environment):
    """A game of guessing.

    Args:
        puzzle: the rules.
        words: of guesses and answers, beside those that all games have.
        rules: in words.
    """

    ladders = FEWER_GUESSES

    def __init__(self, name: str, puzzle: Puzzle, words: Sequence[str], rules: str) -> None:
        self.puzzle, self._rules = puzzle, rules
        self._codes = {puzzle.written(code): code for code in puzzle.codes}
        self._splits = _split(name, puzzle.codes)
        self.facts = Facts(
            name=name,
            num_seats=1,
            max_turns=puzzle.turns,
            min_return=0.0,
            max_return=1.0,
            units=1,
            has_chance=False,
            words=tuple(dict.fromkeys((*words, SOLVED, OVER, INVALID))),
            wins_above=0.5,
            loses_below=0.5,
            example=puzzle.written(puzzle.codes[0]),
        )

    def members(self, split: Split) -> tuple[str, ...]:
        """Codes, with hyphens for spaces."""
        return tuple(_name(self.puzzle, code) for code in self._splits[split])

    def family(self, member: str) -> str:
        """All codes are of one kind."""
        return "code"

    def seats(self) -> tuple[int, ...]:
        """The agent is alone."""
        return (0,)

    def rules(self) -> str:
        """The rules in plain words."""
        return self._rules

    def begin(self, task: Task, episode: int) -> GuessingPlay:
        """Start with nothing known."""
        chance = Chance(task.seed, episode)
        return GuessingPlay(self.puzzle, self._codes, self._code(task.member), chance)

    def script(self, source: random.Random) -> GuessingScript:
        """Its care and its memory are drawn for the trial."""
        care, memory = source.choice((0.5, 0.9)), source.choice((0.0, 0.5, 0.95))
        return GuessingScript(source, self.puzzle, care, memory)

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Codes of the split with the fewest symbols in the same place."""
        others = farthest(self._code(member), self._splits[split])
        return tuple(_name(self.puzzle, code) for code in others)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Returns per episode: exact for `random` and `known`, of 200 scripted trials for others.

        `random` guesses any code. `solver_without_memory` guesses any code that fits what it was
        told in the episode, `solver` one that fits all episodes; both know all codes, and not which
        are held out. `known` guesses the code at once.
        """
        chance = random_return(self.puzzle, self._splits[split])
        solvers = {"solver_without_memory": 0.0, "solver": 1.0}
        return {
            "random": (chance,) * num_episodes,
            **{
                name: scripted_returns(self, split, num_episodes, partial(self._solver, memory))
                for name, memory in solvers.items()
            },
            "known": (1.0,) * num_episodes,
        }

    def _solver(self, memory: float, source: random.Random) -> GuessingScript:
        return GuessingScript(source, self.puzzle, 1.0, memory)

    def _code(self, member: str) -> Code:
        code = self._codes.get(member.replace("-", " "))
        if code is None:
            name, example = self.facts.name, _name(self.puzzle, self.puzzle.codes[0])
            raise EnvironmentFault(f"{name}: no code is called {member!r}, as is e.g. {example!r}")
        return code


def _name(puzzle: Puzzle, code: Code) -> str:
    return puzzle.written(code).replace(" ", "-")


def _split(name: str, codes: Sequence[Code]) -> dict[Split, tuple[Code, ...]]:
    """A quarter of the codes is held out, drawn once for all runs."""
    shuffled = list(codes)
    random.Random(f"{name}/heldout").shuffle(shuffled)
    heldout = set(shuffled[: len(codes) // _HELDOUT_SHARE])
    return {
        "train": tuple(code for code in codes if code not in heldout),
        "heldout": tuple(code for code in codes if code in heldout),
    }
