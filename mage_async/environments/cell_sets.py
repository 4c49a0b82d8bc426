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


def in_rows(said: str, size: int, refusal: str) -> str:
    """A board's words, row by row, in so many lines of so many words. The refusal that may stand
    before the board, and what follows the board, have lines of their own. What is shorter than a
    board stays as it is.
    """
    words = said.split()
    start = int(words[:1] == [refusal])
    end = start + size * size
    if len(words) < end:
        return said
    rows = [words[first : first + size] for first in range(start, end, size)]
    parts = (words[:start], *rows, words[end:])
    return "\n".join(" ".join(part) for part in parts if part)
