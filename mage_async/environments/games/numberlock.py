"""Number lock: guess a code of different digits. Each answer counts only the digits in place.

The code is hidden and the same in all episodes of a trial. Rewards are those of the guessing games
(`guessing.py`).
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
)
from mage_async.environments.options import check_whole
from mage_async.errors import ConfigError

DIGITS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COUNTS = ("none", *DIGITS)
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

    ladders: Ladders = MappingProxyType(
        {"dials": tuple({"dials": count} for count in range(2, 5)), **FEWER_GUESSES}
    )

    def __init__(self, dials: int = 3, digits: int = 5, turns: int = 6) -> None:
        check_whole("numberlock", "dials", dials, 2, 5)
        check_whole("numberlock", "digits", digits, 4, len(DIGITS))
        check_whole("numberlock", "turns", turns, 1, 20)
        if digits <= dials:
            raise ConfigError(
                f"numberlock: `digits` must be more than `dials` = {dials}, got {digits}"
            )
        used = DIGITS[:digits]
        puzzle = Puzzle(tuple(itertools.permutations(used, dials)), " ", _answer, turns)
        rules = _RULES.format(dials=dials, last=used[-1], example=" ".join(used[:dials]))
        words = (*used, *(word for word in COUNTS[: dials + 1] if word not in used), "place")
        super().__init__(
            "numberlock", puzzle, words, rules + REWARD_RULES.format(turns=turns, what="code")
        )


def _answer(code: Code, guess: Code) -> str:
    return f"place {COUNTS[num_equal(code, guess)]}"
