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


def in_rows(said: str, size: int) -> str:
    """A board's words, row by row, in so many lines of so many words; what follows the board comes
    in a line of its own. What is shorter than a board stays as it is.
    """
    words = said.split()
    if len(words) < size * size:
        return said
    rows = [words[start : start + size] for start in range(0, size * size, size)]
    return "\n".join(" ".join(row) for row in (*rows, words[size * size :])).rstrip()
