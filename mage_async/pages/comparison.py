"""Compare several runs on one self-contained page: differences, results and costs.

Runs that differ only in their seed form an *arm*. Intervals over the runs of an arm are Student's,
half-widths at 95 %; a single run has none.

Two evaluation sets are controls on held-out tasks: in the blind one the agent does not see earlier
episodes, in the swapped one the last episode has another task.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mage_async.config import config_file
from mage_async.config.config_file import flat_config
from mage_async.config.schema import Config
from mage_async.errors import RunError
from mage_async.pages.charts import Chart, Series, duration, line_chart, short_number, signed
from mage_async.pages.curves import curve_points
from mage_async.pages.tables import Table, TableCell, TableRow
from mage_async.pages.templating import fill
from mage_async.results import intervals
from mage_async.results.intervals import half_text, interval
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import (
    VERSION_OF,
    RunRecords,
    alike_and_different,
    made_with_of,
    read_document,
    read_records,
)
from mage_async.trajectory import num_decimals

IGNORED_KEYS = (
    *("seed", "journal.", "supervision.", "transport.", "evaluation.final_trials"),
    VERSION_OF,
)
"""Beginnings of keys that do not separate arms. They change neither the method nor its speed;
`evaluation.final_trials` changes only the width of a run's own intervals. Versions of libraries
that differ are named above the tables.
"""
SUMMARY_PARTS = ("environment", "seed", "complete")
"""Keys that every summary has, even that of an interrupted run."""
COLOURS = ("heldout", "train", "blind", "swapped", "e0", "e1", "e3")
"""CSS classes that give arms their colours, in order; arms beyond these are not drawn. On other
pages the same colours stand for evaluation sets and episodes, hence the names.
"""
LAST = ("return_by_episode", -1)
"""Path of the last episode's return in the score of an evaluation set."""
SPLITS = {"held-out tasks": "heldout", "trained batches": "train"}
"""Evaluation sets that curves may show. The first set for which every run has a curve is drawn; if
there is none, the last set.
"""


@dataclass(frozen=True, slots=True, eq=False)
class ComparedRun:
    """Hold the records and the summary of a run."""

    records: RunRecords
    summary: Mapping[str, Any]
    sources: Mapping[str, str] = field(default_factory=dict)
    """Digests of the sources of the user's own classes, by name."""

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.records.config.seed

    def made_with(self) -> dict[str, str]:
        """Return the number of actors and the versions of libraries of the run, those before a
        `--resume` included.
        """
        changed = self.summary.get("changed_keys", {})
        return made_with_of(self.records) | {
            key.removeprefix(VERSION_OF): text
            for key, text in changed.items()
            if key.startswith(VERSION_OF)
        }


def read_run(run: RunDirectory) -> ComparedRun:
    """Read a run that has ended.

    Raises:
        RunError: the folder is no run, or has no summary yet.
    """
    records = read_records(run)
    if not run.summary.is_file():
        raise RunError(f"{run.root} has no {run.summary.name}: it has not ended")
    summary = read_document(run.summary)
    missing = [name for name in SUMMARY_PARTS if name not in summary]
    if missing:
        raise RunError(f"{run.summary} lacks {', '.join(missing)}: it is damaged")
    return ComparedRun(records, summary, records.launch.get("sources", {}))


@dataclass(frozen=True, slots=True, eq=False)
class Arm:
    """Hold the runs of one configuration, which differ in their seeds alone, in order of seeds."""

    settings: Mapping[str, Any]
    """Values of the keys in which the arms differ."""
    runs: Sequence[ComparedRun]

    @property
    def label(self) -> str:
        """The settings in one line, each key as short as possible."""
        known = {key: value for key, value in self.settings.items() if value is not None}
        # Keys with the same short form, such as `learner.steps` and `warm_start.steps`, are written
        # whole.
        num_keys = Counter(map(_short_key, self.settings))
        names = {key: key if num_keys[_short_key(key)] > 1 else _short_key(key) for key in known}
        pairs = [f"{names[key]} {_value_text(value)}" for key, value in known.items()]
        if pairs or not self.settings:
            return ", ".join(pairs) or "all runs"
        # This configuration has none of the differing keys, so all of them are keys of methods that
        # it does not turn on. (Other tables that can be absent have a `kind`, an `estimator` or the
        # value "none", which every configuration has and which would differ too.)
        methods = dict.fromkeys(key.removeprefix("methods.").split(".")[0] for key in self.settings)
        return f"without {', '.join(methods)}"

    @property
    def environment(self) -> str:
        """The name of the environment. Returns in different ones cannot be compared."""
        return self.runs[0].records.config.environment.name

    @property
    def unfinished(self) -> str:
        """Clause with the number of runs that have not trained all their steps; "" for none."""
        number = sum(not run.summary["complete"] for run in self.runs)
        return f", {number} not finished" if number else ""

    def values(self, *path: str | int) -> list[float]:
        """Return one number from the summary of each run that has it."""
        found = (_lookup(run.summary, path) for run in self.runs)
        return [value for value in found if value is not None]


def arms(runs: Iterable[ComparedRun]) -> list[Arm]:
    """Sort runs into arms. Arms are in the order of their first runs, and the runs of an arm in
    order of their seeds. Runs with different versions of a user's own class are in different arms.
    """
    runs = list(runs)
    names = {name for run in runs for name in run.sources}
    known = {name: {run.sources[name] for run in runs if name in run.sources} for name in names}
    edited = sorted(name for name, digests in known.items() if len(digests) > 1)
    with_keys = []
    for run in runs:
        values = {f"source of {name}": run.sources.get(name) for name in edited}
        values |= flat_config(run.records.config)
        # A run whose keys were changed by `--resume` was trained with several values of them.
        with_keys.append((run, _compared_keys(values | run.summary.get("changed_keys", {}))))
    settings = [each for _, each in with_keys]
    keys = dict.fromkeys(key for each in settings for key in each)
    differing = [key for key in keys if _differs(key, settings)]
    found: dict[str, tuple[dict[str, Any], list[ComparedRun]]] = {}
    for run, values in with_keys:
        of_run = {key: values.get(key) for key in differing}
        # Values may be lists, which a dict cannot have as keys: hence `repr`.
        found.setdefault(repr(of_run), (of_run, []))[1].append(run)
    return [Arm(each, sorted(same, key=lambda run: run.seed)) for each, same in found.values()]


def paired(first: Arm, second: Arm, *path: str | int) -> list[float]:
    """Return the difference, second minus first, for each seed that both arms have. If an arm has
    several runs of a seed, their mean is taken.
    """
    return intervals.paired(_means_by_seed(second, path), _means_by_seed(first, path))


def _means_by_seed(arm: Arm, path: Sequence[str | int]) -> dict[int, float]:
    """Return the mean of a number of the summaries over the runs of each seed."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for run in arm.runs:
        if (value := _lookup(run.summary, path)) is not None:
            found[run.seed].append(value)
    return {seed: statistics.fmean(values) for seed, values in found.items()}


def differences(one: Config, other: Config) -> list[tuple[str, str, str]]:
    """Return each key whose values differ, with both values; "–" for a configuration that lacks the
    key.
    """
    return [(key, str(a), str(b)) for key, a, b in config_file.differences(one, other, "–")]


def _compared_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a configuration, with their values, that may separate two arms."""
    return {key: value for key, value in values.items() if not key.startswith(IGNORED_KEYS)}


def _differs(key: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the values of a key differ.

    Some tables, such as a correction, have a `kind`, and keys that only some kinds have. Such a key
    differs only if the configurations that have it disagree. A key that is a table in one
    configuration, and "none" in another, differs too.
    """
    table = key.rpartition(".")[0]
    has_kinds = any({f"{table}.kind", f"{table}.estimator"} & {*each} for each in settings)
    values = {repr(each.get(key)) for each in settings if key in each or not has_kinds}
    is_table = any(other.startswith(f"{key}.") for each in settings for other in each)
    return len(values) > 1 or is_table


def _short_key(key: str) -> str:
    """Return the last part of a key; for the `kind` of a table inside a section, the name of the
    table.
    """
    # Two empty names are put first, because a key of the top level, such as "seed", has no table.
    *above, table, last = ("", "", *key.split("."))
    return table if last == "kind" and any(above) else last


def _value_text(value: Any) -> str:
    """Return a value of a configuration as text."""
    if isinstance(value, list):
        return "+".join(map(str, value)) or "[]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _lookup(tree: Any, path: Sequence[str | int]) -> float | None:
    """Return the number at a path in nested data; None if a part of the path is missing."""
    for name in path:
        if isinstance(name, str):
            tree = tree.get(name) if isinstance(tree, Mapping) else None
        else:
            tree = tree[name] if tree else None
    found: float | None = tree
    return found


def compare(runs: Sequence[ComparedRun]) -> str:
    """Return the page about two runs or more.

    Raises:
        ValueError: fewer than two runs.
    """
    if len(runs) < 2:
        raise ValueError(f"a comparison needs at least two runs, got {len(runs)}")
    found = arms(runs)
    first, *others = found
    split, charts = curves(found)
    alike, different = alike_and_different([run.made_with() for run in runs])
    return fill(
        "comparison.html",
        title=f"{len(runs)} runs · mage",
        num_runs=len(runs),
        differences=f"{len(found)} arms; they differ in {', '.join(first.settings)}"
        if others
        else "1 arm: the runs differ in nothing but seeds",
        alike=alike,
        different=different,
        has_small_arm=any(len(arm.values("evaluation", "heldout", *LAST)) < 3 for arm in found),
        reached=_arm_table(found, REACHED),
        first=first.label,
        differences_to_first=_difference_table(first, others) if others else None,
        arm_names={colour: arm.label for colour, arm in zip(COLOURS, found, strict=False)},
        curves=[(f"{split}, by {axis}", chart) for axis, chart in charts.items()],
        num_left_out=max(0, len(found) - len(COLOURS)),
        cost=_arm_table(found, COST),
    )


def lines(runs: Sequence[ComparedRun]) -> list[Mapping[str, Any]]:
    """Return the arms and their last episodes as rows for a terminal."""
    return [
        {
            "arm": arm.label,
            "runs": len(arm.runs),
            "unfinished": arm.unfinished,
            "last": _mean(arm, "heldout", *LAST),
            "blind": _mean(arm, "heldout_blind", *LAST),
            "swapped": _mean(arm, "heldout_swapped", *LAST),
        }
        for arm in arms(runs)
    ]


# Learning curves, on three x axes.


def _trials_at(run: ComparedRun, version: int) -> float:
    """Return the number of trials trained up to a version."""
    admission = run.records.config.admission
    return float(version * admission.groups_per_step * admission.trials_per_group)


def _seconds_at(run: ComparedRun, version: int) -> float:
    """Return the time of the last recorded step up to a version."""
    times = [line["time_s"] for line in run.records.metrics if line["step"] <= version]
    return times[-1] if times else 0.0


AXES: Mapping[str, Callable[[ComparedRun, int], float]] = {
    "policy version": lambda run, version: float(version),
    "trials": _trials_at,
    "seconds of training": _seconds_at,
}
"""Functions that return the x of a run's policy version, by the name of the x axis."""


def curves(found: Sequence[Arm]) -> tuple[str, dict[str, Chart | None]]:
    """Return charts of the last episode's return, with bands over seeds: by x axis and, if there
    are several, by environment.

    Returns:
        A key of `SPLITS`, and the charts: held-out tasks if every run recorded a curve, the
        trained batches otherwise.
    """
    shown = found[: len(COLOURS)]
    for name, split in SPLITS.items():
        shown_split, points = name, [[_returns(run, split) for run in arm.runs] for arm in shown]
        if all(len(returns) > 1 for by_run in points for returns in by_run):
            break
    charts = {}
    for axis, x_of in AXES.items():
        drawn: dict[str, list[Series]] = {}
        for arm, colour, by_run in zip(shown, COLOURS, points, strict=False):
            drawn.setdefault(arm.environment, []).append(_arm_line(arm, colour, by_run, x_of))
        for name, series in drawn.items():
            caption = f"{axis}, {name}" if len(drawn) > 1 else axis
            alt_text = "the last episode's return of every arm"
            charts[caption] = line_chart(series, alt_text=alt_text)
    return shown_split, charts


def _returns(run: ComparedRun, split: str) -> dict[int, float]:
    """Return the last episode's return by policy version."""
    if split == "train":
        return {line["step"]: line["return_by_episode"][-1] for line in run.records.metrics}
    points = curve_points(run.records, split)
    return {version: score["return_by_episode"][-1] for version, score in points}


def _arm_line(
    arm: Arm,
    colour: str,
    by_run: Sequence[Mapping[int, float]],
    x_of: Callable[[ComparedRun, int], float],
) -> Series:
    """Return the mean over an arm's runs at the versions that all of them have."""
    points, halves = [], []
    for version in sorted(set.intersection(*map(set, by_run))):
        mean, half = interval([returns[version] for returns in by_run])
        points.append((statistics.fmean(x_of(run, version) for run in arm.runs), mean))
        halves.append(half)
    return Series(arm.label, points, colour, halves if len(by_run) > 1 else ())


# Tables: a row for each arm.


def _difference_table(first: Arm, others: Sequence[Arm]) -> Table:
    """Return the table of differences of the last episode's return to the first arm.

    Runs are compared seed by seed: runs of one seed share their warm start and tasks, whose effect
    the difference cancels.
    """
    rows = []
    for arm in others:
        gaps = paired(first, arm, "evaluation", "heldout", *LAST)
        text = _interval_text(gaps) if gaps else "no seed in common"
        if arm.environment != first.environment:
            text, gaps = "another environment", []
        rows.append(TableRow(arm.label, [TableCell(text), TableCell(str(len(gaps)))]))
    return Table(["", "last episode, difference", "seeds"], rows)


def _arm_table(found: Sequence[Arm], columns: Mapping[str, Callable[[Arm], str]]) -> Table:
    """Return a table with a row for each arm; `columns` has, by its head, the function that returns
    the text of a column.
    """
    rows = [
        TableRow(arm.label, [TableCell(text(arm)) for text in columns.values()]) for arm in found
    ]
    return Table(["", *columns], rows)


def _mean(arm: Arm, *path: str | int) -> str:
    """Return the mean of a number of the evaluation over the runs of an arm, with its interval. If
    only some runs have the number, how many have it follows.
    """
    values = arm.values("evaluation", *path)
    if not values:
        return "–"
    number = f"{len(values)} run{'s' if len(values) > 1 else ''}"
    some = f" ({number})" if len(values) < len(arm.runs) else ""
    return _interval_text(values) + some


def _interval_text(values: Sequence[float]) -> str:
    """Return the mean and the half-width of its interval as text; "± ?" if all values are equal,
    because they may be equal by chance and the spread cannot be estimated.
    """
    mean, half = interval(values)  # the half-width of a single value is NaN
    digits = num_decimals((mean, half))
    shown = "" if math.isnan(half) else f" ± {half_text(half or math.nan, digits)}"
    return signed(mean, digits) + shown


def _bare_mean(arm: Arm, *path: str) -> str:
    """Return the mean of a number of the summary over the runs of an arm, without an interval."""
    values = arm.values(*path)
    return short_number(statistics.fmean(values)) if values else "–"


REACHED: Mapping[str, Callable[[Arm], str]] = {
    "runs": lambda arm: f"{len(arm.runs)}{arm.unfinished}",
    "first episode": lambda arm: _mean(arm, "heldout", "return_by_episode", 0),
    "last episode": lambda arm: _mean(arm, "heldout", *LAST),
    "blind": lambda arm: _mean(arm, "heldout_blind", *LAST),
    "swapped": lambda arm: _mean(arm, "heldout_swapped", *LAST),
    "won, last": lambda arm: _mean(arm, "heldout", "won_by_episode", -1),
    "won, any": lambda arm: _mean(arm, "heldout", "won_within", -1),
}
"""Columns of the table of returns: names, and functions that return the text for an arm."""
COST: Mapping[str, Callable[[Arm], str]] = {
    "wall time": lambda arm: duration(statistics.fmean(arm.values("wall_s"))),
    "trials/s": lambda arm: _bare_mean(arm, "throughput", "trials_per_s"),
    "generated tokens/s": lambda arm: _bare_mean(arm, "throughput", "generated_tokens_per_s"),
    "staleness, mean": lambda arm: _bare_mean(arm, "staleness", "mean"),
    "largest": lambda arm: short_number(max(arm.values("staleness", "max"), default=0.0)),
    "dropped": lambda arm: short_number(sum(arm.values("trials", "dropped"))),
}
"""Columns of the table of costs: names, and functions that return the text for an arm."""
