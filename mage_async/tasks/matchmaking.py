"""Matchmaking: the member that the n-th group meets, by a rule over what is known of the members.

Each rule is a small function. All draws depend on the run's seed and the group's number alone, so a
restarted learner, which knows the same ratings, draws the same members.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mage_async.config.sections.admission import Matchmaker as Rule
from mage_async.config.sections.admission import Population
from mage_async.environments.environment import Environment
from mage_async.tasks.population import ITSELF, League, is_policy, name_of
from mage_async.trajectory import Task

SHARE_OF_ANY = 0.1
"""Share of groups that meet a member drawn uniformly, so that no regret grows old."""


class Matchmaker:
    """Gives tasks as `task_of` does, with the member that the rule chooses.

    Args:
        task_of: the task of the n-th group, with members in shuffled decks.
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
        """The task of the `number`-th group, given what is known of the members now."""
        task = self._task_of(number)
        if not self._league.is_on:
            return task
        source = random.Random(f"{self._seed}/match/{number}")
        drawn, share = source.random(), self._rules.both_seats
        if drawn < share:
            return replace(task, member=ITSELF)
        rivals = tuple(name_of(version) for version in self._league.rivals())
        place = number % self._groups_per_step
        num_rival_places = round(self._rules.rivals * self._groups_per_step)
        if self._rules.matchmaker == "fixed":
            is_rivals = place < num_rival_places
        else:
            is_rivals = drawn < share + self._rules.rivals
        if rivals and is_rivals:
            return replace(task, member=self._chosen(rivals, place, source, task.member))
        place -= num_rival_places if rivals else 0
        return replace(task, member=self._chosen(self._members, place, source, task.member))

    def _chosen(
        self, names: Sequence[str], place: int, source: random.Random, from_deck: str
    ) -> str:
        rule: Rule = self._rules.matchmaker
        if rule == "decks":
            return from_deck if from_deck in names else source.choice(names)
        if rule == "fixed":
            return fixed(names, place)
        if rule == "resampled":
            return source.choice(names)
        if rule == "progress":
            return prioritised({name: self._progress(name) for name in names}, source)
        return prioritised({name: self._regret(name) for name in names}, source)

    def _progress(self, member: str) -> float:
        """How much the agent's return against a member has changed of late, in either direction:
        what is forgotten is practised again. A member that was never met may change most.
        """
        standing = self._league.standing(member)
        if standing is None or not standing.groups:
            least, most = self._environment.facts.bounds()
            return most - least
        return abs(standing.recent - standing.long)

    def _regret(self, member: str) -> float:
        """The best return against a member, minus the agent's recent return."""
        environment, standing = self._environment, self._league.standing(member)
        is_met = standing is not None and standing.groups > 0
        least, most = environment.facts.bounds()
        achieved = standing.recent if standing and is_met else least
        is_own = not is_policy(member)
        best = environment.best_return(member) if is_own else most
        return max(0.0, best - achieved)


def fixed(names: Sequence[str], place: int) -> str:
    """As in MAGE, whose code fills a step with blocks of one member each: a place of the step meets
    the same member in every step, as long as the members stay the same.
    """
    return names[place % len(names)]


def prioritised(weights: Mapping[str, float], source: random.Random) -> str:
    """In proportion to weights that are not negative, of which equal ones are drawn alike.

    The weight is the regret, the return of the best answer minus what the agent achieves now: for a
    rival, whose best response is unknown, the best return is the declared maximum, and the rule is
    AlphaStar's prioritised fictitious self-play with `f(x) = 1 - x` (Vinyals et al. 2019). Or it is
    the progress, the distance between a fast and a slow mean of the agent's returns (Kanitscheider
    et al., arXiv 2106.14876).
    """
    names = list(weights)
    if source.random() < SHARE_OF_ANY or not any(weights.values()):
        return source.choice(names)
    return source.choices(names, [weights[name] for name in names])[0]
