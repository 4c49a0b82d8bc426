"""A histogram of rewards whose bins are links: each narrows the list of trials to itself."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mage_async.report.charts.number_format import figure, signed, ticks

WIDTH, HEIGHT, BOTTOM = 500.0, 130.0, 18.0
MOST_BINS = 24


@dataclass(frozen=True, slots=True)
class Bin:
    """A bar: trials whose reward lies in [low, high), the last bin's upper end included."""

    x: float
    y: float
    width: float
    height: float
    title: str
    address: str
    is_chosen: bool
    label: str
    """Below the bar; empty where there is no room."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """What `templates/histogram.svg` draws."""

    bins: Sequence[Bin]
    described: str
    width: float = WIDTH
    height: float = HEIGHT


@dataclass(frozen=True, slots=True)
class Edges:
    """Bins of equal width."""

    low: float
    width: float
    count: int

    def place(self, value: float) -> int:
        """The bin of a value."""
        return min(self.count - 1, max(0, math.floor((value - self.low) / self.width + 1e-9)))


def edges_of(values: Sequence[float]) -> Edges:
    """Round edges; a bin a value where the values are few whole numbers."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    is_whole = all(value == int(value) for value in values) and high - low < MOST_BINS
    if is_whole:
        return Edges(low - 0.5, 1.0, int(high - low) + 1)
    if low == high:
        return Edges(low - 0.5, 1.0, 1)
    marks = ticks(low, high, MOST_BINS - 2)
    width = marks[1] - marks[0] if len(marks) > 1 else high - low
    start = math.floor(low / width) * width
    return Edges(start, width, min(MOST_BINS + 8, math.floor((high - start) / width + 1e-9) + 1))


def histogram(
    values: Sequence[float], chosen: int | None, address: Callable[[int | None], str], said: str
) -> Histogram | None:
    """Bars of some values; None where there are none.

    Args:
        chosen: the bin that the list is narrowed to.
        address: of the list narrowed to a bin; None: to none, where the chosen one leads.
        said: what is counted, for those who cannot see it.
    """
    if not values:
        return None
    edges = edges_of(values)
    counts = Counter(map(edges.place, values))
    inner, most = WIDTH / edges.count, max(counts.values())
    every = max(1, math.ceil(edges.count / 10))
    bins = []
    for number in range(edges.count):
        count = counts[number]
        height = (HEIGHT - BOTTOM - 14) * count / most
        bins.append(
            Bin(
                x=number * inner + 1,
                y=HEIGHT - BOTTOM - height,
                width=inner - 2,
                height=height,
                title=f"{_range(edges, number)}: {count:,} of {len(values):,} trials",
                address=address(None if number == chosen else number),
                is_chosen=number == chosen,
                label=_label(edges, number) if number % every == 0 else "",
            )
        )
    return Histogram(bins, f"{said} of {len(values):,} trials")


def _label(edges: Edges, number: int) -> str:
    is_whole = edges.width == 1.0 and edges.low % 1 == 0.5
    return figure(round(edges.low + number * edges.width + (0.5 if is_whole else 0.0), 9))


def _range(edges: Edges, number: int) -> str:
    if edges.width == 1.0 and edges.low % 1 == 0.5:
        return signed(edges.low + number + 0.5, 0)
    start = edges.low + number * edges.width
    return f"{figure(round(start, 9))} to {figure(round(start + edges.width, 9))}"
