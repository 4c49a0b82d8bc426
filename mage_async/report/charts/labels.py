"""Labels at the right of a chart: each at the end of its line, or as near as the others let it."""

from collections.abc import Sequence

from mage_async.report.charts.frame import Frame, Series
from mage_async.report.markup import Markup, join, tag
from mage_async.report.numbers import figure

LABEL_GAP = 14.0
MAX_CHARACTERS = 22
_CHARACTER = 6.7
"""Width of a character, about."""


def room(series: Sequence[Series]) -> float:
    """How wide the labels of some series are."""
    longest = max((len(_short(each.label)) for each in series), default=0)
    return 22 + _CHARACTER * (longest + 6)


def labels(series: Sequence[Series], frame: Frame) -> Markup:
    """Each labelled line's name and last value; what is cut off says itself on hovering."""
    labelled = [each for each in series if each.label]
    lasts = [each.finite()[-1] for each in labelled]
    ends = [(frame.across(x), frame.down(y)) for x, y in lasts]
    heights = spread([y for _, y in ends], LABEL_GAP, frame.top + 4, frame.height - frame.bottom)
    rows = zip(labelled, lasts, ends, heights, strict=True)
    return join(*(_label(each, y, end, at, frame) for each, (_, y), end, at in rows))


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


def _label(
    series: Series, value: float, end: tuple[float, float], at: float, frame: Frame
) -> Markup:
    edge, (x, y) = frame.width - frame.right, end
    text = tag(
        "text",
        tag("title", series.label),
        f"{_short(series.label)} ",
        tag("tspan", figure(round(value, 2)), cls="value"),
        x=edge + 15,
        y=at + 4,
        cls=f"label {series.css}",
    )
    leader = f"{x + 4:.1f},{y:.1f} {edge + 12:.1f},{at:.1f}"
    return join(tag("polyline", points=leader, cls="leader"), text)


def _short(label: str) -> str:
    return label if len(label) <= MAX_CHARACTERS else label[: MAX_CHARACTERS - 1].rstrip(" ,") + "…"
