"""An ablation as one picture, for where a page cannot be shown; drawn by matplotlib, an extra.

A column a rule of admission, a colour a correction, and the darker the larger the bound.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mage_async.results.intervals import interval
from mage_async.results.matrices.ablation import Finished, Setting
from mage_async.results.matrices.means import by_setting, mean_shares, smooth, values

MISSING = "no ablation.png: matplotlib is not installed (pip install 'mage_async[plots]')"
COLOURS = ("#1f6fd1", "#d1781f", "#2c9161", "#a03fb5", "#c2344c", "#7a6a00", "#5b6470", "#0c8c9c")
AGES = ("#e3ecf7", "#bcd3ee", "#8fb6e3", "#5f94d4", "#3573c0", "#1d569f", "#133f78", "#0b2a52")
"""From fresh to old."""
PALEST = 0.3
Runs = dict[Setting, list[Finished]]


def write_png(file: Path, finished: Sequence[Finished]) -> None:
    """Write the picture of at least one run, or a sentence beside where it would be."""
    note = file.with_suffix(".txt")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        note.write_text(MISSING + "\n")
        return
    note.unlink(missing_ok=True)
    runs = by_setting(finished)
    rules = sorted({setting.rule for setting in runs})
    figure = Figure(figsize=(1.2 + 4.2 * max(2, len(rules)), 13), layout="constrained")
    rows = figure.subplots(4, len(rules), squeeze=False, sharey="row")
    colours = _colours(runs)
    for rule, (returns, trials, seconds, ages) in zip(rules, rows.T, strict=True):
        own = {setting: same for setting, same in runs.items() if setting.rule == rule}
        returns.set_title(rule)
        _returns(returns, own, colours)
        _curves(trials, own, colours, 0, "trials trained")
        _curves(seconds, own, colours, 1, "seconds of training")
        _ages(ages, own)
    names = ("held-out return, last episode", *2 * ("return of the batch",), "share of tokens")
    for axes, name in zip(rows[:, 0], names, strict=True):
        axes.set_ylabel(name)
    rows[0, -1].legend(title="correction, ± 95 %", fontsize=8)
    rows[3, -1].legend(title="age, steps", fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(file, dpi=110)


def _colours(runs: Runs) -> dict[str, str]:
    """By correction."""
    names = sorted({setting.correction for setting in runs})
    return {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}


def _returns(axes: Any, runs: Runs, colours: dict[str, str]) -> None:
    """A line a correction, each a little aside: bars that overlap cannot be read."""
    for number, (correction, colour) in enumerate(colours.items()):
        rows = sorted(
            (setting.place(), *interval(values(same, "heldout_last_return")))
            for setting, same in runs.items()
            if setting.correction == correction
        )
        aside = 0.09 * (number - (len(colours) - 1) / 2)
        x = [place + aside for place, _, _ in rows]
        half = [0.0 if math.isnan(width) else width for _, _, width in rows]
        style = {"color": colour, "marker": "o", "markersize": 4, "capsize": 2, "label": correction}
        axes.errorbar(x, [mean for _, mean, _ in rows], half, **style)
    axes.set_xlabel("bound + lag, steps")


def _curves(axes: Any, runs: Runs, colours: dict[str, str], column: int, name: str) -> None:
    oldest = max((setting.place() for setting in runs), default=0)
    for setting, same in runs.items():
        points = smooth(same, lambda point: point[column])
        alpha = PALEST + (1 - PALEST) * setting.place() / max(1, oldest)
        x, y, _ = zip(*points, strict=True)
        axes.plot(x, y, color=colours[setting.correction], alpha=alpha, linewidth=1.2)
    axes.set_xlabel(name + " (the darker the larger the bound)")


def _ages(axes: Any, runs: Runs) -> None:
    """A stacked bar a bound, over seeds and corrections, which do not change ages."""
    found = dict[int, list[dict[int, float]]]()
    for setting, same in sorted(runs.items(), key=lambda item: item[0].place()):
        found.setdefault(setting.place(), []).extend(run.ages[0] for run in same)
    shares = {place: mean_shares(parts) for place, parts in found.items()}
    ages = sorted({age for each in shares.values() for age in each})
    bottoms = [0.0] * len(shares)
    for age in ages:
        means = [each.get(age, 0.0) for each in shares.values()]
        colour = AGES[round(age * (len(AGES) - 1) / max(len(AGES) - 1, *ages))]
        axes.bar(list(map(str, shares)), means, 0.7, bottoms, label=str(age), color=colour)
        bottoms = [bottom + mean for bottom, mean in zip(bottoms, means, strict=True)]
    axes.set_xlabel("bound + lag, steps")
