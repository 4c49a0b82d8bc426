"""Line charts: series with their intervals, references and labels, and where each is drawn."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mage_async.report.charts.line_labels import LineLabel, line_labels, room
from mage_async.report.charts.number_format import figure, ticks
from mage_async.report.charts.plot_area import PlotArea, Point, Series


@dataclass(frozen=True, slots=True)
class Place:
    """A stretch of the x axis that leads somewhere when it is clicked."""

    left: float
    width: float
    """Both in units of the drawing."""
    address: str
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """What `templates/chart.svg` draws; ticks are values of the data."""

    described: str
    area: PlotArea
    series: Sequence[Series]
    y_ticks: Sequence[float]
    x_ticks: Sequence[tuple[float, str]] = ()
    labels: Sequence[LineLabel] = ()
    places: Sequence[Place] = ()

    def leading(self, address: Callable[[int], str], said: str, xs: Sequence[int]) -> "Chart":
        """The same, where a click near one of some whole `xs`, in order, leads to its address."""
        ends = [self.area.across(x) for x in xs]
        left, right = self.area.left, self.area.width - self.area.right
        middles = [(one + other) / 2 for one, other in pairwise(ends)]
        edges = [min(max(edge, left), right) for edge in (left, *middles, right)]
        places = [
            Place(start, stop - start, address(x), f"{said} {x}")
            for x, (start, stop) in zip(xs, pairwise(edges), strict=True)
        ]
        return replace(self, places=places)


def line_chart(
    series: Sequence[Series],
    *,
    described: str,
    x_names: Sequence[tuple[float, str]] = (),
    y_span: tuple[float, float] | None = None,
) -> Chart | None:
    """A chart of lines with their labels at the right; None where nothing was recorded.

    Args:
        described: what the chart says, for readers who cannot see it.
        x_names: ticks of the x axis by name; empty: round numbers.
        y_span: of the y axis; None: what the lines need.
    """
    drawn = [each for each in series if each.finite]
    if not drawn:
        return None
    points = [point for each in drawn for point in each.finite]
    across, down = _span([x for x, _ in points], 0.0), _span([y for _, y in points], 0.06)
    area = PlotArea(across, y_span or down, right=room(drawn))
    named = x_names or [(x, figure(x)) for x in ticks(*area.x, 5)]
    return Chart(described, area, drawn, ticks(*area.y, 6), named, line_labels(drawn, area))


def small_chart(values: Sequence[Point], *, described: str, css: str = "accent") -> Chart | None:
    """One quantity without labels but its bounds: for many side by side."""
    series = Series("", values, css)
    points = series.finite
    if not points:
        return None
    low, high = min(y for _, y in points), max(y for _, y in points)
    spans = _span([x for x, _ in points], 0.0), _span([low, high], 0.08)
    area = PlotArea(*spans, width=240, height=84, left=44, right=4, top=6, bottom=6)
    bounds = [low] if math.isclose(low, high, rel_tol=1e-9) else [low, high]
    return Chart(described, area, [series], bounds)


def _span(values: Sequence[float], margin: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        return low - 0.5, high + 0.5
    return low - margin * (high - low), high + margin * (high - low)
