"""A matrix of runs as one page: what staleness did to learning, and what was done to staleness."""

import math
from collections.abc import Callable, Mapping, Sequence

from mage_async.report.charts.frame import Series
from mage_async.report.charts.line_chart import line_chart
from mage_async.report.document import document, section
from mage_async.report.markup import Markup, join, tag
from mage_async.report.numbers import figure, percent, signed, words
from mage_async.results.ablation import Finished, Setting, bounds_that_did_not_act
from mage_async.results.intervals import interval

NUM_COLOURS = 9
POINTS = 15
"""Points of a learning curve; each is a mean over as many batches as that takes."""
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
Runs = Mapping[Setting, Sequence[Finished]]


def render_ablation(finished: Sequence[Finished], *, num_cells: int, title: str) -> str:
    """One self-contained HTML page.

    Args:
        finished: the runs that are done, at least one.
        num_cells: of the whole matrix.
        title: what was varied, and in which configuration.
    """
    runs = by_setting(finished)
    seeds = sorted({each.cell.seed for each in finished})
    said = f"{len(finished)} of {num_cells} runs, seeds {', '.join(map(str, seeds))}"
    note = (
        "Means over seeds with 95 % intervals (Student's t). Returns are of the last episode, per "
        "unit of the environment. Staleness is in steps and weighted by tokens."
    )
    return document(
        "What staleness costs · mage",
        tag("h1", "What staleness costs", tag("small", f"{title} · {said}")),
        tag("p", f"{note} {bounds_that_did_not_act(finished)}", cls="note"),
        section("Final return", _returns(runs)),
        section("While training", _curves(runs)),
        section("How old the trained tokens were", _ages(runs)),
        section("Work thrown away, and long trials", _fates(runs)),
        section("What was reached", _table(runs, REACHED)),
        section("What was done to tokens", _table(runs, TREATED)),
    )


def by_setting(finished: Sequence[Finished]) -> dict[Setting, list[Finished]]:
    """Runs that differ in their seed only."""
    found: dict[Setting, list[Finished]] = {}
    for each in sorted(finished, key=lambda one: (one.cell.setting, one.cell.seed)):
        found.setdefault(each.cell.setting, []).append(each)
    return found


def values(runs: Sequence[Finished], name: str) -> list[float]:
    """A figure of each run."""
    return [run.figures[name] for run in runs]


def lines(runs: Runs) -> dict[str, list[Setting]]:
    """What is joined by a line: settings that differ in their bound and lag only."""
    found: dict[str, list[Setting]] = {}
    for setting in runs:
        found.setdefault(f"{setting.rule}, {setting.correction}", []).append(setting)
    return found


def smooth(
    runs: Sequence[Finished], x_of: Callable[[tuple[int, float, float]], float]
) -> list[tuple[float, float, float]]:
    """A learning curve: x, mean over seeds of the return around it, and its half-width."""
    length = min(len(run.curve) for run in runs)
    size = max(1, math.ceil(length / POINTS))
    points = []
    for start in range(0, length, size):
        parts = [run.curve[start : start + size] for run in runs]
        means = [sum(point[2] for point in part) / len(part) for part in parts]
        x = sum(x_of(part[-1]) for part in parts) / len(parts)
        points.append((x, *interval(means)))
    return points


def _returns(runs: Runs) -> Markup:
    intended = _against(runs, lambda setting, _: float(setting.place()))
    measured = _against(runs, lambda _, same: interval(values(same, "staleness_mean"))[0])
    return tag(
        "div",
        _figure("held-out return of the last episode against bound plus lag, steps", intended),
        _figure("the same against the mean staleness that was measured, steps", measured),
        cls="pair",
    )


def _against(runs: Runs, place: Callable[[Setting, Sequence[Finished]], float]) -> list[Series]:
    """A line a rule and correction, and a stroke an interval."""
    series = []
    for number, (label, settings) in enumerate(lines(runs).items()):
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


def _curves(runs: Runs) -> Markup:
    """For each rule and correction, a line a bound: against trials, and against time."""
    figures, ends = [], list[float]()
    for label, settings in lines(runs).items():
        for axis, column, scale in (("thousand trials", 0, 1e-3), ("seconds of training", 1, 1.0)):
            series = []
            for number, setting in enumerate(sorted(settings, key=Setting.place)):
                points = smooth(runs[setting], lambda point, c=column, s=scale: point[c] * s)
                halves = [0.0 if math.isnan(half) else half for _, _, half in points]
                line = [(x, y) for x, y, _ in points]
                pairs = zip(line, halves, strict=True)
                ends += [y + sign * half for (_, y), half in pairs for sign in (-1, 1)]
                name = f"{setting.bound}" + (f" + lag {setting.lag}" if setting.lag else "")
                series.append(Series(name, line, _shade(number, len(settings)), halves))
            figures.append((f"{label}, against {axis}", series))
    low = min(ends, default=0.0)
    span = low, max([low + 0.1, *ends])
    note = tag("p", "Return of the trained batches' last episode, a line a bound.", cls="note")
    return join(note, tag("div", *(_figure(*each, span) for each in figures), cls="pair"))


def _ages(runs: Runs) -> Markup:
    """A bar an episode of every rule and bound, over seeds and corrections."""
    rows: list[Markup] = []
    for name, same in _by_flow(runs).items():
        episodes = max(len(run.ages) for run in same)
        for number in range(episodes):
            shares = mean_shares([run.ages[number] for run in same])
            if shares:
                who = name if number == 0 else f"episode {number}"
                label = tag("div", who, cls="who")
                rows.append(tag("div", label, _age_bar(shares), cls="row"))
    key = tag("p", "Each part of a bar is the share of tokens of an age, in steps.", cls="note")
    return join(key, tag("div", *rows, cls="bars"))


def _by_flow(runs: Runs) -> dict[str, list[Finished]]:
    """Runs by rule, bound and lag: corrections do not change ages."""
    found: dict[str, list[Finished]] = {}
    for setting, same in runs.items():
        lag = f", lag {setting.lag}" if setting.lag else ""
        found.setdefault(f"{setting.rule} {setting.bound}{lag}", []).extend(same)
    return found


def mean_shares(parts: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The mean share of each age, over the runs that know it."""
    known = [part for part in parts if part]
    ages = sorted({age for part in known for age in part})
    return {age: sum(part.get(age, 0.0) for part in known) / len(known) for age in ages}


def _age_bar(shares: Mapping[int, float]) -> Markup:
    parts = []
    for age, share in shares.items():
        text = f"{age}: {percent(share)}" if share >= 0.14 else f"{age}" if share >= 0.04 else ""
        style = f"flex:{share:.4f}; --age:{min(age, 8) / 8:.3f}"
        title = f"{age} steps: {percent(share)}"
        parts.append(tag("div", tag("span", text), cls="part age", title=title, style=style))
    return tag("div", *parts, cls="bar")


def _fates(runs: Runs) -> Markup:
    note = (
        "Dropped: of the trials granted. Wasted: of the time that all trials took, the part of "
        "those that were not trained. Length bias: the share of the longest tenth of trials in "
        "what was trained, over their share in what was started; 1 is unbiased."
    )
    return join(tag("p", note, cls="note"), _rows(_by_flow(runs), FATES))


def _table(runs: Runs, names: Sequence[str]) -> Markup:
    return _rows({setting.label(): same for setting, same in runs.items()}, names)


def _rows(groups: Mapping[str, Sequence[Finished]], names: Sequence[str]) -> Markup:
    heads = [tag("th", words(name)) for name in ("", "runs", *names)]
    rows = [
        tag(
            "tr",
            tag("th", label),
            tag("td", str(len(same)), cls="number"),
            *(_cell(name, values(same, name)) for name in names),
        )
        for label, same in groups.items()
    ]
    return tag(
        "div", tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows)), cls="scroll"
    )


def _cell(name: str, found: Sequence[float]) -> Markup:
    known = [value for value in found if math.isfinite(value)]
    if not known:
        return tag("td", "–", cls="number")
    mean, half = interval(known)
    text = signed(mean, 3) if name.endswith("return") else figure(mean)
    is_sure = math.isnan(half) or half <= 1e-6 * abs(mean)
    beside = None if is_sure else tag("small", f" ± {figure(half)}")
    return tag("td", text, beside, cls="number")


def _figure(
    caption: str, series: Sequence[Series], span: tuple[float, float] | None = None
) -> Markup:
    chart = line_chart(series, described=caption, y_span=span)
    return tag("figure", tag("figcaption", caption), chart)


def _colour(number: int) -> str:
    return f"s{number % NUM_COLOURS}"


def _shade(number: int, count: int) -> str:
    return f"e{round(4 * number / (count - 1)) if count > 1 else 4}"
