"""Boards: directions, names of rows and columns, sets of cells as integers, and boards as text."""

from collections.abc import Iterable, Iterator

Cell = tuple[int, int]
"""Row and column, from 0."""
DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
"""By name, what a step adds to row and column."""
ROWS = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "tau", "zeta", "kappa")
COLUMNS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def step(cell: Cell, direction: str) -> Cell:
    """Return the cell one step away."""
    down, right = DIRECTIONS[direction]
    return cell[0] + down, cell[1] + right


def cell_text(cell: Cell, separator: str = " ") -> str:
    """Return a cell's row and column in words, such as `beta three`."""
    return f"{ROWS[cell[0]]}{separator}{COLUMNS[cell[1]]}"


def cells_of(cells: int) -> Iterator[int]:
    """Iterate over the cells of a set, in increasing order; bit `i` of the integer stands for cell
    `i`.
    """
    while cells:
        lowest = cells & -cells
        yield lowest.bit_length() - 1
        cells ^= lowest


def set_of(cells: Iterable[int]) -> int:
    """Return the set of some distinct cells."""
    return sum(1 << cell for cell in cells)


def in_rows(observation: str, size: int, refusal: str) -> str:
    """Break the words of a board of `size` times `size` cells into lines, a row a line.

    The refusal that may precede the board, and the words that follow the board, get lines of their
    own. An observation with fewer words than a board has cells is returned unchanged.
    """
    words = observation.split()
    start = int(words[:1] == [refusal])
    end = start + size * size
    if len(words) < end:
        return observation
    rows = [words[first : first + size] for first in range(start, end, size)]
    parts = (words[:start], *rows, words[end:])
    return "\n".join(" ".join(part) for part in parts if part)
