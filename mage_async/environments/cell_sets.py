"""Sets of cells of a board as integers, a bit for each cell."""

from collections.abc import Iterable, Iterator


def cells_of(chosen: int) -> Iterator[int]:
    """The cells of a set, in order."""
    while chosen:
        lowest = chosen & -chosen
        yield lowest.bit_length() - 1
        chosen ^= lowest


def set_of(cells: Iterable[int]) -> int:
    """The set of some cells, all different."""
    return sum(1 << cell for cell in cells)
