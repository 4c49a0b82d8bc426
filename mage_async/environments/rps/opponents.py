"""The hidden opponents of rock-paper-scissors, and their split by shift-orbit.

Moves are numbers: 0 rock, 1 paper, 2 scissors; move m + 1 (mod 3) beats m. An opponent repeats a
pattern, or answers the agent's last move; it starts anew in every episode.

Sequences are split by orbits under x -> x + k (mod 3), all three shifts of a sequence on the same
side, so that every single move stays equally likely in both splits. With a random split, the first
move alone was worth 0.28 a round to a player without any memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MOVES = ("rock", "paper", "scissors")
NUM_ROUNDS = 4

_SHIFTS = {"copy": 0, "beat": 1, "lose": 2}
_TRAIN_ORBITS = ((0, 1, 2), (0, 0, 2), (0, 2, 0), (0, 1, 0), (0, 0, 1))
_HELDOUT_ORBITS = ((0, 1, 1), (0, 2, 2), (0, 2, 1))


@dataclass(frozen=True, slots=True)
class Opponent:
    """Repeats `pattern`; or, with a `shift`, plays the agent's last move plus `shift` (mod 3)."""

    name: str
    pattern: tuple[int, ...]
    shift: int | None = None

    def move(self, turn: int, last: int | None) -> int:
        """What it plays in round `turn` of an episode, after the agent's `last` move."""
        if self.shift is None:
            return self.pattern[turn % len(self.pattern)]
        return self.pattern[0] if last is None else (last + self.shift) % 3

    @property
    def family(self) -> str:
        """The kind it belongs to."""
        return self.name.partition("-")[0]


def result(mine: int, theirs: int) -> int:
    """1 where `mine` beats `theirs`, 0 for a draw, -1 for a loss."""
    return (0, 1, -1)[(mine - theirs) % 3]


def best_moves(opponent: Opponent) -> list[int]:
    """The moves that beat it in every round without noise; they are unique."""
    moves: list[int] = []
    for turn in range(NUM_ROUNDS):
        moves.append((opponent.move(turn, moves[-1] if moves else None) + 1) % 3)
    return moves


def payoff(moves: Sequence[int], opponent: Opponent) -> int:
    """Return of an episode of fixed moves against an opponent without noise."""
    lasts = (None, *moves)
    return sum(result(mine, opponent.move(turn, lasts[turn])) for turn, mine in enumerate(moves))


def _pattern(family: str, pattern: tuple[int, ...]) -> Opponent:
    name = "-".join((family, *(MOVES[move] for move in pattern)))
    return Opponent(name, pattern, _SHIFTS.get(family))


def _orbits(orbits: tuple[tuple[int, ...], ...]) -> tuple[Opponent, ...]:
    return tuple(
        _pattern("seq", tuple((move + shift) % 3 for move in orbit))
        for orbit in orbits
        for shift in range(3)
    )


def _each_first(family: str) -> tuple[Opponent, ...]:
    return tuple(_pattern(family, (first,)) for first in range(3))


TRAIN = _each_first("fixed") + _orbits(_TRAIN_ORBITS) + _each_first("copy") + _each_first("beat")
"""24: the constants, five orbits of sequences, and two families that react."""
HELDOUT = _orbits(_HELDOUT_ORBITS) + _each_first("lose")
"""12: three orbits never met, and a family that never was."""
