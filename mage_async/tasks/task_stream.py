"""Draw the tasks of a run: those that groups train on, and the fixed ones of evaluations.

The task of the n-th group depends on the run's seed and on n; in a curriculum, also on the policy
version; if the policy meets its past versions, also on their ratings at that time. So a resumed run
draws the same tasks.

A *member* is the hidden part of a task, by name: an opponent or a variant of the environment, or a
past version of the policy (`league.py`). In a *mixed group* (`population.mixed_groups`) each trial
meets a member of its own; the task then names all of them, joined by `MIXED`. A *seat* is the
player that the agent is, if a game has several.
"""

import random
from dataclasses import replace

from mage_async.config.schema import Config, Population
from mage_async.environments.environment import Environment, Split
from mage_async.environments.mix import Mix, MixComponent
from mage_async.environments.user_calls import as_config_error
from mage_async.tasks.league import ITSELF, League, name_of
from mage_async.tasks.matchmaking import Draw
from mage_async.trajectory import Task

MIXED = " | "
"""Separator of the members of a mixed group, in the member name of its task."""
MOST_MIXED_CHARS = 200
"""Largest length of such a member name, in characters: messages hold no longer name."""
CURVE_SEED, FINAL_SEED = 1, 2
"""Seeds of two fixed sets of tasks: those of the learning curve, which is evaluated during a run,
and those of the evaluation at its end. Each set is the same for every run of an environment. The
sets share no member if the split has enough members for both. Otherwise two tasks of a shared
member differ in their seed alone, and in an environment without chance they are the same.
"""


class TaskStream:
    """Draw tasks whose members come from shuffled decks: each is met once before any is met twice.

    In a mix, first a component is drawn from a deck that holds each component as often as its
    share, and then a member from a deck of that component. In a curriculum, components come one
    after another.
    """

    def __init__(self, environment: Environment, seed: int) -> None:
        self._name, self._seed = environment.facts.name, seed
        self._parts = environment.parts if isinstance(environment, Mix) else ()
        self._steps_per_part = environment.steps_per_part if isinstance(environment, Mix) else 0
        self._streams = {part.label: TaskStream(part.environment, seed) for part in self._parts}
        self._members = environment.members("train")
        self._seats = environment.seats()
        self._deck: tuple[int, list[str]] = -1, []
        """Number of the deck that was shuffled last, and its order. Kept for later groups, because
        a deck of a million members takes half a second to shuffle."""

    def task(self, number: int, version: int = 0) -> Task:
        """Return the task of the `number`-th group, from 0, which is granted at a policy version;
        only a curriculum depends on the version.
        """
        if self._parts:
            return self._from_mix(number, version)
        deck, place = divmod(number, len(self._members))
        if deck != self._deck[0]:
            self._deck = deck, list(self._members)
            random.Random(f"{self._seed}/deck/{deck}").shuffle(self._deck[1])
        source = random.Random(f"{self._seed}/task/{number}")
        return Task(
            self._name, self._deck[1][place], source.getrandbits(40), source.choice(self._seats)
        )

    def _from_mix(self, number: int, version: int) -> Task:
        """Return the task of group `number` in a mix of environments: that of the component whose
        turn it is.
        """
        if self._steps_per_part:
            component = min(version // self._steps_per_part, len(self._parts) - 1)
            return self._of_part(self._parts[component], number)
        cards = [part for part in self._parts for _ in range(part.share)]
        deck, place = divmod(number, len(cards))
        random.Random(f"{self._seed}/parts/{deck}").shuffle(cards)
        part = cards[place]
        # Number of earlier groups of this component: those of earlier decks, and those of this
        # deck.
        return self._of_part(part, deck * part.share + cards[:place].count(part))

    def _of_part(self, part: MixComponent, number: int) -> Task:
        """Return the `number`-th task of a component."""
        task = self._streams[part.label].task(number)
        return replace(task, environment=self._name, member=part.member(task.member))


class MatchedTasks:
    """Draw tasks whose members the configuration's matchmaker chooses (`matchmaking.py`).

    Args:
        environment: The environment whose members are met.
        league: The past versions of the policy, and their ratings.
        config: Configuration of the run; all draws depend on its seed.
    """

    def __init__(self, environment: Environment, league: League, config: Config) -> None:
        self._environment, self._league, self._config = environment, league, config.population
        self._seed, self._groups_per_step = config.seed, config.admission.groups_per_step
        self._stream = TaskStream(environment, config.seed)
        self._members = environment.members("train")

    def task(self, number: int, version: int = 0) -> Task:
        """Return the task of the `number`-th group, which is granted at a policy version, given the
        current ratings.
        """
        task, config = self._stream.task(number, version), self._config
        if config.mixed_groups:
            source = random.Random(f"{self._seed}/mixed/{number}")
            order = source.sample(self._members, len(self._members))  # all, shuffled
            while len(MIXED.join(order)) > MOST_MIXED_CHARS:
                order.pop()
            return replace(task, member=MIXED.join(order))
        if not self._league.is_on:
            return task
        source = random.Random(f"{self._seed}/match/{number}")
        # One draw decides between self-play, a past policy, and a member of the environment.
        drawn = source.random()
        self_play = self._league.self_play_share
        if drawn < self_play:
            return replace(task, member=ITSELF)
        past_policies = tuple(name_of(version) for version in self._league.rivals())
        place = number % self._groups_per_step
        num_rival_places = rival_places(config, self._groups_per_step)
        if config.matchmaker.by_place:  # the first groups of each step meet past policies
            meets_rival = place < num_rival_places
        else:
            meets_rival = drawn < self_play + config.rivals
        names = self._members
        if past_policies and meets_rival:
            names = past_policies
        elif past_policies:
            place -= num_rival_places  # counted among the groups that meet the environment
        draw = Draw(place, task.member, source, self._league, self._environment)
        return replace(task, member=config.matchmaker.checked(names, draw))


def rival_places(config: Population, groups_per_step: int) -> int:
    """Return how many groups of a step meet past policies if the place in the step decides that."""
    return round(config.rivals * groups_per_step)


def evaluation_tasks(
    environment: Environment, split: Split, num_trials: int, seed: int
) -> list[Task]:
    """Return a fixed set of tasks, in passes over the members of the split.

    Members occur equally often (within one). Seats occur about equally often in every pass and in
    every part of a pass, and a member changes its seat from pass to pass. In a mix, components take
    turns, each with the tasks that it would have alone.
    """
    if isinstance(environment, Mix):
        return _tasks_in_turn(environment, split, num_trials, seed)
    members, seats = environment.members(split), environment.seats()
    if seed == CURVE_SEED:
        # The final set begins with the first members. The curve, by which a checkpoint may be
        # chosen, begins with the last ones.
        members = members[::-1]
    source = random.Random(f"{seed}/evaluation/{split}")
    # Seats of the members in the first pass, as indices. Their order is random: in a fixed order,
    # if every second member had a certain trait, all members with that trait would get the same
    # seat.
    shuffler, first_seats = random.Random(f"{seed}/seats/{split}"), list[int]()
    while len(first_seats) < min(len(members), num_trials):
        first_seats += shuffler.sample(range(len(seats)), len(seats))
    tasks = list[Task]()
    for number in range(num_trials):
        pass_number, place = divmod(number, len(members))
        seat = seats[(first_seats[place] + pass_number) % len(seats)]
        task_seed = source.getrandbits(40)
        tasks.append(Task(environment.facts.name, members[place], task_seed, seat))
    return tasks


def _tasks_in_turn(mix: Mix, split: Split, num_trials: int, seed: int) -> list[Task]:
    """Return tasks of the components of a mix in turn, `num_trials` in all."""
    # Tasks per component, rounded up; surplus ones are cut off below.
    parts, most = mix.parts, -(-num_trials // len(mix.parts))
    own = [evaluation_tasks(part.environment, split, most, seed) for part in parts]
    return [
        replace(task, environment=mix.facts.name, member=part.member(task.member))
        for row in zip(*own, strict=True)
        for part, task in zip(parts, row, strict=True)
    ][:num_trials]


def swapped(task: Task, environment: Environment, split: Split) -> Task:
    """Return the task with another member, in the same seat and with the same seed.

    The environment chooses members such that knowledge of the first is of no use against the other.

    Raises:
        ConfigError: a user's `swaps` raised.
    """
    with as_config_error(environment.facts.name):
        choices = environment.swaps(task.member, split)
    source = random.Random(f"{task.seed}/swap")
    return Task(task.environment, source.choice(choices), task.seed, task.seat)


# If the policy plays both seats, the trials of a group come in pairs, and both are trained on: the
# trial of an even index has the task's seat, and the next one is the same game from the other seat.


def num_seats(member: str) -> int:
    """Return how many seats of a game the policy plays: 2 if the member is the policy itself."""
    return 2 if member == ITSELF else 1


def indices_to_begin(task: Task, num_trials: int) -> range:
    """Return the indices of the trials to begin for a group.

    If the policy plays both seats, each beginning makes two trials, and odd indices are left out.
    """
    return range(0, num_trials, num_seats(task.member))


def own_task(task: Task, index: int) -> Task:
    """Return the task of trial number `index` of a group: the group's task from the seat of that
    trial, or, in a mixed group, against the member of that trial.
    """
    if MIXED in task.member:
        members = task.member.split(MIXED)
        return replace(task, member=members[index % len(members)])
    return task.from_other_seat() if index % num_seats(task.member) else task
