"""A table of a page as plain data, which `templates/parts.html` lays out."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableCell:
    """A number, and in small what stands beside it."""

    text: str
    beside: str = ""
    shade: float | None = None
    """The colour, from -1, red, to 1, green; None: none."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """A label and the numbers beside it; `css` is a class of the row."""

    label: str
    cells: Sequence[TableCell]
    css: str = ""
    is_bold: bool = False


@dataclass(frozen=True, slots=True)
class PageTable:
    """Names of the columns, the label's among them, and the rows."""

    heads: Sequence[str]
    rows: Sequence[TableRow]
