"""One episode of MineSweeper: the opening is made, then a cell a turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mage_async.environments.cell_sets import cells_of
from mage_async.environments.environment import Chance, Outcome
from mage_async.environments.minesweeper.board import MINE, Board, cell_names

View = Literal["board", "news"]

SHOWN = ("clear", "one", "two", "three", "four", "five", "six", "seven", "eight")
STRUCK, WON, LOST, OVER, INVALID = "mine", "win", "lose", "over", "invalid"


@dataclass(frozen=True, slots=True)
class Rewards:
    """What a turn earns; LaMer's numbers."""

    win: float = 10.0
    """Opening the last safe cell, in place of what it would earn otherwise."""
    cascade: float = 2.0
    """Opening more than one cell."""
    single: float = 0.5
    mine: float = -0.1
    invalid: float = -1.0


REWARDS = Rewards()


class MineSweeperPlay:
    """One episode. The anchor is the board as it is seen."""

    __slots__ = (
        *("_board", "_faces", "_is_done", "_names", "_turns_left", "_view"),
        *("chance", "chosen", "observation", "opened", "struck"),
    )

    def __init__(self, board: Board, opening: int, turns: int, view: View, chance: Chance) -> None:
        self._board, self._turns_left, self._view, self.chance = board, turns, view, chance
        self._names = cell_names(board.size)
        self._faces = list(self._names)
        self._is_done = False
        self.chosen: list[int] = []
        """Cells that the agent has opened, in order, a mine included."""
        self.opened = 0
        """The set of open cells."""
        self.struck: int | None = None
        """The cell with the mine that ended the episode."""
        self.observation = self._show(self._open(opening))

    @property
    def anchor(self) -> str:
        """What each cell shows: its name where it is closed."""
        return " ".join(self._faces)

    @property
    def size(self) -> int:
        """Cells in a row."""
        return self._board.size

    def shown(self, cell: int) -> int:
        """The number an open cell shows."""
        assert self.opened >> cell & 1, "the cell is closed"
        return self._board.shown[cell]

    def closed(self) -> list[int]:
        """Cells that may be opened."""
        every = (1 << len(self._faces)) - 1
        return [] if self._is_done else list(cells_of(every & ~self.opened))

    def legal_actions(self) -> Sequence[str]:
        """Names of the closed cells until the episode is over."""
        return [self._names[cell] for cell in self.closed()]

    def act(self, action: str) -> Outcome:
        """Open a cell; an invalid action opens none but uses up the turn."""
        assert not self._is_done, "the episode is done"
        self._turns_left -= 1
        if action not in self._names:
            return self._refuse()
        cell = self._names.index(action)
        if self.opened >> cell & 1:
            return self._refuse()
        self.chosen.append(cell)
        if self._board.shown[cell] == MINE:
            return self._strike(cell)
        fresh = self._open(cell)
        if self.opened == self._board.safe:
            return self._end(f"{self._show(fresh)} {WON}", REWARDS.win)
        reward = REWARDS.cascade if fresh & (fresh - 1) else REWARDS.single
        return self._go_on(self._show(fresh), reward, is_valid=True)

    def _open(self, cell: int) -> int:
        """Open a safe cell and what it opens; the set of those that were closed."""
        fresh = self._board.opens[cell] & ~self.opened
        self.opened |= fresh
        for each in cells_of(fresh):
            self._faces[each] = SHOWN[self._board.shown[each]]
        return fresh

    def _strike(self, cell: int) -> Outcome:
        self.struck = cell
        self._faces[cell] = STRUCK
        return self._end(f"{self._show(1 << cell)} {LOST}", REWARDS.mine)

    def _refuse(self) -> Outcome:
        said = INVALID if self._view == "news" else f"{INVALID} {self.anchor}"
        return self._go_on(said, REWARDS.invalid, is_valid=False)

    def _show(self, fresh: int) -> str:
        """The whole board, or what has changed: each cell's name and what it shows."""
        if self._view == "board":
            return self.anchor
        return " ".join(f"{self._names[cell]} {self._faces[cell]}" for cell in cells_of(fresh))

    def _go_on(self, said: str, reward: float, *, is_valid: bool) -> Outcome:
        if self._turns_left:
            return Outcome(said, reward, is_valid)
        self._is_done = True
        return Outcome(f"{said} {OVER}", reward, is_valid, True)

    def _end(self, said: str, reward: float) -> Outcome:
        self._is_done = True
        return Outcome(said, reward, True, True)
