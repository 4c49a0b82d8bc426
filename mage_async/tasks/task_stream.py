"""The task stream: the task of the n-th group, a function of the seed and n alone.

A resumed run therefore draws the same tasks.
"""

import random
from dataclasses import replace

from mage_async.environments.environment import Environment, Split
from mage_async.environments.mix.parts import Mixed
from mage_async.trajectory import Task

CURVE_SEED, FINAL_SEED = 1, 2
"""Seeds of the evaluations' tasks: those of the learning curve and those of the final sets are
disjoint, and the same for every run of an environment.
"""


class TaskStream:
    """Train members in shuffled decks: each is met once before any is met twice.

    Of a mix: parts in shuffled decks with their shares, and the members of each part so.
    """

    def __init__(self, environment: Environment, seed: int) -> None:
        self._name, self._seed = environment.facts.name, seed
        self._parts = environment.parts if isinstance(environment, Mixed) else ()
        self._streams = {part.label: TaskStream(part.environment, seed) for part in self._parts}
        self._members = environment.members("train")
        self._seats = environment.seats()

    def task(self, number: int) -> Task:
        """The task of the `number`-th group."""
        if self._parts:
            return self._mixed(number)
        deck, place = divmod(number, len(self._members))
        order = list(self._members)
        random.Random(f"{self._seed}/deck/{deck}").shuffle(order)
        source = random.Random(f"{self._seed}/task/{number}")
        return Task(self._name, order[place], source.getrandbits(40), source.choice(self._seats))

    def _mixed(self, number: int) -> Task:
        """The task of a part: of its groups so far, the next one."""
        cards = [part for part in self._parts for _ in range(part.share)]
        deck, place = divmod(number, len(cards))
        random.Random(f"{self._seed}/parts/{deck}").shuffle(cards)
        part = cards[place]
        task = self._streams[part.label].task(deck * part.share + cards[:place].count(part))
        return replace(task, environment=self._name, member=part.member(task.member))


def evaluation_tasks(
    environment: Environment, split: Split, num_trials: int, seed: int
) -> list[Task]:
    """A fixed set: members equally often (within one), seats in turn, seeds of their own.

    Of a mix: parts in turn, each with the tasks that it has alone.
    """
    if isinstance(environment, Mixed):
        return _tasks_in_turn(environment, split, num_trials, seed)
    members, seats = environment.members(split), environment.seats()
    source = random.Random(f"{seed}/evaluation/{split}")
    return [
        Task(
            environment.facts.name,
            members[number % len(members)],
            source.getrandbits(40),
            seats[number // len(members) % len(seats)],
        )
        for number in range(num_trials)
    ]


def _tasks_in_turn(mix: Mixed, split: Split, num_trials: int, seed: int) -> list[Task]:
    parts, most = mix.parts, -(-num_trials // len(mix.parts))
    own = [evaluation_tasks(part.environment, split, most, seed) for part in parts]
    return [
        replace(task, environment=mix.facts.name, member=part.member(task.member))
        for row in zip(*own, strict=True)
        for part, task in zip(parts, row, strict=True)
    ][:num_trials]


def swapped(task: Task, environment: Environment, split: Split) -> Task:
    """The task with another member in the same seat and with the same luck.

    What was learned about the first member must not help against the other.
    """
    choices = environment.swaps(task.member, split)
    source = random.Random(f"{task.seed}/swap")
    return Task(task.environment, source.choice(choices), task.seed, task.seat)
