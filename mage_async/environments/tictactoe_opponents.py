"""The opponents of tic-tac-toe: who moves where. Cells are numbers, row by row from 0.

Most are functions of the board, and their moves have known probabilities; a search by sampling
(`mcts-N`) has not.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from mage_async.environments.environment import Chance
from mage_async.environments.openspiel import Mover, engine, searcher

Weights = Mapping[int, float]
"""Relative chances of the cells an opponent may move to."""

GAME = "tic_tac_toe"
_PREFERRED = {
    "preferred-centre": (4, 0, 2, 6, 8, 1, 3, 5, 7),
    "preferred-corners": (0, 2, 6, 8, 4, 1, 3, 5, 7),
    "preferred-edges": (1, 3, 5, 7, 4, 0, 2, 6, 8),
    "preferred-diagonal": (0, 4, 8, 2, 6, 1, 3, 5, 7),
    "preferred-antidiagonal": (2, 4, 6, 0, 8, 1, 3, 5, 7),
    "preferred-reverse": (8, 6, 2, 0, 4, 7, 5, 3, 1),
}
TRAIN = ("random", *(f"preferred-{each}" for each in ("centre", "edges", "diagonal", "reverse")))
HELDOUT = ("preferred-corners", "preferred-antidiagonal", "minimax")


def is_search(member: str) -> bool:
    """Whether a member searches by sampling."""
    return member.startswith("mcts-")


def mover(member: str, chance: Chance) -> Mover:
    """How a member moves in one episode; what it leaves to luck is drawn from `chance`."""
    if is_search(member):
        game = engine().load_game(GAME)
        return searcher(game, int(member.removeprefix("mcts-")), chance)
    return lambda state: _draw(weights(member, state), chance)


def weights(member: str, state: Any) -> Weights:
    """Chances of the moves of a member that does not search by sampling."""
    if member == "random":
        return dict.fromkeys(state.legal_actions(), 1.0)
    if member == "minimax":
        return dict.fromkeys(_best_cells(state), 1.0)
    legal = state.legal_actions()
    return {next(cell for cell in _PREFERRED[member] if cell in legal): 1.0}


def _draw(cells: Weights, chance: Chance) -> int:
    """One of the cells; drawn even where it is the only one, so that luck stays in step."""
    return list(cells)[chance.choose("opponent", list(cells.values()))]


def _best_cells(state: Any) -> list[int]:
    """Cells that keep the game's value."""
    solved = _solved_boards()
    lost = {cell: solved[str(state.child(cell))] for cell in state.legal_actions()}
    return [cell for cell, value in lost.items() if value == min(lost.values())]


@cache
def _solved_boards() -> dict[str, float]:
    """By board, its value to who is to move (or would be, had the game not ended)."""
    solved: dict[str, float] = {}
    _solve(engine().load_game(GAME).new_initial_state(), solved)
    return solved


def _solve(state: Any, solved: dict[str, float]) -> float:
    board = str(state)
    if board not in solved and state.is_terminal():
        solved[board] = -max(state.returns())
    elif board not in solved:
        children = [state.child(cell) for cell in state.legal_actions()]
        solved[board] = max(-_solve(child, solved) for child in children)
    return solved[board]
