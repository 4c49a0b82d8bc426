"""Mastermind: guess a code of colours.

Each answer counts the colours in place and the further colours that are elsewhere in the code.
"""

import itertools
from types import MappingProxyType

from mage_async.environments.environment import Ladders
from mage_async.environments.games.game import num_equal
from mage_async.environments.games.guessing import (
    FEWER_GUESSES,
    REWARD_RULES,
    Code,
    Guessing,
    Puzzle,
    num_shared,
)
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
        pegs: number of colours in a code.
        colours: number of different colours.
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
        end = REWARD_RULES.format(turns=turns, what="code")
        words = (*used, *NUMBERS[: pegs + 1], "place", "elsewhere")
        super().__init__("mastermind", puzzle, words, rules + end)


def _answer(code: Code, guess: Code) -> str:
    placed = num_equal(code, guess)
    return f"place {NUMBERS[placed]} elsewhere {NUMBERS[num_shared(code, guess) - placed]}"
