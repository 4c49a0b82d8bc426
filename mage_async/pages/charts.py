"""Lay out charts as plain data that templates draw as SVG, and format numbers for people.

Charts are lines, histograms, and bars of shares. Coordinates are in units of the view box; the page
scales the whole drawing.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from operator import itemgetter

from mage_async.policy_version import OLDEST_AGE
from mage_async.trajectory import num_decimals

# Line charts, drawn by `templates/chart.svg`.

Point = tuple[float, float]
MAX_LABEL = 22
"""Number of characters to which a label is cut."""
MAX_DRAWN = 1000
"""Number of points of a line above which it is thinned."""


@dataclass(frozen=True)
class Series:
    """Hold a line of a chart. `css` is the class of its colour; points that are not finite are left
    out.
    """

    label: str
    points: Sequence[Point]
    css: str
    half_widths: Sequence[float] = ()
    """95 % half-widths of the points, drawn as a band; empty for no band."""
    has_dots: bool = False

    @cached_property
    def finite(self) -> list[Point]:
        """The points that are drawn. A long line is cut into short parts, of which only the lowest
        and the highest point are drawn, so that outliers remain; both ends are drawn too.
        """
        known = [(x, y) for x, y in self.points if math.isfinite(x) and math.isfinite(y)]
        if len(known) <= MAX_DRAWN:
            return known
        size = -(-2 * len(known) // MAX_DRAWN)  # rounded up
        parts = (known[start : start + size] for start in range(0, len(known), size))
        height = itemgetter(1)
        ends = (sorted((min(part, key=height), max(part, key=height))) for part in parts)
        return [known[0], *chain.from_iterable(ends), known[-1]]

    @property
    def short_label(self) -> str:
        """The label, cut if it is too long to stand next to the chart."""
        text = self.label
        return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1].rstrip(" ,") + "…"

    def dots(self) -> list[Point]:
        """Return the points to mark by dots. A single point is always marked: it has no line."""
        return self.finite if self.has_dots or len(self.finite) == 1 else []


@dataclass(frozen=True, slots=True)
class PlotArea:
    """Map data to coordinates, by the ranges of both axes, the size of the drawing, and its
    margins.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    width: float = 500.0
    height: float = 260.0
    left: float = 40.0
    right: float = 120.0
    top: float = 10.0
    bottom: float = 26.0

    def across(self, x: float) -> float:
        """Return the horizontal coordinate of a value."""
        low, high = self.x
        inner = self.width - self.left - self.right
        return self.left + (x - low) / (high - low) * inner

    def down(self, y: float) -> float:
        """Return the vertical coordinate of a value."""
        low, high = self.y
        inner = self.height - self.top - self.bottom
        return self.top + (high - y) / (high - low) * inner

    def path(self, points: Iterable[Point]) -> str:
        """Return points in the form of SVG's `points` attribute."""
        return " ".join(f"{self.across(x):.1f},{self.down(y):.1f}" for x, y in points)

    def outline(self, series: Series) -> str:
        """Return the outline of a series' band, clipped to the range of the y axis."""
        low, high = self.y
        pairs = list(zip(series.points, series.half_widths, strict=True))
        above = [(x, min(high, y + half)) for (x, y), half in pairs]
        below = [(x, max(low, y - half)) for (x, y), half in reversed(pairs)]
        return self.path([*above, *below])


@dataclass(frozen=True, slots=True)
class Chart:
    """Hold a line chart; ticks are values of the data."""

    alt_text: str
    """Content of the chart in words, for readers who cannot see it."""
    area: PlotArea
    series: Sequence[Series]
    y_ticks: Sequence[float]
    x_ticks: Sequence[tuple[float, str]] = ()
    labels: Sequence[tuple[Series, float]] = ()
    """Lines with a label, and the height of each label."""
    links: Sequence[tuple[float, float, str, str]] = ()
    """Parts of the x axis that can be clicked: left end, width, address and title."""

    def end_text(self, line: Series) -> str:
        """Return the last value of a labelled line, with as many decimals as those of the others
        have.
        """
        digits = num_decimals(other.finite[-1][1] for other, _ in self.labels) - 1
        return short_number(round(line.finite[-1][1], digits))

    def with_links(self, address: Callable[[int], str], steps: Sequence[int]) -> "Chart":
        """Return the chart with links: a click leads to the address of the nearest step.

        Args:
            steps: Positions of the links, ascending whole numbers.
        """
        ends = [self.area.across(step) for step in steps]
        left, right = self.area.left, self.area.width - self.area.right
        middles = [(one + other) / 2 for one, other in pairwise(ends)]
        edges = pairwise(min(max(edge, left), right) for edge in (left, *middles, right))
        links = [
            (start, stop - start, address(step), f"step {step}")
            for step, (start, stop) in zip(steps, edges, strict=True)
        ]
        return replace(self, links=links)


def line_chart(
    series: Sequence[Series],
    *,
    alt_text: str,
    x_names: Sequence[tuple[float, str]] = (),
    y_span: tuple[float, float] | None = None,
) -> Chart | None:
    """Lay out lines with their labels at the right; return `None` if no point can be drawn.

    Args:
        alt_text: Content of the chart in words, for readers who cannot see it.
        x_names: Named ticks of the x axis; empty for round numbers.
        y_span: Range of the y axis; None for `y_range` of the lines.
    """
    drawn = [line for line in series if line.finite]
    if not drawn:
        return None
    across = _span([x for line in drawn for x, _ in line.finite], 0.0)
    area = PlotArea(across, y_span or y_range(drawn), right=_label_width(drawn))
    # A chart of many lines, such as those of 20 episodes, is as high as its labels need.
    least = area.top + area.bottom + LABEL_GAP * sum(bool(line.label) for line in drawn)
    area = replace(area, height=max(area.height, least))
    # Among steps and versions, which are whole numbers, are no 1.5.
    is_whole = all(x % 1 == 0 for line in drawn for x, _ in line.finite)
    marks = [x for x in ticks(*area.x, 5) if not is_whole or x % 1 == 0]
    named = x_names or [(x, short_number(x)) for x in marks]
    return Chart(alt_text, area, drawn, ticks(*area.y, 6), named, _line_labels(drawn, area))


def y_range(series: Sequence[Series]) -> tuple[float, float]:
    """Return the range of the y axis that shows some lines and, as far as the lines keep a ninth of
    the height, their bands; from 0 to 1 if no point can be drawn.
    """
    ys = [y for line in series for _, y in line.finite] or [0.0, 1.0]
    ends = [
        end
        for line in series
        for (_, y), half in zip(line.points, line.half_widths, strict=False)
        for end in (y - half, y + half)
        if math.isfinite(end)
    ]
    low, high = min(ys), max(ys)
    room = 4 * (high - low) or math.inf  # a level line leaves its band all the height
    return _span([max(low - room, min([low, *ends])), min(high + room, max([high, *ends]))], 0.06)


def small_chart(values: Sequence[Point], *, alt_text: str) -> Chart | None:
    """Lay out one quantity as a small chart for a page of many: its only labels are its bounds."""
    series = Series("", values, "accent")
    points = series.finite
    if not points:
        return None
    low, high = min(y for _, y in points), max(y for _, y in points)
    spans = _span([x for x, _ in points], 0.0), _span([low, high], 0.08)
    area = PlotArea(*spans, width=240, height=84, left=44, right=4, top=6, bottom=6)
    bounds = [low] if math.isclose(low, high, rel_tol=1e-9) else [low, high]
    return Chart(alt_text, area, [series], bounds)


def _span(values: Sequence[float], margin: float) -> tuple[float, float]:
    """Return a range with some margin around the values."""
    low, high = min(values), max(values)
    if low == high:
        # 0.5 would be lost in the rounding of a large value.
        half = max(0.5, abs(low) * 1e-6)
        return low - half, high + half
    return low - margin * (high - low), high + margin * (high - low)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers within `low` and `high`."""
    step = _round_step(low, high, count)
    # 1e-9 makes up for rounding, as 0.999 in `_round_step` does: a bound that is a round number
    # gets a tick.
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # One digit more than that of the step's size: a step may be 2.5.
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, last + 1)]


def _round_step(low: float, high: float, count: int) -> float:
    """Return the distance of about `count` round numbers within `low` and `high`."""
    raw = (high - low) / max(1, count - 1)
    size = 10.0 ** math.floor(math.log10(raw))
    return next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)


# Labels stand at the right of a chart, each as near to the end of its line as the others allow.

LABEL_GAP = 14.0
"""Smallest vertical distance of two labels."""
CHARACTER_WIDTH = 6.7
"""Approximate width of a character of a label."""
VALUE_CHARACTERS = 6
"""Number of characters kept free for the value after a label."""


def _label_width(series: Sequence[Series]) -> float:
    """Return the width that the longest label needs."""
    longest = max((len(line.short_label) for line in series), default=0)
    # `templates/chart.svg` begins labels 15 units right of the plot; 7 more stay free at the edge.
    return 22 + CHARACTER_WIDTH * (longest + VALUE_CHARACTERS)


def _line_labels(series: Sequence[Series], area: PlotArea) -> list[tuple[Series, float]]:
    """Return the lines with a label, and the height of each label."""
    labelled = [line for line in series if line.label]
    ends = [area.down(line.finite[-1][1]) for line in labelled]
    heights = spread(ends, LABEL_GAP, area.top + 4, area.height - area.bottom)
    return list(zip(labelled, heights, strict=True))


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move positions so that they are at least `gap` apart, keep their order and stay in bounds.

    If not all fit between `low` and `high`, they keep the gap and the last ones exceed `high`.
    """
    order = sorted(range(len(positions)), key=lambda number: positions[number])
    placed = list(positions)
    floor = low
    for number in order:
        placed[number] = floor = max(positions[number], floor)
        floor += gap
    ceiling = max(high, low + gap * (len(order) - 1))
    for number in reversed(order):
        placed[number] = ceiling = min(placed[number], ceiling)
        ceiling -= gap
    return placed


# Histograms whose bins are links, drawn by `templates/histogram.svg`.

MAX_BINS = 24
"""Largest number of bins of a histogram."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Hold a bar of a histogram, and the address that it leads to."""

    height: float
    """Height relative to the highest bar, from 0 to 1."""
    title: str
    address: str
    is_chosen: bool
    label: str
    """Text below the bar; "" for most bars if there are many."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Hold bars of the number of values in each bin."""

    bins: Sequence[Bin]
    alt_text: str


@dataclass(frozen=True, slots=True)
class BinEdges:
    """Describe bins of equal width: [low, low + width), ...; the last bin includes its upper
    end.
    """

    low: float
    width: float
    count: int

    def bin_of(self, value: float) -> int:
        """Return the number of the bin of a value."""
        # 1e-9 makes up for rounding: a value at an edge belongs to the bin above it.
        return min(self.count - 1, max(0, math.floor((value - self.low) / self.width + 1e-9)))

    @property
    def are_whole_numbers(self) -> bool:
        """Whether each bin holds one whole number."""
        # `bin_edges` then begins bins halfway between two whole numbers.
        return self.width == 1.0 and self.low % 1 == 0.5

    def label(self, number: int) -> str:
        """Return the lower end of a bin, or its whole number."""
        middle = 0.5 if self.are_whole_numbers else 0.0
        return short_number(round(self.low + number * self.width + middle, 9))

    def title(self, number: int) -> str:
        """Return the range of a bin in words, or its whole number."""
        start = self.low + number * self.width
        if self.are_whole_numbers:
            return signed(start + 0.5, 0)
        return f"{short_number(round(start, 9))} to {short_number(round(start + self.width, 9))}"


def bin_edges(values: Sequence[float]) -> BinEdges:
    """Choose round edges; one bin for each value if the values are few whole numbers."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if all(value == int(value) for value in values) and high - low < MAX_BINS:
        return BinEdges(low - 0.5, 1.0, int(high - low) + 1)
    if low == high:
        return BinEdges(low - 0.5, 1.0, 1)
    width = _round_step(low, high, MAX_BINS - 2)
    # 1e-9 makes up for rounding: a lowest value at an edge begins the first bin.
    start = math.floor(low / width + 1e-9) * width
    return BinEdges(start, width, min(MAX_BINS, math.floor((high - start) / width + 1e-9) + 1))


def histogram(
    values: Sequence[float], chosen: int | None, address: Callable[[int | None], str], noun: str
) -> Histogram | None:
    """Lay out the histogram of some values; return `None` if there are none.

    Args:
        chosen: Number of the bin that the list is filtered by; None for none.
        address: Returns the address of the list filtered by a bin, or of the whole list for None.
        noun: Word for what is counted, for readers who cannot see the drawing.
    """
    if not values:
        return None
    edges = bin_edges(values)
    counts = Counter(map(edges.bin_of, values))
    # About ten labels fit below the bars.
    most, every = max(counts.values()), max(1, math.ceil(edges.count / 10))
    bins = [
        # A click on the chosen bin shows the whole list again.
        Bin(
            height=counts[number] / most,
            title=f"{edges.title(number)}: {counts[number]:,} of {len(values):,} trials",
            address=address(None if number == chosen else number),
            is_chosen=number == chosen,
            label=edges.label(number) if number % every == 0 else "",
        )
        for number in range(edges.count)
    ]
    return Histogram(bins, f"{noun} of {len(values):,} trials")


# Bars of shares: the time of each process, the fates of trials, the ages of tokens.

STATE_COLOURS = {
    "training": "work1",
    "engine": "work1",
    "trials": "work3",
    "environment": "work2",
    "publishing": "work3",
    "checkpoint": "work4",
    "log-prob check": "work5",
    "playing": "work1",
    "loading": "work4",
    "preparing": "work4",
    "journal sync": "work4",
    "view": "work3",
    "ending": "work5",
    "batch not full": "wait1",
    "no grant": "wait1",
    "no fresh weights": "wait2",
    "no version": "wait1",
    "peer gone": "wait2",
    "processes": "wait1",
    "process starting": "wait2",
    "back-off": "wait2",
}
"""CSS class of each known state of a process: `work…` for work; `wait…`, warm colours, for waiting.
Other states are grey. Bars keep this order of states, so that they can be compared."""
FATE_COLOURS = {"trained": "work1", "dropped": "bad", "in_flight": "wait2"}
"""CSS class of each fate of a trial."""


@dataclass(frozen=True, slots=True)
class BarPart:
    """Hold a part of a bar. Its title is shown on hovering: a narrow part has no room for text."""

    text: str
    title: str
    share: float
    css: str
    age: float | None = None
    """Age of tokens from 0, fresh, to 1, old, which decides the colour of such parts."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Hold a labelled bar; the shares of its parts sum to 1."""

    label: str
    parts: Sequence[BarPart]
    note: str = ""


def time_bars(seconds_by_process: Mapping[str, Mapping[str, float]]) -> list[Bar]:
    """Return a bar for each process: the share of its time in each state."""
    places = {state: place for place, state in enumerate(STATE_COLOURS)}

    def order(item: tuple[str, float]) -> tuple[float, float]:
        return places.get(item[0], math.inf), -item[1]

    return [
        Bar(
            process,
            _bar_parts(dict(sorted(seconds.items(), key=order)), STATE_COLOURS),
            duration(sum(seconds.values())),
        )
        for process, seconds in seconds_by_process.items()
    ]


def fate_bar(trials: Mapping[str, int]) -> Bar:
    """Return a bar of all granted trials: trained, dropped or in flight."""
    return Bar("", _bar_parts({name: trials[name] for name in FATE_COLOURS}, FATE_COLOURS))


def _bar_parts(sizes: Mapping[str, float], colours: Mapping[str, str]) -> list[BarPart]:
    """Return the parts of a bar; a part too narrow for its text has only the number, or none."""
    total = sum(sizes.values())
    parts = []
    for name, size in sizes.items():
        if size > 0:
            share, number = size / total, percent(size / total)
            title = f"{words(name)} {number}"
            # A title needs about 14 % of the bar's width, and a number 7 %.
            text = title if share >= 0.14 else number if share >= 0.07 else ""
            parts.append(BarPart(text, title, share, colours.get(name, "other")))
    return parts


def age_bar(label: str, shares: Mapping[int, float]) -> Bar:
    """Return a bar of the share of tokens of each age in steps."""
    parts = []
    for age, share in shares.items():
        # Older tokens are counted with those of `OLDEST_AGE`.
        is_oldest = age == OLDEST_AGE
        number = f"{age}+" if is_oldest else f"{age}"
        noun = "or more steps" if is_oldest else "step" if age == 1 else "steps"
        text = f"{number}: {percent(share)}" if share >= 0.14 else number if share >= 0.04 else ""
        title = f"{age} {noun}: {percent(share)}"
        parts.append(BarPart(text, title, share, "age", age / OLDEST_AGE))
    return Bar(label, parts)


# Formats of numbers and names for people: +0.75, 12.3k, 71 %, 1 min 36 s.

MINUS = "−"


def _not_finite(value: float) -> str:
    """Format a value that is infinite or NaN, such as the loss of an update that was skipped."""
    return "NaN" if math.isnan(value) else "∞" if value > 0 else f"{MINUS}∞"


def signed(value: float, digits: int | None = None) -> str:
    """Format a return: +0.75, −0.02, −12,000, and 0.00 without a sign.

    Args:
        digits: Number of decimals; None for as many as `num_decimals` has for single returns.
    """
    if not math.isfinite(value):
        return _not_finite(value)
    if digits is None:
        digits = num_decimals([value]) - 1
    text = f"{abs(value):,.{digits}f}"
    is_zero = round(value, digits) == 0
    return text if is_zero else ("+" if value > 0 else MINUS) + text


def arrows(returns: Sequence[float]) -> str:
    """Format the returns of a trial's episodes, all with the same digits: +0.10 → +0.75."""
    digits = num_decimals(returns) - 1
    return " → ".join(signed(value, digits) for value in returns)


def short_number(value: float) -> str:
    """Format a quantity with about three significant digits: 0.0123, 1.23, 1,234, 12.3k, 8.1e−7."""
    if not math.isfinite(value):
        return _not_finite(value)
    value += 0.0  # no -0, such as a small loss that was rounded before
    size = abs(value)
    # A bound is the least size that the smaller unit would round up to 10,000, 1000.0k or 1000.00M.
    if size >= 1e12:
        text = f"{value:.1e}".replace("e+", "e")
    elif size >= 999_995_000:
        text = f"{value / 1e9:.2f}G"
    elif size >= 999_950:
        text = f"{value / 1e6:.2f}M"
    elif size >= 9_999.5:
        text = f"{value / 1e3:.1f}k"
    elif size >= 100 or value == int(value):
        text = f"{value:,.0f}"
    elif size < 1e-3:
        text = f"{value:.1e}".replace("e-0", "e-")
    else:
        text = f"{value:.{2 - math.floor(math.log10(size))}f}".rstrip("0").rstrip(".")
    return text.replace("-", MINUS)


def percent(share: float) -> str:
    """Format a share: 71 %, and 0.4 % if it is small; < 0.1 % if it is not quite 0."""
    if not math.isfinite(share):
        return _not_finite(share)
    value = 100 * share
    tenths = round(value, 1)
    if value > 0 and tenths == 0:
        return "< 0.1 %"
    return f"{tenths:.1f} %" if 0 < tenths < 10 else f"{value:.0f} %"


def duration(seconds: float) -> str:
    """Format a time span: 9.3 s, 1 min 36 s, 2 h 05 min."""
    if seconds < 59.95:  # from here on one digit would be rounded to 60.0
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def ago(seconds: float) -> str:
    """Format the time since an event, roughly: 3 h ago."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return "just now"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: 1 step, 1,024 steps, no steps."""
    return f"{number:,} {noun}{'s' * (number != 1)}" if number else f"no {noun}s"


def words(name: str) -> str:
    """Return an identifier as words: `grad_norm` is grad norm, `trials_per_s` is trials/s."""
    return name.replace("_per_s", "/s").replace("_", " ")
