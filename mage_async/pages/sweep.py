"""Make the page of a matrix of runs (`mage ablate`, `mage sweep`): returns, learning curves, and
the ages of the trained tokens.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from mage_async.pages.charts import (
    Bar,
    Chart,
    Series,
    age_bar,
    counted,
    line_chart,
    short_number,
    signed,
    words,
)
from mage_async.pages.curves import episode_css
from mage_async.pages.tables import Table, TableCell, TableRow
from mage_async.pages.templating import fill
from mage_async.results.intervals import interval, paired
from mage_async.results.run_files import alike_and_different
from mage_async.results.sweep import (
    STALENESS,
    FinishedRun,
    Setting,
    Subject,
    best_note,
    by_setting,
    number_of,
    unreached_bounds_sentence,
)
from mage_async.trajectory import num_decimals

NUM_COLOURS = 9
"""Number of CSS classes of lines, `s0` to `s8`; further lines repeat them."""
POINTS = 15
"""Number of points of a smoothed learning curve."""
RunsBySetting = Mapping[Setting, Sequence[FinishedRun]]
RETURN = "heldout_last_return"
"""Name of the result that charts show: the held-out return of the last episode."""
RESULT_COLUMNS = (
    *(RETURN, "train_last_return", "sampled_tokens"),
    *("trials_per_s", "wall_s", "processor_s", "staleness_mean", "staleness_max"),
)
"""Columns of the table of returns and costs, by setting."""
CORRECTION_COLUMNS = (
    *("over_bound_share", "over_bound_share_episode_1", "masked_share", "masked_share_episode_1"),
    *("clipped_share", "effective_share", "k3_mean"),
)
"""Columns of the table that shows how far off-policy tokens were, and how the correction treated
them.
"""
UNTRAINED_COLUMNS = ("dropped_share", "wasted_share", "long_over_short")
"""Columns of the table of trials that were played and not trained."""
CaptionedChart = tuple[str, Chart | None]


def render_matrix(
    finished: Sequence[FinishedRun], *, num_cells: int, title: str, subject: Subject = STALENESS
) -> str:
    """Return the page of a matrix as HTML that needs no other file.

    Args:
        finished: Finished runs, at least one, in the order of the command: the setting of the
            first one is the control of the others.
        num_cells: Number of cells of the whole matrix.
        title: Configuration, method and varied keys, in words.
        subject: Subject of the comparison; it has the heading and the name of the x axis.
    """
    runs = by_setting(finished)
    by_label = {setting.label: same for setting, same in runs.items()}
    seeds = ", ".join(map(str, sorted({run.cell.seed for run in finished})))
    base = finished[0].cell.setting
    alike, different = alike_and_different([run.made_with for run in finished])
    return fill(
        "sweep.html",
        title=f"{subject.heading} · mage",
        heading=subject.heading,
        matrix=f"{title} · {len(finished)} of {num_cells} runs, seeds {seeds}",
        bounds=unreached_bounds_sentence(finished),
        units="; ".join(dict.fromkeys(_unit(run) for run in finished if run.environment)),
        alike=alike,
        different=different,
        # The ablation of staleness chooses no setting.
        note="" if subject.is_about_staleness else best_note(len(runs)),
        returns=_return_charts(runs, subject),
        curves=_learning_curves(runs),
        ages=_age_bars(runs),
        untrained=_mean_table(_by_age_group(runs), UNTRAINED_COLUMNS),
        results=_mean_table(by_label, RESULT_COLUMNS),
        base=base,
        differences=_difference_table(runs, base),
        corrections=_mean_table(by_label, CORRECTION_COLUMNS),
    )


def _unit(run: FinishedRun) -> str:
    """Return the number of units of an episode, and the bounds of a unit's return, in words."""
    environment = run.environment
    units, least, most = (environment[name] for name in ("units", "min_return", "max_return"))
    bounds = "without bounds" if least is None else f"from {least / units:g} to {most / units:g}"
    return f"{environment['name']}: {counted(units, 'unit')} an episode, each {bounds}"


def _return_charts(runs: RunsBySetting, subject: Subject) -> list[CaptionedChart]:
    """Return charts of returns against the varied key and, if ages are compared, against
    staleness.
    """
    intended = _method_lines(runs, lambda setting, _: float(setting.place))
    caption = f"held-out return of the last episode against {subject.axis}"
    names = sorted({(setting.place, setting.place_name) for setting in runs})
    # Values that are no numbers are drawn at their index, so the axis shows their names.
    are_words = not subject.is_about_staleness and any(number_of(name) is None for _, name in names)
    charts = [_chart(caption, intended, x_names=names if are_words else ())]
    if subject.is_about_staleness:
        measured = _method_lines(runs, lambda _, same: fmean(_values(same, "staleness_mean")))
        caption = "the same against the mean staleness that was measured, steps"
        charts.append(_chart(caption, measured))
    return charts


def _method_lines(
    runs: RunsBySetting, x_of: Callable[[Setting, Sequence[FinishedRun]], float]
) -> list[Series]:
    """Return a line for each method, and an upright error bar for the interval of each point."""
    series = []
    for number, (label, settings) in enumerate(_by_method(runs).items()):
        colour = f"s{number % NUM_COLOURS}"
        rows = sorted(
            (x_of(setting, runs[setting]), *interval(_values(runs[setting], RETURN)))
            for setting in settings
        )
        for x, y, half in rows:
            if math.isfinite(half):
                series.append(Series("", [(x, y - half), (x, y + half)], f"thin {colour}"))
        series.append(Series(label, [(x, y) for x, y, _ in rows], colour, has_dots=True))
    return series


def _learning_curves(runs: RunsBySetting) -> list[CaptionedChart]:
    """Return two charts for each method, against trials and time, with a line for each setting."""
    lines = []  # the caption of each chart with its lines
    ends = list[float]()  # both ends of all bands
    for label, settings in _by_method(runs).items():
        for axis, column, scale in (("thousand trials", 0, 1e-3), ("seconds of training", 1, 1.0)):
            series = []
            for number, setting in enumerate(sorted(settings, key=lambda each: each.place)):
                points = _smooth(runs[setting], column)
                # A single run has no interval: its band has no width.
                halves = [0.0 if math.isnan(half) else half for _, _, half in points]
                line = [(x * scale, y) for x, y, _ in points]
                pairs = zip(line, halves, strict=True)
                ends += [y + sign * half for (_, y), half in pairs for sign in (-1, 1)]
                css = episode_css(number, len(settings))
                series.append(Series(setting.place_name, line, css, halves))
            lines.append((f"{label or 'all'}, against {axis}", series))
    low = min(ends, default=0.0)
    span = low, max([low + 0.1, *ends])  # all charts have one scale
    return [_chart(caption, series, span) for caption, series in lines]


def _age_bars(runs: RunsBySetting) -> list[Bar]:
    """Return bars of the ages of tokens, for all tokens and for each episode.

    Settings whose tokens have the same ages (`Setting.age_group`) share their bars.
    """
    bars = []
    for name, same in _by_age_group(runs).items():
        # `ages[0]` is of all tokens, `ages[k]` of those of episode k; runs of a setting have the
        # same episodes.
        for number in range(len(same[0].ages)):
            if shares := _mean_shares([run.ages[number] for run in same]):
                bars.append(age_bar(f"episode {number}" if number else name, shares))
    return bars


def _mean_table(groups: Mapping[str, Sequence[FinishedRun]], names: Sequence[str]) -> Table:
    """Return a table with a row for each group of runs, and their mean of each named result."""
    rows = []
    for label, same in groups.items():
        cells = [_mean_cell(name, _values(same, name)) for name in names]
        rows.append(TableRow(label, [TableCell(str(len(same))), *cells]))
    return Table([words(name) for name in ("", "runs", *names)], rows)


def _difference_table(runs: RunsBySetting, base: Setting) -> Table | None:
    """Return the table of differences of the last episode's return to the control, seed by seed:
    runs of one seed share their warm start and tasks. None: there is one setting alone.

    Where corrections are compared, the table also has the difference to the control's correction at
    the same ages, because the difference to the control itself may come from age and correction
    together.
    """
    returns = {
        setting: {run.cell.seed: run.figures[RETURN] for run in same}
        for setting, same in runs.items()
    }
    # Under "unbounded" several settings of `age_mask` have the same ages. If `base` is one of them,
    # it is their control, because the last entry of an age group counts.
    controls = {
        setting.age_group: setting
        for setting in (*runs, base)
        if setting.correction == base.correction
    }
    has_corrections = any(controls.get(each.age_group, each) != each for each in runs)

    def cells(setting: Setting, control: Setting | None) -> list[TableCell]:
        """Return the number of pairs of a setting and a control, and their mean difference."""
        if control is None or control == setting:
            return [TableCell("–"), TableCell("–")]
        gaps = paired(returns[setting], returns[control])
        return [TableCell(str(len(gaps))), _mean_cell(RETURN, gaps)]

    rows = []
    for setting in runs:
        same_age = cells(setting, controls.get(setting.age_group)) if has_corrections else []
        if setting != base:
            rows.append(TableRow(setting.label, [*cells(setting, base), *same_age]))
    more = ["seeds", f"minus {base.correction} at the same ages"] if has_corrections else []
    return Table(["", "seeds", "difference", *more], rows) if rows else None


def _mean_cell(name: str, by_run: Sequence[float]) -> TableCell:
    """Return the mean of a result over runs, with its 95 % half-width if it varies. Returns that
    are equal, perhaps by chance, have "± ?".
    """
    known = [value for value in by_run if math.isfinite(value)]
    if not known:
        return TableCell("–")
    mean, half = interval(known)
    is_exact = math.isnan(half) or half <= 1e-6 * abs(mean)
    is_return = name.endswith("return")
    text = signed(mean, num_decimals((mean, half))) if is_return else short_number(mean)
    if is_return and half == 0:
        return TableCell(text, "± ?")
    return TableCell(text, "" if is_exact else f"± {short_number(half)}")


def _chart(
    caption: str,
    series: Sequence[Series],
    span: tuple[float, float] | None = None,
    x_names: Sequence[tuple[float, str]] = (),
) -> CaptionedChart:
    """Return a caption, and the chart of some lines."""
    return caption, line_chart(series, alt_text=caption, y_span=span, x_names=x_names)


def _by_age_group(runs: RunsBySetting) -> dict[str, list[FinishedRun]]:
    """Group runs whose tokens have the same ages, by `Setting.age_group`."""
    found = defaultdict[str, list[FinishedRun]](list)
    for setting, same in runs.items():
        found[setting.age_group] += same
    return found


def _by_method(runs: RunsBySetting) -> dict[str, list[Setting]]:
    """Group the settings that a chart joins by one line, by `Setting.method`."""
    found = defaultdict[str, list[Setting]](list)
    for setting in runs:
        found[setting.method].append(setting)
    return found


def _values(runs: Sequence[FinishedRun], name: str) -> list[float]:
    """Return one of the `figures` of each run."""
    return [run.figures[name] for run in runs]


def _smooth(runs: Sequence[FinishedRun], column: int) -> list[tuple[float, float, float]]:
    """Return a learning curve of at most `POINTS` points, each a mean over neighbouring steps.

    Args:
        column: What x is, by its place in `FinishedRun.curve`: 0 for the number of trials, 1 for
            the seconds of training.

    Returns:
        Tuples of x, mean return over the runs, and the 95 % half-width of that mean.
    """
    length = min(len(run.curve) for run in runs)
    size = max(1, math.ceil(length / POINTS))
    points = []
    for start in range(0, length, size):
        parts = [run.curve[start : start + size] for run in runs]
        means = [sum(point[2] for point in part) / len(part) for part in parts]
        x = sum(part[-1][column] for part in parts) / len(parts)
        points.append((x, *interval(means)))
    return points


def _mean_shares(parts: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the mean share of each age, over the runs that recorded any."""
    known = [part for part in parts if part]
    ages = sorted({age for part in known for age in part})
    return {age: sum(part.get(age, 0.0) for part in known) / len(known) for age in ages}
