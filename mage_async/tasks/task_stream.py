"""The task stream: the task of the n-th group, a function of the seed and n alone.

A resumed run therefore draws the same tasks.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from mage_async.config.learning import Population
from mage_async.environments.environment import Environment, Split
from mage_async.environments.mix import Mix
from mage_async.tasks.league import ITSELF, League, name_of
from mage_async.tasks.matchmaking import Draw
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
        self._parts = environment.parts if isinstance(environment, Mix) else ()
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


class MatchedTasks:
    """Tasks of `task_of`, with the member that the population's matchmaker chooses.

    Args:
        task_of: gives the task of the n-th group, with members in shuffled decks.
    """

    def __init__(
        self,
        task_of: Callable[[int], Task],
        environment: Environment,
        league: League,
        rules: Population,
        *,
        seed: int,
        groups_per_step: int,
    ) -> None:
        self._task_of, self._environment, self._league = task_of, environment, league
        self._rules, self._seed, self._groups_per_step = rules, seed, groups_per_step
        self._members = environment.members("train")

    def task(self, number: int) -> Task:
        """Return the task of the `number`-th group, given the current ratings."""
        task = self._task_of(number)
        if not self._league.is_on:
            return task
        rules = self._rules
        source = random.Random(f"{self._seed}/match/{number}")
        drawn = source.random()
        self_play = self._league.self_play_share
        if drawn < self_play:
            return replace(task, member=ITSELF)
        rivals = tuple(name_of(version) for version in self._league.rivals())
        place = number % self._groups_per_step
        num_rival_places = round(rules.rivals * self._groups_per_step)
        if rules.matchmaker.by_place:
            meets_rival = place < num_rival_places
        else:
            meets_rival = drawn < self_play + rules.rivals
        names: Sequence[str] = self._members
        if rivals and meets_rival:
            names = rivals
        elif rivals:
            place -= num_rival_places
        draw = Draw(place, task.member, source, self._league, self._environment)
        return replace(task, member=rules.matchmaker.choose(names, draw))


def evaluation_tasks(
    environment: Environment, split: Split, num_trials: int, seed: int
) -> list[Task]:
    """A fixed set: members equally often (within one), seats in turn, seeds of their own.

    Of a mix: parts in turn, each with the tasks that it has alone.
    """
    if isinstance(environment, Mix):
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


def _tasks_in_turn(mix: Mix, split: Split, num_trials: int, seed: int) -> list[Task]:
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


# In groups in which the policy plays both seats trials come in pairs, and both are trained on. The
# trial of an even index has the task's seat, the next one is the same play from the other seat.


def num_seats(member: str) -> int:
    """How many seats of a group's trials are the policy's: 2 where its member is the policy."""
    return 2 if member == ITSELF else 1


def plays(task: Task, num_trials: int) -> range:
    """Indices of the trials that begin a play each, where a group has so many trials."""
    return range(0, num_trials, num_seats(task.member))


def task_of(task: Task, index: int) -> Task:
    """The task of a group as one of its trials has it."""
    return task.across() if index % num_seats(task.member) else task
