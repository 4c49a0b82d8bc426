"""Exact values of tic-tac-toe against opponents whose moves have known probabilities, per episode.

The agent takes both seats equally often.
"""

from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean
from typing import Any

from mage_async.environments.openspiel.engine import engine
from mage_async.environments.tictactoe.opponents import GAME, is_search, style, weights

_SEATS = (0, 1)
_Choose = Callable[[Sequence[float]], float]
"""What the agent gets of the values of its moves: the best, or their mean."""


def references(members: Sequence[str]) -> dict[str, float]:
    """Values against a uniform draw of `members`, by name.

    `minimax` is what perfect play earns at least. `random` and `best_response` (which knows the
    opponent) are exact, and left out where a member searches by sampling.
    """
    values = {"minimax": 0.0}
    if not any(map(is_search, members)):
        values["random"] = sum(map(random_value, members)) / len(members)
        values["best_response"] = sum(map(best_response, members)) / len(members)
    return values


@cache
def random_value(member: str) -> float:
    """Return of uniform legal moves against a member."""
    return _value(member, fmean)


@cache
def best_response(member: str) -> float:
    """Return of the best play against a member that is known."""
    return _value(member, max)


def _value(member: str, choose: _Choose) -> float:
    start = engine().load_game(GAME).new_initial_state()
    return fmean(Tree(member, seat, choose).value(start) for seat in _SEATS)


_KNOWN: dict[tuple[str, int, _Choose], dict[str, float]] = {}
"""By the opponent's style, the agent's seat and its choice of moves: the value by board."""


class Tree:
    """The agent in one seat against a member."""

    def __init__(self, member: str, seat: int, choose: _Choose) -> None:
        self._member, self._seat, self._choose = member, seat, choose

    def value(self, state: Any) -> float:
        """The agent's expected return from a board on."""
        taken, board = state.history()[self._seat :: 2], str(state)
        who = style(self._member, taken) if taken else self._member
        values = _KNOWN.setdefault((who, self._seat, self._choose), {})
        if board not in values:
            values[board] = self._expand(state)
        return values[board]

    def _expand(self, state: Any) -> float:
        if state.is_terminal():
            return float(state.returns()[self._seat])
        if state.current_player() == self._seat:
            return self._choose([self.value(state.child(cell)) for cell in state.legal_actions()])
        cells = weights(self._member, state)
        earned = sum(weight * self.value(state.child(cell)) for cell, weight in cells.items())
        return earned / sum(cells.values())
