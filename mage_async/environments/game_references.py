"""Measure returns of scripted players by sampling, with confidence intervals, for values that are
not known exactly.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from mage_async.environments.environment import Environment, Script, Split
from mage_async.trajectory import Task

NUM_TRIALS = 200
"""Number of trials for each measured value."""


class Sampled(tuple[float, ...]):
    """Hold sample means of returns, one per episode. Reports distinguish measured values from exact
    ones by this type: exact values are plain tuples.
    """

    half_widths: tuple[float, ...]
    """Half-widths of the means' 95 % confidence intervals."""

    def __new__(cls, means: Iterable[float], half_widths: Iterable[float]) -> "Sampled":
        made = super().__new__(cls, means)
        made.half_widths = tuple(half_widths)
        return made

    def repeated(self, count: int) -> "Sampled":
        """Return the same means for `count` times as many episodes."""
        return Sampled(self * count, self.half_widths * count)


def half_widths_of(references: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """Return the half-widths of the sampled references, by name."""
    return {
        name: values.half_widths
        for name, values in references.items()
        if isinstance(values, Sampled)
    }


def mean_of(every: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return means over several independent references: `Sampled` if one of them is."""
    means = tuple(statistics.fmean(values) for values in zip(*every, strict=True))
    sampled = [each.half_widths for each in every if isinstance(each, Sampled)]
    if not sampled:
        return means
    # Half-widths of independent means add up in squares.
    return Sampled(means, (math.hypot(*each) / len(every) for each in zip(*sampled, strict=True)))


def trial_returns(
    environment: Environment, task: Task, script: Script, num_episodes: int
) -> list[float]:
    """Play one trial by a script, and return the reward of each episode."""
    earned = [0.0] * num_episodes
    for episode in range(num_episodes):
        play = environment.begin(task, episode)
        while play.legal_actions():
            earned[episode] += play.act(script.choose(play)).reward
    return earned


def scripted_returns(
    environment: Environment,
    split: Split,
    num_episodes: int,
    make: Callable[[random.Random], Script],
    num_trials: int = NUM_TRIALS,
) -> Sampled:
    """Measure the mean return of each episode, divided by `Facts.units`, over trials of a script.

    Of M variants and S seats, trial i plays variant i mod M from seat (i // M) mod S.

    Args:
        make: Returns the script of a trial, which draws from the given random source.
        num_trials: Number of trials, at least 2.
    """
    members, seats, units = environment.members(split), environment.seats(), environment.facts.units
    trials = []
    for number in range(num_trials):
        script = make(random.Random(f"reference/{number}"))
        seat = seats[number // len(members) % len(seats)]
        task = Task(environment.facts.name, members[number % len(members)], number, seat)
        trials.append(trial_returns(environment, task, script, num_episodes))
    by_episode = list(zip(*trials, strict=True))
    return Sampled(
        (statistics.fmean(each) / units for each in by_episode),
        (1.96 * statistics.stdev(each) / math.sqrt(num_trials) / units for each in by_episode),
    )
