"""Labels at the right of a chart: each at the end of its line, or as near as the others let it."""

from collections.abc import Sequence
from dataclasses import dataclass

from mage_async.report.charts.plot_area import PlotArea, Series

LABEL_GAP = 14.0
MAX_CHARACTERS = 22
_CHARACTER = 6.7
"""Width of a character, about."""


@dataclass(frozen=True, slots=True)
class LineLabel:
    """A line's name and last value; a name that is cut off is shown whole on hovering."""

    name: str
    short_name: str
    css: str
    value: float
    y: float
    leader: str
    """The path from the end of the line to the label."""


def room(series: Sequence[Series]) -> float:
    """How wide the labels of some series are."""
    longest = max((len(_short(each.label)) for each in series), default=0)
    return 22 + _CHARACTER * (longest + 6)


def line_labels(series: Sequence[Series], area: PlotArea) -> list[LineLabel]:
    """A label for each series that has a name."""
    labelled = [each for each in series if each.label]
    lasts = [each.finite[-1] for each in labelled]
    ends = [(area.across(x), area.down(y)) for x, y in lasts]
    heights = spread([y for _, y in ends], LABEL_GAP, area.top + 4, area.height - area.bottom)
    edge = area.width - area.right + 12
    return [
        LineLabel(
            name=each.label,
            short_name=_short(each.label),
            css=each.css,
            value=round(value, 2),
            y=height,
            leader=f"{x + 4:.1f},{y:.1f} {edge:.1f},{height:.1f}",
        )
        for each, (_, value), (x, y), height in zip(labelled, lasts, ends, heights, strict=True)
    ]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones, in the same order, at least `gap` apart, within bounds.

    Where there is no room for all, they still keep apart and reach over `high`.
    """
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    placed = list(wanted)
    floor = low
    for number in order:
        placed[number] = floor = max(wanted[number], floor)
        floor += gap
    ceiling = max(high, low + gap * (len(order) - 1))
    for number in reversed(order):
        placed[number] = ceiling = min(placed[number], ceiling)
        ceiling -= gap
    return placed


def _short(label: str) -> str:
    return label if len(label) <= MAX_CHARACTERS else label[: MAX_CHARACTERS - 1].rstrip(" ,") + "…"
