"""Mastermind: how many colours are in place, and how many are elsewhere."""

import itertools
from types import MappingProxyType

from mage_async.environments.environment import Ladders
from mage_async.environments.guessing.game import FEWER_GUESSES, REWARDS, Guessing
from mage_async.environments.guessing.puzzle import Code, Puzzle, in_place, shared
from mage_async.environments.options import check_whole

COLOURS = ("red", "green", "blue", "gold", "black", "white")
NUMBERS = ("none", "one", "two", "three", "four", "five")
_RULES = """A code of {pegs} colours from {colours} is hidden; a colour may come more than once.
Guess all {pegs}, such as: {example}. You are told how many are in place, and how many more of your
colours are elsewhere in the code.
"""


class Mastermind(Guessing):
    """A code of colours.

    Args:
        pegs: colours of a code.
        colours: that there are.
        turns: guesses of an episode.

    Raises:
        ConfigError: an option is out of its range.
    """

    ladders: Ladders = MappingProxyType(
        {"pegs": tuple({"pegs": count} for count in range(2, 6)), **FEWER_GUESSES}
    )

    def __init__(self, pegs: int = 3, colours: int = 4, turns: int = 6) -> None:
        check_whole("mastermind", "pegs", pegs, 2, 5)
        check_whole("mastermind", "colours", colours, 3, len(COLOURS))
        check_whole("mastermind", "turns", turns, 1, 20)
        used = COLOURS[:colours]
        puzzle = Puzzle(tuple(itertools.product(used, repeat=pegs)), " ", _answer, turns)
        rules = _RULES.format(pegs=pegs, colours=", ".join(used), example=" ".join(used[:pegs]))
        end = REWARDS.format(turns=turns, what="code")
        words = (*used, *NUMBERS[: pegs + 1], "place", "elsewhere")
        super().__init__("mastermind", puzzle, words, rules + end)


def _answer(code: Code, guess: Code) -> str:
    placed = in_place(code, guess)
    return f"place {NUMBERS[placed]} elsewhere {NUMBERS[shared(code, guess) - placed]}"
