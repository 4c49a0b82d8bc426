"""Compute confidence intervals at 95 %: Student's t for means, Wilson's interval for shares."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantile of Student's t at 97.5 %, by degrees of freedom."""
Z_95 = 1.96
"""Number of standard deviations of a 95 % interval."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of some values and its half-width by Student's t; NaN for one value."""
    degrees = len(values) - 1
    # Beyond the table the formula is within 0.014 of the quantile.
    t95 = T95[degrees] if degrees < len(T95) else 1.96 + 2.5 / degrees
    return statistics.fmean(values), t95 * standard_error(values)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; NaN for one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def noise(values: Sequence[float]) -> float:
    """Return the standard deviation of single values around a mean that changes slowly, from the
    differences of neighbours; 0 for one value.
    """
    differences = [later - sooner for sooner, later in itertools.pairwise(values)]
    return math.hypot(*differences) / math.sqrt(2 * max(1, len(differences)))


def half_width(values: Sequence[float], span: float = 0.0) -> float:
    """Return the half-width of the mean of some values, for a JSON file.

    JSON has no NaN, so the half-width of one value is recorded as 0; `halves_of` reads it as NaN.

    Args:
        span: largest difference that two values can have. It is used if all n values are equal, so
            that their spread cannot be estimated: with 95 % confidence, at most a share
            `1 - 0.05 ** (1 / n)` of further values would differ from them, each by at most `span`.
    """
    if len(values) == 1:
        return 0.0
    if min(values) < max(values):
        return interval(values)[1]
    return span * (1 - math.pow(0.05, 1 / len(values)))


def halves_of(score: Mapping[str, Any]) -> Sequence[float]:
    """Return the half-widths of a recorded score by episode; NaN if the score is of a single trial
    or task.
    """
    number = score.get("num_trials", score.get("num_tasks"))
    return [math.nan if number == 1 else half for half in score["ci95_by_episode"]]


def half_text(half: float, digits: int, number: int = 2) -> str:
    """Return a half-width as text, to be written after "±"; "?" if it is NaN, or if there is only
    one value.

    Args:
        digits: number of decimals.
        number: number of values; needed where the half-width of one value is recorded as 0.
    """
    return "?" if math.isnan(half) or number == 1 else f"{half:,.{digits}f}"


def wilson(successes: float, count: float, z: float = Z_95) -> tuple[float, float]:
    """Return the bounds of Wilson's interval of a share, of `z` standard deviations.

    The bounds lie within [0, 1], even if all or none succeed.
    """
    share, spread = successes / count, z**2 / count
    middle = (share + spread / 2) / (1 + spread)
    # Estimated counts may put a share a little above 1.
    half = math.sqrt(max(0.0, spread * (share * (1 - share) + spread / 4))) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """Return `one - other` for each seed that both have.

    Runs of one seed share their warm start and their tasks, so the differences vary less than the
    values themselves.
    """
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]
