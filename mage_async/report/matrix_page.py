"""A matrix of runs as one page: what was reached, how, and what was done to staleness."""

import math
from collections.abc import Callable, Mapping, Sequence

from mage_async.report.charts.line_chart import Chart, line_chart
from mage_async.report.charts.number_format import figure, signed, words
from mage_async.report.charts.plot_area import Series
from mage_async.report.charts.stacked_bars import Bar, age_bar
from mage_async.report.page_table import PageTable, TableCell, TableRow
from mage_async.report.templating import fill
from mage_async.results.intervals import interval
from mage_async.results.matrices.ablation import Compared, Finished, bounds_that_did_not_act
from mage_async.results.matrices.matrix import STALENESS, Subject
from mage_async.results.matrices.means import (
    Runs,
    by_flow,
    by_method,
    by_setting,
    mean_shares,
    smooth,
    values,
)

NUM_COLOURS = 9
RETURN = "heldout_last_return"
REACHED = (
    RETURN,
    "train_last_return",
    "trials_per_s",
    "wall_s",
    "processor_s",
    "staleness_mean",
    "staleness_max",
)
TREATED = (
    "over_bound_share",
    "over_bound_share_episode_1",
    "masked_share",
    "masked_share_episode_1",
    "clipped_share",
    "effective_share",
    "k3_mean",
)
FATES = ("dropped_share", "wasted_share", "length_bias")
Figure = tuple[str, Chart | None]
"""A caption and its chart."""


def render_matrix(
    finished: Sequence[Finished], *, num_cells: int, title: str, subject: Subject = STALENESS
) -> str:
    """One self-contained HTML page.

    Args:
        finished: the runs that are done, at least one.
        num_cells: of the whole matrix.
        title: what was varied, and in which configuration.
        subject: what the matrix is about.
    """
    runs = by_setting(finished)
    by_label = {setting.label(): same for setting, same in runs.items()}
    seeds = ", ".join(map(str, sorted({each.cell.seed for each in finished})))
    return fill(
        "matrix.html",
        title=f"{subject.heading} · mage",
        heading=subject.heading,
        matrix=f"{title} · {len(finished)} of {num_cells} runs, seeds {seeds}",
        bounds=bounds_that_did_not_act(finished),
        returns=_returns(runs, subject),
        curves=_curves(runs),
        ages=_ages(runs),
        fates=_table(by_flow(runs), FATES),
        reached=_table(by_label, REACHED),
        treated=_table(by_label, TREATED),
    )


def _returns(runs: Runs, subject: Subject) -> list[Figure]:
    intended = _against(runs, lambda setting, _: float(setting.place()))
    figures = [_figure(f"held-out return of the last episode against {subject.axis}", intended)]
    if subject.is_about_age:
        measured = _against(runs, lambda _, same: interval(values(same, "staleness_mean"))[0])
        said = "the same against the mean staleness that was measured, steps"
        figures.append(_figure(said, measured))
    return figures


def _against(runs: Runs, place: Callable[[Compared, Sequence[Finished]], float]) -> list[Series]:
    """A line a method, and a stroke an interval."""
    series = []
    for number, (label, settings) in enumerate(by_method(runs).items()):
        rows = sorted(
            (place(setting, runs[setting]), *interval(values(runs[setting], RETURN)))
            for setting in settings
        )
        for x, y, half in rows:
            if math.isfinite(half):
                series.append(Series("", [(x, y - half), (x, y + half)], f"thin {_colour(number)}"))
        points = [(x, y) for x, y, _ in rows]
        series.append(Series(label, points, _colour(number), has_dots=True))
    return series


def _curves(runs: Runs) -> list[Figure]:
    """For each method, a line a setting: against trials, and against time."""
    figures, ends = [], list[float]()
    for label, settings in by_method(runs).items():
        for axis, column, scale in (("thousand trials", 0, 1e-3), ("seconds of training", 1, 1.0)):
            series = []
            for number, setting in enumerate(sorted(settings, key=_place)):
                points = smooth(runs[setting], lambda point, c=column, s=scale: point[c] * s)
                halves = [0.0 if math.isnan(half) else half for _, _, half in points]
                line = [(x, y) for x, y, _ in points]
                pairs = zip(line, halves, strict=True)
                ends += [y + sign * half for (_, y), half in pairs for sign in (-1, 1)]
                series.append(
                    Series(setting.place_name(), line, _shade(number, len(settings)), halves)
                )
            figures.append((f"{label or 'all'}, against {axis}", series))
    low = min(ends, default=0.0)
    span = low, max([low + 0.1, *ends])
    return [_figure(*each, span) for each in figures]


def _place(setting: Compared) -> float:
    return setting.place()


def _ages(runs: Runs) -> list[Bar]:
    """A bar an episode of every flow, over seeds."""
    bars = []
    for name, same in by_flow(runs).items():
        for number in range(max(len(run.ages) for run in same)):
            if shares := mean_shares([run.ages[number] for run in same]):
                bars.append(age_bar(f"episode {number}" if number else name, shares))
    return bars


def _table(groups: Mapping[str, Sequence[Finished]], names: Sequence[str]) -> PageTable:
    rows = []
    for label, same in groups.items():
        cells = [_cell(name, values(same, name)) for name in names]
        rows.append(TableRow(label, [TableCell(str(len(same))), *cells]))
    return PageTable([words(name) for name in ("", "runs", *names)], rows)


def _cell(name: str, found: Sequence[float]) -> TableCell:
    known = [value for value in found if math.isfinite(value)]
    if not known:
        return TableCell("–")
    mean, half = interval(known)
    is_sure = math.isnan(half) or half <= 1e-6 * abs(mean)
    text = signed(mean, 3) if name.endswith("return") else figure(mean)
    return TableCell(text, "" if is_sure else f"± {figure(half)}")


def _figure(
    caption: str, series: Sequence[Series], span: tuple[float, float] | None = None
) -> Figure:
    return caption, line_chart(series, described=caption, y_span=span)


def _colour(number: int) -> str:
    return f"s{number % NUM_COLOURS}"


def _shade(number: int, count: int) -> str:
    return f"e{round(4 * number / (count - 1)) if count > 1 else 4}"
