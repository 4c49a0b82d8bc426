"""The opponents of tic-tac-toe and their moves. Cells are numbers, row by row from 0.

Most are functions of the board, and their moves have known probabilities; a search by sampling
(`mcts-N`) has not. A careless one looks at the agent's first cell as well: if it is one of the
three that it takes lightly, it goes through its list of cells for the whole game, else it plays
perfectly, its list deciding between moves of one value. It leaves nothing to luck.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from mage_async.environments.environment import Chance
from mage_async.environments.openspiel.engine import Mover, engine, searcher

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


_CELLS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_LISTS = ("centre", "corners", "edges", "reverse")
_HELDOUT_SHAPES = ((0, 1, 3), (0, 2, 4), (0, 3, 6))
"""Three cells, up to counting on: each cell is as frequent in them as in all others."""


def _shape(cells: tuple[int, ...]) -> tuple[int, ...]:
    return min(tuple(sorted((cell + by) % 9 for cell in cells)) for by in range(9))


def _careless(*, are_heldout: bool) -> tuple[str, ...]:
    return tuple(
        "-".join(("careless", which, *(_CELLS[cell] for cell in cells)))
        for cells in itertools.combinations(range(9), 3)
        for which in _LISTS
        if (_shape(cells) in _HELDOUT_SHAPES) == are_heldout
    )


CARELESS_TRAIN, CARELESS_HELDOUT = _careless(are_heldout=False), _careless(are_heldout=True)


def is_search(member: str) -> bool:
    """Whether a member searches by sampling."""
    return member.startswith("mcts-")


@cache
def taken_lightly(member: str) -> frozenset[int]:
    """The cells with which the agent may begin to find a careless member careless."""
    kind, _, rest = member.partition("-")
    names = rest.split("-")[1:] if kind == "careless" else ()
    return frozenset(map(_CELLS.index, names))


def mover(member: str, chance: Chance) -> Mover:
    """How a member moves in one episode; what it leaves to luck is drawn from `chance`."""
    if is_search(member):
        game = engine().load_game(GAME)
        return searcher(game, int(member.removeprefix("mcts-")), chance)
    if member.startswith("careless-"):
        return lambda state: next(iter(weights(member, state)))
    return lambda state: _draw(weights(member, state), chance)


def style(member: str, taken: Sequence[int]) -> str:
    """The style of a member once the agent has taken these cells: its own name, or the style that
    a careless member has switched to.
    """
    if not member.startswith("careless-"):
        return member
    which = member.split("-")[1]
    is_careless = bool(taken) and taken[0] in taken_lightly(member)
    return f"preferred-{which}" if is_careless else f"perfect-{which}"


def weights(member: str, state: Any) -> Weights:
    """Chances of the moves of a member that does not search by sampling."""
    taken = state.history()[1 - state.current_player() :: 2]
    kind, _, which = style(member, taken).partition("-")
    if kind == "random":
        return dict.fromkeys(state.legal_actions(), 1.0)
    if kind == "minimax":
        return dict.fromkeys(_best_cells(state), 1.0)
    cells = state.legal_actions() if kind == "preferred" else _best_cells(state)
    return {next(cell for cell in _PREFERRED[f"preferred-{which}"] if cell in cells): 1.0}


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
    """By board, its value to the side to move (or that would move, had the game not ended)."""
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
