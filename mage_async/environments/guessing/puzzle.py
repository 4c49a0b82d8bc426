"""A puzzle: which codes there are, how a guess is written, and what a guess is told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

Code = tuple[str, ...]
"""Letters, colours or digits, in order."""


@dataclass(frozen=True, slots=True)
class Puzzle:
    """The rules that tell the games apart."""

    codes: tuple[Code, ...]
    """Every code, which is also every guess."""
    joint: str
    """What stands between the symbols of a guess: a space, or nothing in a word."""
    answer: Callable[[Code, Code], str]
    """What the guess (second) is told of the code (first)."""
    turns: int

    def written(self, code: Code) -> str:
        """A code as an action."""
        return self.joint.join(code)

    def width(self) -> int:
        """Symbols of a code."""
        return len(self.codes[0])


def in_place(code: Code, guess: Code) -> int:
    """How many symbols of a guess stand where the code has them."""
    return sum(one == other for one, other in zip(code, guess, strict=True))


@lru_cache(maxsize=1 << 17)
def shared(code: Code, guess: Code) -> int:
    """How many symbols of a guess the code has anywhere, each as often as both have it."""
    return sum(min(code.count(symbol), guess.count(symbol)) for symbol in set(guess))


def farthest(code: Code, others: Sequence[Code]) -> list[Code]:
    """The codes with the fewest symbols in the same place."""
    least = min(in_place(code, other) for other in others if other != code)
    return [other for other in others if other != code and in_place(code, other) == least]
