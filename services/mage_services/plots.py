"""An ablation as one picture, for where a page cannot be shown; drawn by matplotlib, an extra."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mage_async.ablation import Finished, Setting
from mage_async.intervals import interval
from mage_async.report.ablation import by_setting, lines, smooth, values

MISSING = "no ablation.png: matplotlib is not installed (pip install 'mage_async[plots]')"


def write_png(file: Path, finished: Sequence[Finished]) -> None:
    """Write the picture, or a sentence beside where it would be."""
    note = file.with_suffix(".txt")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        note.write_text(MISSING + "\n")
        return
    note.unlink(missing_ok=True)
    figure = Figure(figsize=(12, 9), layout="constrained")
    (returns, ages), (trials, seconds) = figure.subplots(2, 2)
    runs = by_setting(finished)
    _returns(returns, runs)
    _ages(ages, runs)
    _curves(trials, runs, 0, "trials trained")
    _curves(seconds, runs, 1, "seconds of training")
    figure.savefig(file, dpi=110)


def _returns(axes: Any, runs: dict[Setting, list[Finished]]) -> None:
    for label, settings in lines(runs).items():
        rows = sorted(
            (setting.place(), *interval(values(runs[setting], "heldout_last_return")))
            for setting in settings
        )
        x, y, half = zip(*rows, strict=True)
        axes.errorbar(x, y, [_known(width) for width in half], label=label, marker="o", capsize=3)
    axes.set(xlabel="bound + lag, steps", ylabel="held-out return, last episode")
    axes.legend(fontsize=8)


def _ages(axes: Any, runs: dict[Setting, list[Finished]]) -> None:
    for setting, same in runs.items():
        shares = [run.ages[0] for run in same if run.ages[0]]
        known = sorted({age for part in shares for age in part})
        means = [sum(part.get(age, 0.0) for part in shares) / len(shares) for age in known]
        axes.plot(known, means, marker="o", markersize=3, label=setting.label())
    axes.set(xlabel="age, steps", ylabel="share of trained tokens")
    axes.legend(fontsize=6, ncols=2)


def _curves(axes: Any, runs: dict[Setting, list[Finished]], column: int, name: str) -> None:
    for setting, same in runs.items():
        points = smooth(same, lambda point: point[column])
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], label=setting.label())
    axes.set(xlabel=name, ylabel="return of the batch, last episode")
    axes.legend(fontsize=6, ncols=2)


def _known(width: float) -> float:
    return 0.0 if math.isnan(width) else width
