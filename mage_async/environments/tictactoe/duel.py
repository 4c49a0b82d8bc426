"""Tic-tac-toe against a rival that is asked for actions, as the agent is."""

from collections.abc import Sequence
from typing import Any

from mage_async.environments.duel_sides import TwoSides, other
from mage_async.environments.environment import AGENT, RIVAL, Chance, Side
from mage_async.environments.tictactoe.play import (
    CELLS,
    INVALID,
    MAX_TURNS,
    MINE,
    NUMBERS,
    RESULTS,
    SEATS,
    THEIRS,
    View,
)


class TicTacToeDuel(TwoSides):
    """One game; the sides are told what `TicTacToePlay` would tell them.

    A side that has used up its turns before the game ends has lost.
    """

    def __init__(self, state: Any, seat: int, view: View, chance: Chance) -> None:
        super().__init__(chance)
        self._state, self._seat, self._view = state, seat, view
        self._left, self._is_done = [MAX_TURNS, MAX_TURNS], False
        self._boards = list(CELLS), list(CELLS)
        if view == "news":
            self._tell(AGENT, SEATS[seat])
            self._tell(RIVAL, SEATS[1 - seat])
        self._show_board(AGENT if seat == 0 else RIVAL)

    @property
    def turn(self) -> Side | None:
        """Whose action is wanted; None when the game is over."""
        if self._is_done:
            return None
        return AGENT if self._state.current_player() == self._seat else RIVAL

    def anchor(self, side: Side) -> str:
        """The board, from a side."""
        return " ".join(self._boards[side])

    def legal_actions(self) -> Sequence[str]:
        """Names of the free cells until the game is over."""
        return () if self._is_done else [cell for cell in self._boards[AGENT] if cell in NUMBERS]

    def act(self, action: str) -> None:
        """Take a cell; an invalid action takes none but uses up the turn."""
        side = self.turn
        assert side is not None, "the episode is done"
        self._left[side] -= 1
        if action in self.legal_actions():
            self._take(side, action)
        else:
            self._refuse(side)
            self._tell(side, INVALID)
        is_over = self._state.is_terminal()
        self._is_done = is_over or not self._left[side]
        if is_over:
            self._end(float(self._state.returns()[self._seat]))
        elif self._is_done:
            self._end(-1.0 if side == AGENT else 1.0)
        elif self.turn is not None:
            self._show_board(self.turn)

    def _take(self, side: Side, cell: str) -> None:
        number = NUMBERS[cell]
        self._state.apply_action(number)
        self._boards[side][number], self._boards[other(side)][number] = MINE, THEIRS
        if self._view == "news":
            self._tell(other(side), cell)

    def _show_board(self, side: Side) -> None:
        if self._view == "board":
            self._tell(side, self.anchor(side))

    def _end(self, agents: float) -> None:
        for side in (AGENT, RIVAL):
            reward = agents if side == AGENT else -agents
            self._show_board(side)
            self._tell(side, RESULTS[reward])
            self._pay(side, reward)
