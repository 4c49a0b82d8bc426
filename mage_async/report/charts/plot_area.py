"""What a chart is made of: series of points, and the area that turns data into drawing.

Sizes are in units of the view box; the page scales the whole drawing.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line. `css` gives its colour; points that are not finite are left out."""

    label: str
    points: Sequence[Point]
    css: str
    half_widths: Sequence[float] = ()
    """95 % half-widths of the points, drawn as a band; empty: none."""
    has_dots: bool = False

    @cached_property
    def finite(self) -> list[Point]:
        """The points that can be drawn; a chart asks several times."""
        return [(x, y) for x, y in self.points if math.isfinite(x) and math.isfinite(y)]

    def dots(self) -> list[Point]:
        """The points that are marked one by one; a single point is, since no line shows it."""
        return self.finite if self.has_dots or len(self.finite) == 1 else []


@dataclass(frozen=True, slots=True)
class PlotArea:
    """Where the axes lie and what they span."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: float = 500.0
    height: float = 260.0
    left: float = 40.0
    right: float = 120.0
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

    def path(self, points: Iterable[Point]) -> str:
        """Points as SVG writes them."""
        (first, last), (low, high) = self.x, self.y
        right = (self.width - self.left - self.right) / (last - first)
        down = (self.height - self.top - self.bottom) / (high - low)
        left, top = self.left, self.top
        drawn = [
            f"{left + (x - first) * right:.1f},{top + (high - y) * down:.1f}" for x, y in points
        ]
        return " ".join(drawn)

    def outline(self, series: Series) -> str:
        """The outline of a series' band, cut off where the axis ends."""
        low, high = self.y
        pairs = list(zip(series.points, series.half_widths, strict=True))
        above = [(x, min(high, y + half)) for (x, y), half in pairs]
        below = [(x, max(low, y - half)) for (x, y), half in reversed(pairs)]
        return self.path([*above, *below])
