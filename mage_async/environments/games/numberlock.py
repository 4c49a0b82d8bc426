"""Number lock: guess a code of different digits. Each answer counts only the digits in place.

Rewards are those of the guessing games (`guessing.py`).
"""

import itertools

from mage_async.environments.games.game import ladders_of, num_equal
from mage_async.environments.games.guessing import TURN_LADDER, Code, Guessing, Puzzle
from mage_async.environments.options import check_whole
from mage_async.errors import ConfigError

DIGITS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NUMBERS = ("none", *DIGITS)
_RULES = """A lock opens with {dials} different digits from one to {last}.
Guess all {dials}, such as: {example}. You are told how many of them are in place.
"""


class NumberLock(Guessing):
    """A code of different digits.

    Args:
        dials: number of digits in a code.
        digits: number of different digits, at least 4 and more than `dials`.
        turns: guesses of an episode.

    Raises:
        ConfigError: an option is out of its range.
    """

    ladders = ladders_of(dials=range(2, 5), turns=TURN_LADDER)

    def __init__(self, dials: int = 3, digits: int = 5, turns: int = 6) -> None:
        check_whole("numberlock", "dials", dials, 2, 5)
        check_whole("numberlock", "digits", digits, 4, len(DIGITS))
        if digits <= dials:
            raise ConfigError(
                f"numberlock: `digits` must be more than `dials` = {dials}, got {digits}"
            )
        used = DIGITS[:digits]
        puzzle = Puzzle(tuple(itertools.permutations(used, dials)), " ", _answer, turns)
        rules = _RULES.format(dials=dials, last=used[-1], example=" ".join(used[:dials]))
        words = (*used, *(word for word in NUMBERS[: dials + 1] if word not in used), "place")
        super().__init__("numberlock", puzzle, words, rules)


def _answer(code: Code, guess: Code) -> str:
    return f"place {NUMBERS[num_equal(code, guess)]}"
