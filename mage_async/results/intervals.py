"""Intervals of means: over seeds, which are few, by Student's t; over trials by the normal."""

import math
import statistics
from collections.abc import Mapping, Sequence

T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t at 97.5 % by degrees of freedom."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width at 95 %; the half-width of one value is NaN."""
    return statistics.fmean(values), _t95(len(values) - 1) * standard_error(values)


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; NaN for one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def half_width(values: Sequence[float]) -> float:
    """Of many values, at 95 %: 1.96 standard errors of the mean; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return 1.96 * math.sqrt(variance / len(values))


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Bounds at 95 % of a share, as Wilson has it: inside 0 to 1 even where all or none succeed."""
    share, spread = successes / count, 1.96**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """`one - other` of each seed that both have: seeds share warm start and tasks, so differences
    vary less than either.
    """
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def _t95(degrees: int) -> float:
    return T95[degrees] if degrees < len(T95) else 1.96 + 2.5 / degrees
