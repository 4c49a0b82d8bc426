"""Line charts as inline SVG: series with intervals, level references, and labels that keep apart.

Sizes are in units of the view box; the page scales the whole drawing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mage_async.report.markup import Markup, join, tag
from mage_async.report.numbers import figure, ticks

Point = tuple[float, float]
LABEL_GAP = 14.0


@dataclass(frozen=True, slots=True)
class Series:
    """A line. `css` gives its colour; points that are not finite are left out."""

    label: str
    points: Sequence[Point]
    css: str
    half_widths: Sequence[float] = ()
    """95 % half-widths of the points, drawn as a band; empty: none."""
    has_dots: bool = False

    def finite(self) -> list[Point]:
        """The points that can be drawn."""
        return [(x, y) for x, y in self.points if math.isfinite(x) and math.isfinite(y)]


@dataclass(frozen=True, slots=True)
class Frame:
    """Where the axes lie and what they span."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: float = 500.0
    height: float = 260.0
    left: float = 40.0
    right: float = 142.0
    top: float = 10.0
    bottom: float = 26.0

    def across(self, x: float) -> float:
        """Data to drawing, horizontally."""
        low, high = self.x
        inner = self.width - self.left - self.right
        return self.left + (x - low) / (high - low) * inner

    def down(self, y: float) -> float:
        """Data to drawing, vertically."""
        low, high = self.y
        inner = self.height - self.top - self.bottom
        return self.top + (high - y) / (high - low) * inner


def line_chart(
    series: Sequence[Series],
    *,
    described: str,
    x_names: Sequence[tuple[float, str]] = (),
    y_span: tuple[float, float] | None = None,
) -> Markup:
    """A chart of lines with their labels at the right.

    Args:
        described: what the chart says, for who cannot see it.
        x_names: ticks of the x axis by name; empty: round numbers.
        y_span: of the y axis; None: what the lines need.
    """
    drawn = [each for each in series if each.finite()]
    if not drawn:
        return tag("p", "nothing was recorded", cls="note")
    points = [point for each in drawn for point in each.finite()]
    frame = Frame(_span([x for x, _ in points], 0.0), y_span or _span([y for _, y in points], 0.06))
    return tag(
        "svg",
        tag("title", described),
        _axes(frame, x_names),
        *(_band(each, frame) for each in drawn),
        *(_line(each, frame) for each in drawn),
        _labels(drawn, frame),
        viewBox=f"0 0 {frame.width:g} {frame.height:g}",
        role="img",
    )


def small_chart(values: Sequence[Point], *, described: str, css: str = "accent") -> Markup:
    """One quantity without labels but its bounds: for many side by side."""
    points = Series("", values, css).finite()
    if not points:
        return tag("p", "nothing was recorded", cls="note")
    low, high = min(y for _, y in points), max(y for _, y in points)
    spans = _span([x for x, _ in points], 0.0), _span([low, high], 0.08)
    frame = Frame(*spans, width=240, height=84, left=44, right=4, top=6, bottom=6)
    bounds = [low] if math.isclose(low, high, rel_tol=1e-9) else [low, high]
    marks = [
        join(_rule(frame, y), tag("text", figure(y), x=38, y=frame.down(y) + 4, cls="tick end"))
        for y in bounds
    ]
    line = _line(Series("", points, css), frame)
    box = f"0 0 {frame.width:g} {frame.height:g}"
    return tag("svg", tag("title", described), *marks, line, viewBox=box, role="img")


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


def _span(values: Sequence[float], margin: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        return low - 0.5, high + 0.5
    return low - margin * (high - low), high + margin * (high - low)


def _axes(frame: Frame, x_names: Sequence[tuple[float, str]]) -> Markup:
    bottom = frame.height - 8
    named = x_names or [(x, figure(x)) for x in ticks(*frame.x, 5)]
    return join(
        *(
            join(
                _rule(frame, y),
                tag("text", figure(y), x=frame.left - 6, y=frame.down(y) + 4, cls="tick end"),
            )
            for y in ticks(*frame.y, 6)
        ),
        *(tag("text", text, x=frame.across(x), y=bottom, cls="tick middle") for x, text in named),
    )


def _rule(frame: Frame, y: float) -> Markup:
    at, end = frame.down(y), frame.width - frame.right
    return tag("line", x1=frame.left, x2=end, y1=at, y2=at, cls="zero" if y == 0 else "grid")


def _line(series: Series, frame: Frame) -> Markup:
    points = [(frame.across(x), frame.down(y)) for x, y in series.finite()]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = [
        tag(
            "circle", tag("title", _said(series, point)), cx=x, cy=y, r=3.0, cls=f"dot {series.css}"
        )
        for point, (x, y) in zip(series.finite(), points, strict=True)
        if series.has_dots or len(points) == 1
    ]
    return join(tag("polyline", points=path, cls=f"line {series.css}"), *dots)


def _said(series: Series, point: Point) -> str:
    return f"{series.label}: {figure(point[1])} at {figure(point[0])}"


def _band(series: Series, frame: Frame) -> Markup | None:
    if not series.half_widths:
        return None
    pairs = list(zip(series.points, series.half_widths, strict=True))
    above = [(frame.across(x), frame.down(y + half)) for (x, y), half in pairs]
    below = [(frame.across(x), frame.down(y - half)) for (x, y), half in reversed(pairs)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*above, *below))
    return tag("polygon", points=path, cls=f"band {series.css}")


def _labels(drawn: Sequence[Series], frame: Frame) -> Markup:
    """Each labelled line's name and last value, at its end or as near as the others let it."""
    labelled = [each for each in drawn if each.label]
    lasts = [each.finite()[-1] for each in labelled]
    ends = [(frame.across(x), frame.down(y)) for x, y in lasts]
    heights = spread([y for _, y in ends], LABEL_GAP, frame.top + 4, frame.height - frame.bottom)
    edge = frame.width - frame.right
    return join(
        *(
            join(
                tag("polyline", points=f"{x + 4:.1f},{y:.1f} {edge + 12},{at:.1f}", cls="leader"),
                tag(
                    "text",
                    f"{each.label} ",
                    tag("tspan", figure(round(value, 2)), cls="value"),
                    x=edge + 15,
                    y=at + 4,
                    cls=f"label {each.css}",
                ),
            )
            for each, (_, value), (x, y), at in zip(labelled, lasts, ends, heights, strict=True)
        )
    )
