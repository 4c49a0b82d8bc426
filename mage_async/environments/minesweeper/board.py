"""MineSweeper's boards: where the mines lie, what each cell shows, and what opening it opens.

Cells are numbers, row by row from 0; a set of them is an integer (`cell_sets`), so that a turn is a
few operations on integers.
"""

import itertools
import math
import random
from dataclasses import dataclass
from functools import cache
from string import ascii_lowercase

from mage_async.environments.cell_sets import cells_of, set_of

MINE = -1
"""What a cell with a mine shows; any other shows how many neighbours have one."""


@cache
def cell_names(size: int) -> tuple[str, ...]:
    """Two letters a cell: its row and its column, both from `a`."""
    letters = ascii_lowercase[:size]
    return tuple(row + column for row in letters for column in letters)


@cache
def neighbours(size: int) -> tuple[int, ...]:
    """The set of neighbours of each cell, up to eight."""

    def around(row: int, column: int) -> int:
        rows = range(max(0, row - 1), min(size, row + 2))
        columns = range(max(0, column - 1), min(size, column + 2))
        block = sum(1 << (r * size + c) for r in rows for c in columns)
        return block & ~(1 << (row * size + column))

    return tuple(around(row, column) for row in range(size) for column in range(size))


@dataclass(frozen=True, slots=True)
class Board:
    """Where the mines lie, and what follows from it."""

    size: int
    shown: tuple[int, ...]
    """What each cell shows: `MINE`, or the number of mines around it."""
    opens: tuple[int, ...]
    """The set that opening a cell opens: the cell, and all cells around each that shows 0."""
    safe: int
    """The set without a mine."""

    def openings(self) -> list[int]:
        """Cells an episode may begin with: safe, and not the whole game at once."""
        return [cell for cell in cells_of(self.safe) if self.opens[cell] != self.safe]

    def num_clicks(self) -> int:
        """Fewest cells that have to be opened by hand ("3BV"): a measure of difficulty."""
        clicks, opened = 0, 0
        for cell in sorted(cells_of(self.safe), key=lambda cell: self.shown[cell] != 0):
            clicks += not opened >> cell & 1
            opened |= self.opens[cell]
        return clicks


def board_of(size: int, mines: int) -> Board:
    """The board whose mines are a set."""
    around = neighbours(size)
    shown = tuple(
        MINE if mines >> cell & 1 else (around[cell] & mines).bit_count()
        for cell in range(size * size)
    )
    opens = [1 << cell for cell in range(size * size)]
    for cell, number in enumerate(shown):
        if number == 0:
            opens[cell] = _cascade(shown, around, cell)
    return Board(size, shown, tuple(opens), (1 << size * size) - 1 & ~mines)


def _cascade(shown: tuple[int, ...], around: tuple[int, ...], start: int) -> int:
    opened, waiting = 1 << start, [start]
    while waiting:
        fresh = around[waiting.pop()] & ~opened
        opened |= fresh
        waiting += [cell for cell in cells_of(fresh) if shown[cell] == 0]
    return opened


def layouts(size: int, num_mines: int, most: int) -> list[int]:
    """Sets of mines in an order that looks random: all there are, or `most` of them."""
    source = random.Random(f"minesweeper/{size}/{num_mines}")
    cells = range(size * size)
    if math.comb(len(cells), num_mines) <= most:
        every = [set_of(chosen) for chosen in itertools.combinations(cells, num_mines)]
        source.shuffle(every)
        return every
    drawn: dict[int, None] = {}
    while len(drawn) < most:
        drawn[set_of(source.sample(cells, num_mines))] = None
    return list(drawn)
