"""Line charts as inline SVG: series with their intervals, references and labels."""

import math
from collections.abc import Sequence

from mage_async.report.charts.frame import Frame, Point, Series
from mage_async.report.charts.labels import labels, room
from mage_async.report.markup import Markup, join, tag
from mage_async.report.numbers import figure, ticks


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
    across, down = _span([x for x, _ in points], 0.0), _span([y for _, y in points], 0.06)
    frame = Frame(across, y_span or down, right=room(drawn))
    return tag(
        "svg",
        tag("title", described),
        _axes(frame, x_names),
        *(_band(each, frame) for each in drawn),
        *(_line(each, frame) for each in drawn),
        labels(drawn, frame),
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
    low, high = frame.y
    above = [(frame.across(x), frame.down(min(high, y + half))) for (x, y), half in pairs]
    below = [(frame.across(x), frame.down(max(low, y - half))) for (x, y), half in reversed(pairs)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*above, *below))
    return tag("polygon", points=path, cls=f"band {series.css}")
