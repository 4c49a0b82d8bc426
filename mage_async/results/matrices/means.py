"""Finished runs of a matrix put together: by setting, with means over their seeds."""

import math
from collections.abc import Callable, Mapping, Sequence

from mage_async.results.intervals import interval
from mage_async.results.matrices.ablation import Compared, Finished

POINTS = 15
"""Points of a learning curve; each is a mean over as many batches as that takes."""
Runs = Mapping[Compared, Sequence[Finished]]


def by_setting(finished: Sequence[Finished]) -> dict[Compared, list[Finished]]:
    """Runs that differ in their seed only."""
    found: dict[Compared, list[Finished]] = {}
    for each in sorted(finished, key=lambda one: (one.cell.setting, one.cell.seed)):
        found.setdefault(each.cell.setting, []).append(each)
    return found


def by_flow(runs: Runs) -> dict[str, list[Finished]]:
    """Runs whose tokens have the same ages."""
    found: dict[str, list[Finished]] = {}
    for setting, same in runs.items():
        found.setdefault(setting.flow(), []).extend(same)
    return found


def by_method(runs: Runs) -> dict[str, list[Compared]]:
    """Settings that differ in their place only, which a chart joins by a line."""
    found: dict[str, list[Compared]] = {}
    for setting in runs:
        found.setdefault(setting.method(), []).append(setting)
    return found


def values(runs: Sequence[Finished], name: str) -> list[float]:
    """A figure of each run."""
    return [run.figures[name] for run in runs]


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


def mean_shares(parts: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The mean share of each age, over the runs that know it."""
    known = [part for part in parts if part]
    ages = sorted({age for part in known for age in part})
    return {age: sum(part.get(age, 0.0) for part in known) / len(known) for age in ages}
