"""Mastermind: guess a code of colours.

Each answer counts the colours in place and the further colours that are elsewhere in the code.
Rewards are those of the guessing games (`guessing.py`).
"""

import itertools
from functools import lru_cache

from mage_async.environments.games.game import ladders_of, num_equal
from mage_async.environments.games.guessing import TURN_LADDER, Code, Guessing, Puzzle
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

    ladders = ladders_of(pegs=range(2, 6), turns=TURN_LADDER)

    def __init__(self, pegs: int = 3, colours: int = 4, turns: int = 6) -> None:
        check_whole("mastermind", "pegs", pegs, 2, 5)
        check_whole("mastermind", "colours", colours, 3, len(COLOURS))
        used = COLOURS[:colours]
        puzzle = Puzzle(tuple(itertools.product(used, repeat=pegs)), " ", _answer, turns)
        rules = _RULES.format(pegs=pegs, colours=", ".join(used), example=" ".join(used[:pegs]))
        words = (*used, *NUMBERS[: pegs + 1], "place", "elsewhere")
        super().__init__("mastermind", puzzle, words, rules)


# A solver compares each guess with every code, again and again.
@lru_cache(maxsize=1 << 17)
def _answer(code: Code, guess: Code) -> str:
    placed = num_equal(code, guess)
    num_shared = sum(min(code.count(colour), guess.count(colour)) for colour in set(guess))
    return f"place {NUMBERS[placed]} elsewhere {NUMBERS[num_shared - placed]}"
