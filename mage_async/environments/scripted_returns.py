"""Returns of scripted players, measured where no exact value is known."""

import random
from collections.abc import Callable

from mage_async.environments.environment import Environment, Script, Split
from mage_async.trajectory import Task

NUM_TRIALS = 200


def scripted_returns(
    environment: Environment,
    split: Split,
    num_episodes: int,
    make: Callable[[random.Random], Script],
    num_trials: int = NUM_TRIALS,
) -> tuple[float, ...]:
    """Mean return of each episode over trials of a script, members and seats in turn."""
    members, seats = environment.members(split), environment.seats()
    sums = [0.0] * num_episodes
    for number in range(num_trials):
        script = make(random.Random(f"reference/{number}"))
        seat = seats[number // len(members) % len(seats)]
        task = Task(environment.facts.name, members[number % len(members)], number, seat)
        for episode in range(num_episodes):
            play = environment.begin(task, episode)
            while play.legal_actions():
                sums[episode] += play.act(script.choose(play)).reward
    return tuple(each / num_trials / environment.facts.units for each in sums)
