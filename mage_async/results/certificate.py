"""Certify adaptation: compute one verdict from the returns of a model and of its controls.

The model plays a task with its history, the earlier episodes, in the context (`own`), and under
four controls. `blind`: no episode sees an earlier one. `retry`: independent trials of one episode
each. `noise`: the history is of another task, the last episode of this one. `swapped`: the history
is of this task, the last episode of another one. Every statement rests on differences within a
task, `own` minus a control, whose means have one-sided bounds.

The model *adapts* if its last episode is above its first one and above all four controls. This is
an intersection–union test (Berger 1982): if one of the five differences is really zero, all five
are found positive at 99 % in at most 1 % of certificates. One difference below the margin is enough
for a refusal. So the upper bounds share an error of 1 % among them (Bonferroni): if no difference
is really below the margin, a model is refused in at most 1 % of certificates.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec
import numpy as np

from mage_async.results.intervals import half_width

Verdict = Literal["adapts", "improves without memory", "does not adapt", "cannot be told"]
MARGIN = 0.1
"""Smallest adaptation that matters, as a share of the range of returns."""
LEAST_MEMBERS = 12
"""Number of different tasks below which nothing is certified."""
Z90 = 1.2816
"""Quantile of the normal distribution at 90 %."""


class TaskReturns(msgspec.Struct, frozen=True):
    """Hold the returns of one task, from 0, the least of its game, to 1, the largest."""

    game: str
    member: str
    """Name of the hidden task variant. Tasks of the same variant are not independent evidence."""
    own: list[float]
    """Return of each episode, with the history (or the model's reflections) carried over."""
    blind: list[float]
    """Return of each episode, without history."""
    retry: list[float]
    """Return of each independent trial of one episode."""
    noise: float
    """Return of the last episode, after the history of another task."""
    swapped: float
    """Return of the last episode, with another task than the history's."""
    has_chance: bool = False
    """Whether the game draws new random events in each episode."""


class PlayCounts(NamedTuple):
    """Count the actions and the trials of a game, in all arms together."""

    actions: int
    invalid: int
    """Number of invalid actions among them."""
    trials: int
    cut: int
    """Number of trials that were cut short."""
    without_remark: int
    """Number of trials in which a reflection had no tags."""
    example: str = ""
    """First answer of a trial whose actions were all invalid; "" if there is no such trial."""


class Difference(msgspec.Struct, frozen=True):
    """Hold the mean of differences within tasks, and its one-sided bounds."""

    mean: float
    low: float
    """Lower bound at 99 %, or at a higher level if several certificates are stated together."""
    high: float
    """Upper bound, at a level at which the six upper bounds of a certificate together hold in 99 %
    of cases.
    """
    spread: float
    """Standard deviation over tasks."""


DIFFERENCES: Mapping[str, Callable[[TaskReturns], float]] = {
    "first": lambda task: task.own[-1] - task.own[0],
    "blind": lambda task: task.own[-1] - task.blind[-1],
    "retry": lambda task: task.own[-1] - sum(task.retry) / len(task.retry),
    "noise": lambda task: task.own[-1] - task.noise,
    "swapped": lambda task: task.own[-1] - task.swapped,
}
"""Differences of the last episode to the first one, and to each control."""
ALL = "all"
"""Name of the mean of these five differences, which is judged as a sixth. If a model adapts, all
five are above 0, so their mean is too, and it varies less than any one of them.
"""
COMPARED_IN_WORDS = {
    "first": "its first episode",
    "blind": "the same without memory (blind)",
    "retry": "independent tries (retry)",
    "noise": "another task's history (noise)",
    "swapped": "a swapped task",
    ALL: "the mean of its first episode and the controls",
}
"""What the last episode is compared with, in the words of a certificate's sentence."""


class Certificate(msgspec.Struct, frozen=True):
    """Hold the verdict about a model on a set of tasks, and the numbers that it follows from."""

    verdict: Verdict
    sentence: str
    num_tasks: int
    num_members: int
    """Number of different task variants among them."""
    needs_tasks: int | None
    """Approximate number of tasks that a verdict needs, if the verdict is open; else None."""
    differences: dict[str, Difference]
    """Last episode minus each of `DIFFERENCES`, and the mean of these differences."""
    luck: Difference | None
    """Best return so far minus the first one, in games without random events: what repeated tries
    gain without adaptation.
    """


def certificate(
    tasks: Sequence[TaskReturns], *, margin: float = MARGIN, statements: int = 1
) -> Certificate:
    """Return the certificate of some tasks.

    Args:
        margin: Smallest adaptation that matters, as a share of the range of returns.
        statements: Number of certificates that are stated together, such as one for each game. Each
            of them wrongly finds an adaptation with a probability of at most 1 % / `statements`,
            and wrongly refuses one with at most the same probability (Bonferroni).
    """
    values = {name: [take(task) for task in tasks] for name, take in DIFFERENCES.items()}
    values[ALL] = [sum(row) / len(row) for row in zip(*values.values(), strict=True)]
    error = 0.01 / statements
    # All lower bounds are needed to find an adaptation, but any one of the upper bounds refuses it.
    levels = _normal_quantile(1 - error), _normal_quantile(1 - error / len(values))
    members = [(task.game, task.member) for task in tasks]
    found = {name: _difference(each, members, levels) for name, each in values.items()}
    # If each episode draws new random events, the best of several returns rises for any player.
    fixed = [task for task in tasks if not task.has_chance]
    gains = [max(task.own) - task.own[0] for task in fixed]
    fixed_members = [(task.game, task.member) for task in fixed]
    luck = _difference(gains, fixed_members, levels) if fixed else None
    num_members = len(set(members))
    verdict = _verdict(num_members, found, luck, margin)
    needs = None
    if verdict == "cannot be told" and num_members >= LEAST_MEMBERS:
        needs = _needed(found, margin, levels)
        # The estimate may be lower than the number of tasks that has just given no verdict.
        needs = None if needs is None else max(needs, len(tasks) + 1)
    sentence = _sentence(verdict, tasks, num_members, found, luck, needs)
    return Certificate(verdict, sentence, len(tasks), num_members, needs, found, luck)


def _verdict(
    num_members: int, found: Mapping[str, Difference], luck: Difference | None, margin: float
) -> Verdict:
    """Return the verdict: positive if all differences are above 0, open if none is below
    `margin`.
    """
    if num_members < LEAST_MEMBERS:
        return "cannot be told"
    if all(each.low > 0 for each in found.values()):
        return "adapts"
    if all(each.high >= margin for each in found.values()):
        return "cannot be told"
    # Some comparison leaves no room for an adaptation that matters.
    is_lucky = luck is not None and luck.low > margin
    return "improves without memory" if found["first"].low > 0 or is_lucky else "does not adapt"


def _difference(
    values: Sequence[float], members: Sequence[Hashable], quantiles: tuple[float, float]
) -> Difference:
    """Return the mean of some differences, with a lower and an upper bound at `quantiles`."""
    mean = float(np.mean(values)) if values else 0.0
    # One pseudo-task of +1 and one of -1 are added, as Agresti and Min (2005) add to matched pairs:
    # a few equal differences have no spread of their own, and would otherwise prove anything.
    padded = np.array([*values, 1.0, -1.0])
    # A model that samples nothing plays equal tasks alike, however often they are repeated. So the
    # interval is at least as wide as one that counts each hidden variant once, by its mean.
    grouped: dict[Hashable, list[float]] = defaultdict(list)
    for member, value in zip(members, values, strict=True):
        grouped[member].append(value)
    means = np.array([np.mean(each) for each in grouped.values()])
    samples = [padded, means] if len(means) > 1 else [padded]
    below, above = (max(_half_width(each, level) for each in samples) for level in quantiles)
    middle = float(padded.mean())
    return Difference(
        mean, middle - below, middle + above, float(np.std(values)) if values else 0.0
    )


def _half_width(data: np.ndarray, quantile: float) -> float:
    """Return the half-width of the interval of a mean of independent values, by Student's t."""
    return float(_student(quantile, len(data) - 1) * data.std(ddof=1) / math.sqrt(len(data)))


def _student(z: float, degrees: int) -> float:
    """Return the quantile of Student's t that corresponds to the normal one (Abramowitz and Stegun,
    26.7.5).
    """
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def _normal_quantile(share: float) -> float:
    """Return the quantile of the normal distribution at `share`, in 0..1."""
    return statistics.NormalDist().inv_cdf(share)


def _needed(
    found: Mapping[str, Difference], margin: float, quantiles: tuple[float, float]
) -> int | None:
    """Return about how many tasks lead to a verdict in 90 % of cases, if the true means are the
    measured ones; None if no number of tasks does.
    """
    low, high = quantiles
    to_adapt = [_size(each.mean, each.spread, low) for each in found.values()]
    to_refuse = [_size(margin - each.mean, each.spread, high) for each in found.values()]
    # "Adapts" needs enough tasks for every difference, "does not adapt" only for one of them.
    fewest = min(max(to_adapt), min(to_refuse))
    return math.ceil(fewest) if math.isfinite(fewest) else None


def _size(distance: float, spread: float, quantile: float) -> float:
    """Return the number of tasks for which a test finds in 90 % of cases that a mean is beyond a
    threshold; infinity if no number is enough.

    Args:
        distance: Distance of the mean from the threshold; negative on the wrong side of it.
        spread: Standard deviation over tasks.
        quantile: Quantile of the normal distribution for the one-sided bound of the mean.
    """
    # No number of tasks shows a distance that is nearly 0 or negative.
    if distance <= 0.005:
        return math.inf
    # A measured spread may be 0, for which no task would be needed: it counts as at least 0.05.
    # The two pseudo-tasks add 2 to the sum of squares: with z = `quantile + Z90`, n tasks need
    # n * distance > z * sqrt(n * spread^2 + 2), which is true of the n below.
    return ((quantile + Z90) * max(spread, 0.05) / distance) ** 2 + 2 * (quantile + Z90) / distance


def _sentence(
    verdict: Verdict,
    tasks: Sequence[TaskReturns],
    num_members: int,
    found: Mapping[str, Difference],
    luck: Difference | None,
    needs: int | None,
) -> str:
    """Return the sentence of the certificate: verdict, course of the returns, and the comparison
    that comes nearest.
    """
    first, last = (np.mean([task.own[episode] for task in tasks]) for episode in (0, -1))
    course = f"from {first:.2f} in episode 1 to {last:.2f} in the last of {len(tasks[0].own)}"
    weakest = min(found, key=lambda name: found[name].low)
    nearest = min(found, key=lambda name: found[name].high)
    size = f"{len(tasks):,} tasks"
    match verdict:
        case "adapts":
            return (
                f"adapts: {course}, and at least {found[weakest].low:.2f} above "
                f"{COMPARED_IN_WORDS[weakest]}, which comes nearest ({size}, 99 %)"
            )
        case "improves without memory":
            if found["first"].low > 0:
                return (
                    f"improves without memory (practice): {course}, but at most "
                    f"{found[nearest].high:.2f} above {COMPARED_IN_WORDS[nearest]} ({size}, 99 %)"
                )
            assert luck is not None
            return (
                f"improves without memory (luck): the best of its episodes is {luck.mean:.2f} "
                f"above the first, as chance alone gives any player of several episodes, and the "
                f"last one is at most {found[nearest].high:.2f} above {COMPARED_IN_WORDS[nearest]} "
                f"({size}, 99 %)"
            )
        case "does not adapt":
            worse = " and gets worse" if found["first"].high < 0 else ""
            return (
                f"does not adapt{worse}: {course}, at most {max(0.0, found[nearest].high):.2f} "
                f"above {COMPARED_IN_WORDS[nearest]} ({size}, 99 %)"
            )
    if too_few := too_few_members(num_members):
        return f"cannot be told with these tasks ({len(tasks):,}): {course}; {too_few}"
    remedy = f"needs about {needs:,} tasks" if needs else "no number of tasks is likely to tell"
    return f"cannot be told at this size ({size}): {course}; {remedy}"


def too_few_members(num_members: int) -> str:
    """Return why so few task variants certify nothing, and the cure; "" if they are enough."""
    if num_members >= LEAST_MEMBERS:
        return ""
    return (
        f"they hide {num_members} different things, and {LEAST_MEMBERS} are needed: "
        f'`members("heldout")` has to list at least {LEAST_MEMBERS}, and --trials to be as large'
    )


Arm = Literal["own", "blind", "retry", "swapped", "noise"]
ARMS: tuple[Arm, ...] = get_args(Arm)
"""Names of the model with its history, and of its controls. The first three have returns of every
episode, the other two of the last one alone.
"""


def arm_returns(tasks: Sequence[TaskReturns]) -> dict[str, list[tuple[float, float] | None]]:
    """Return, for each arm, the mean of each episode with its 95 % half-width; None for an episode
    that the arm shares with another one and does not play itself.
    """
    episodes = {name: [getattr(task, name) for task in tasks] for name in ARMS[:3]}
    rows: dict[str, list[tuple[float, float] | None]] = {
        name: [_mean(column) for column in zip(*values, strict=True)]
        for name, values in episodes.items()
    }
    for name in ARMS[3:]:
        last = _mean([getattr(task, name) for task in tasks])
        rows[name] = [*[None] * (len(rows["own"]) - 1), last]
    return rows


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and the half-width of its 95 % interval."""
    return statistics.fmean(values), half_width(values, span=1.0)


def scaled(values: Sequence[float], least: float, most: float) -> list[float]:
    """Return returns as shares of a game's range; all 0 if the range is empty."""
    width = most - least
    return [(value - least) / width if width > 0 else 0.0 for value in values]
