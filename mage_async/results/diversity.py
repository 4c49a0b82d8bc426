"""Trajectory diversity: how differently a policy plays one and the same task.

LaMer (arXiv 2512.16848, figures 1 and 3) compares policies by the entropy of the distinct
trajectories that each samples for a task. Here a task is played R times with luck of the policy's
own and equal luck of the environment; the trajectory of an episode is its sequence of (state,
action), a state by the environment's anchor. With p the shares of the R plays that the distinct
trajectories of an episode have,

    H = - sum p ln p   nats, from 0 (always the same) to ln R (never twice the same),

a mean over tasks. It is the entropy of the sample, so it lies below that of the policy where R is
not much larger than the number of trajectories: compare figures of equal R.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import msgspec

from mage_async.results.intervals import half_width
from mage_async.trajectory import Kind, Trial


class Diversity(msgspec.Struct, frozen=True):
    """Of a set of tasks, by episode."""

    num_tasks: int
    repeats: int
    """Plays of each task."""
    entropy_by_episode: list[float]
    """nats"""
    ci95_by_episode: list[float]
    """Half-widths of 95 % intervals over tasks."""
    distinct_by_episode: list[float]
    """Mean number of distinct trajectories of a task."""
    most: float
    """The largest entropy that so many plays can have: ln(repeats)."""


def diversity(plays: Sequence[Sequence[Trial]]) -> Diversity:
    """Of equally many trials of each task; an episode that was not played is equal to another such.

    Args:
        plays: `plays[task][repeat]`, of equal numbers of episodes.
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
    """What an episode was, action by action, each with the state it was taken in."""
    return tuple(
        (turn.anchor, turn.action)
        for turn in trial.turns
        if turn.episode == episode and turn.kind is Kind.ACT
    )


def _entropy(counts: Iterable[int]) -> float:
    """Of a sample, in nats."""
    counts = list(counts)
    total = sum(counts)
    return math.fsum(count / total * math.log(total / count) for count in counts)
