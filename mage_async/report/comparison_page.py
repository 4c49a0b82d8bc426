"""Runs side by side in one page: what differs, what was reached, and what it cost."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mage_async.report.charts.learning_curves import curve_points
from mage_async.report.charts.line_chart import Chart, line_chart
from mage_async.report.charts.number_format import duration, figure, signed
from mage_async.report.charts.plot_area import Series
from mage_async.report.experiment_arms import Arm, Run, arms, paired
from mage_async.report.page_table import PageTable, TableCell, TableRow
from mage_async.report.templating import fill
from mage_async.results.intervals import interval

COLOURS = ("heldout", "train", "blind", "swapped", "e0", "e1", "e3")
LAST = ("return_by_episode", -1)


def compare(runs: Sequence[Run]) -> str:
    """One self-contained HTML page about two runs or more.

    Raises:
        ValueError: fewer than two runs.
    """
    if len(runs) < 2:
        raise ValueError(f"a comparison needs at least two runs, got {len(runs)}")
    found = arms(runs)
    first, *others = found
    split, charts = curves(found)
    return fill(
        "comparison.html",
        title=f"{len(runs)} runs · mage",
        num_runs=len(runs),
        differences=_said(found),
        has_small_arm=any(len(arm.runs) < 3 for arm in found),
        reached=_table(found, REACHED),
        first=first.label,
        beside=_beside(first, others) if others else None,
        arm_names={colour: arm.label for colour, arm in zip(COLOURS, found, strict=False)},
        curves=[(f"{split}, by {axis}", chart) for axis, chart in charts.items()],
        num_left_out=max(0, len(found) - len(COLOURS)),
        cost=_table(found, COST),
    )


def curves(found: Sequence[Arm]) -> tuple[str, dict[str, Chart | None]]:
    """The last episode's return against steps, trials and time; bands over seeds.

    On held-out tasks, or in the batches that were trained where a run recorded no curve.
    """
    shown = found[: len(COLOURS)]
    points = {name: [_curves_of(arm, split) for arm in shown] for name, split in SPLITS.items()}
    name = next((name for name, of in points.items() if all(map(_has_curve, of))), TRAINED)
    return name, {axis: _chart(shown, points[name], at) for axis, at in AXES.items()}


def _curves_of(arm: Arm, split: str) -> list[dict[int, float]]:
    """The last episode's return by policy version, for every run."""
    if split == "train":
        return [
            {line["step"]: line["return_by_episode"][-1] for line in run.records.metrics}
            for run in arm.runs
        ]
    return [
        {
            version: score["return_by_episode"][-1]
            for version, score in curve_points(run.records, split)
        }
        for run in arm.runs
    ]


def _has_curve(of_runs: Sequence[Mapping[int, float]]) -> bool:
    return all(len(points) > 1 for points in of_runs)


def _chart(
    found: Sequence[Arm],
    points: Sequence[Sequence[Mapping[int, float]]],
    at: Callable[[Run, int], float],
) -> Chart | None:
    series = [
        _series(arm, of_runs, at, colour)
        for arm, of_runs, colour in zip(found, points, COLOURS, strict=False)
    ]
    return line_chart(series, described="the last episode's return of every arm")


def _series(
    arm: Arm,
    of_runs: Sequence[Mapping[int, float]],
    at: Callable[[Run, int], float],
    colour: str,
) -> Series:
    """The mean over an arm's runs at the versions that all of them have."""
    rows, halves = [], []
    for version in sorted(set.intersection(*map(set, of_runs))):
        mean, half = interval([of_run[version] for of_run in of_runs])
        rows.append((statistics.fmean(at(run, version) for run in arm.runs), mean))
        halves.append(half)
    return Series(arm.label, rows, colour, halves if len(of_runs) > 1 else ())


def _trials(run: Run, version: int) -> float:
    admission = run.records.config.admission
    return float(version * admission.groups_per_step * admission.trials_per_group)


def _seconds(run: Run, version: int) -> float:
    """When the version was there; the time of the last one before it that was recorded."""
    times = [line["time_s"] for line in run.records.metrics if line["step"] <= version]
    return times[-1] if times else 0.0


TRAINED = "trained batches"
SPLITS = {"held-out tasks": "heldout", TRAINED: "train"}
AXES: Mapping[str, Callable[[Run, int], float]] = {
    "policy version": lambda run, version: float(version),
    "trials": _trials,
    "seconds of training": _seconds,
}


def _said(found: Sequence[Arm]) -> str:
    keys = ", ".join(found[0].settings) or "nothing but seeds"
    return f"{len(found)} arms; they differ in {keys}"


def _beside(first: Arm, others: Sequence[Arm]) -> PageTable:
    """Differences in the last episode, seed by seed: what seeds share cancels."""
    rows = []
    for arm in others:
        gaps = paired(first, arm, "evaluation", "heldout", *LAST)
        said = _interval(gaps) if gaps else "no seed in common"
        rows.append(TableRow(arm.label, [TableCell(said), TableCell(str(len(gaps)))]))
    return PageTable(["", "last episode, difference", "seeds"], rows)


def _table(found: Sequence[Arm], columns: Mapping[str, Callable[[Arm], str]]) -> PageTable:
    rows = [
        TableRow(arm.label, [TableCell(said(arm)) for said in columns.values()]) for arm in found
    ]
    return PageTable(["", *columns], rows)


def _mean(arm: Arm, *path: str | int) -> str:
    values = arm.values("evaluation", *path)
    return _interval(values) if values else "–"


def _interval(values: Sequence[float]) -> str:
    mean, half = interval(values)
    return signed(mean, 3) + ("" if half != half else f" ± {half:.3f}")


def _plain(arm: Arm, *path: str) -> str:
    values = arm.values(*path)
    return figure(statistics.fmean(values)) if values else "–"


REACHED: Mapping[str, Callable[[Arm], str]] = {
    "runs": lambda arm: str(len(arm.runs)),
    "first episode": lambda arm: _mean(arm, "heldout", "return_by_episode", 0),
    "last episode": lambda arm: _mean(arm, "heldout", *LAST),
    "blind": lambda arm: _mean(arm, "heldout_blind", *LAST),
    "swapped": lambda arm: _mean(arm, "heldout_swapped", *LAST),
    "won, last": lambda arm: _mean(arm, "heldout", "won_by_episode", -1),
    "won, any": lambda arm: _mean(arm, "heldout", "won_within", -1),
}
COST: Mapping[str, Callable[[Arm], str]] = {
    "wall time": lambda arm: duration(statistics.fmean(arm.values("wall_s"))),
    "trials/s": lambda arm: _plain(arm, "throughput", "trials_per_s"),
    "generated tokens/s": lambda arm: _plain(arm, "throughput", "generated_tokens_per_s"),
    "staleness, mean": lambda arm: _plain(arm, "staleness", "mean"),
    "largest": lambda arm: figure(max(arm.values("staleness", "max"), default=0.0)),
    "dropped": lambda arm: figure(sum(arm.values("trials", "dropped"))),
}


def lines(runs: Sequence[Run]) -> list[Mapping[str, Any]]:
    """The same in short, for a terminal: an arm, its number of runs, its last episode."""
    return [
        {
            "arm": arm.label,
            "runs": len(arm.runs),
            "last": _mean(arm, "heldout", *LAST),
            "blind": _mean(arm, "heldout_blind", *LAST),
            "swapped": _mean(arm, "heldout_swapped", *LAST),
        }
        for arm in arms(runs)
    ]
