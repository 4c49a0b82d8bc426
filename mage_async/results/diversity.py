"""Measure trajectory diversity: how differently a policy plays one and the same task.

LaMer (arXiv 2512.16848, figures 1 and 3) compares policies by the entropy of the distinct
trajectories that each samples for a task. Here a task is played R times: the environment repeats
its random seed, the policy samples with other seeds. The trajectory of an episode is its sequence
of (state, action) pairs, with states named by the environment's anchors. With p the shares of the
distinct trajectories among the R plays of an episode,

    H = - sum p ln p   nats, from 0 (always the same) to ln R (never twice the same),

and the mean over tasks is reported. H is the entropy of the sample. It lies below the entropy of
the policy unless R is much larger than the number of trajectories, so compare only values that
were measured with the same R.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import msgspec

from mage_async.results.intervals import half_width
from mage_async.trajectory import Kind, Trial


class Diversity(msgspec.Struct, frozen=True):
    """Hold the diversity of the trajectories in a set of tasks, by episode."""

    num_tasks: int
    repeats: int
    """Number of plays of each task."""
    entropy_by_episode: list[float]
    """Mean entropy over tasks, nats."""
    ci95_by_episode: list[float]
    """Half-widths of 95 % intervals of that mean."""
    distinct_by_episode: list[float]
    """Mean number of distinct trajectories of a task."""
    most: float
    """Largest possible entropy in nats, ln(repeats)."""


def diversity(plays: Sequence[Sequence[Trial]]) -> Diversity:
    """Compute the diversity of repeated plays.

    All episodes that were not played count as the same trajectory.

    Args:
        plays: `plays[task][repeat]`, at least one task; all tasks have the same number of plays,
            and all trials the same number of episodes.
    """
    repeats, num_episodes = len(plays[0]), plays[0][0].num_episodes
    counts = [
        [Counter(trajectory(trial, episode) for trial in trials) for trials in plays]
        for episode in range(num_episodes)
    ]
    entropies = [[_entropy(each.values()) for each in tasks] for tasks in counts]
    return Diversity(
        num_tasks=len(plays),
        repeats=repeats,
        entropy_by_episode=[math.fsum(row) / len(row) for row in entropies],
        ci95_by_episode=[half_width(row) for row in entropies],
        distinct_by_episode=[sum(map(len, tasks)) / len(tasks) for tasks in counts],
        most=math.log(repeats),
    )


def trajectory(trial: Trial, episode: int) -> Hashable:
    """Return the (state, action) pairs of an episode; the environment names its states by
    `anchor`.
    """
    return tuple(
        (turn.anchor, turn.action)
        for turn in trial.turns
        if turn.episode == episode and turn.kind is Kind.ACT
    )


def _entropy(counts: Iterable[int]) -> float:
    """Return the entropy of a sample by the counts of its values, nats."""
    counts = list(counts)
    total = sum(counts)
    return math.fsum(count / total * math.log(total / count) for count in counts)
