"""Choose the member (opponent or task variant) of a group, by one matchmaker class for each rule.

A matchmaker class is also the schema of its own keys: the configuration `population.matchmaker` is
decoded into an instance. To add one, copy a class and give it a `tag`, which is its name. All draws
depend on the run's seed, the group's number and the ratings alone, so a restarted learner draws the
same members.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mage_async.config.section import Variant
from mage_async.errors import ConfigError
from mage_async.user_modules import as_config_error

if TYPE_CHECKING:
    from mage_async.environments.environment import Environment
    from mage_async.tasks.league import League

SHARE_OF_ANY = 0.1
"""Share of groups that meet a member drawn uniformly. So members with small weights are met now and
then too, and their returns are measured again.
"""


@dataclass(frozen=True, slots=True)
class Draw:
    """Hold the facts by which a matchmaker chooses the member of one group."""

    place: int
    """Number of the group in its step, from 0, counted only among groups that choose from the same
    names. Grants are counted in blocks of `admission.groups_per_step`, one per step. The step may
    train other groups than those of its block: if one of them is dropped, or if the admission
    policy does not train in order of grant.
    """
    from_deck: str
    """Name of the environment's member that is next in the shuffled decks."""
    source: random.Random
    """Random generator of this group alone."""
    league: "League"
    environment: "Environment"


class Matchmaker(Variant):
    """Choose the member that a group meets."""

    by_place: ClassVar[bool] = False
    """Whether the first groups of each step meet the past policies; if not, a random draw decides
    for each group whether it meets one.
    """

    def choose(self, names: Sequence[str], draw: Draw) -> str:
        """Choose one of `names`: members of the environment, or past policies."""
        raise NotImplementedError("write its method `choose`")

    def checked(self, names: Sequence[str], draw: Draw) -> str:
        """Return the result of `choose`, and check it if the class is a user's own.

        Raises:
            ConfigError: a user's own class raised an exception, or chose a name that is not in
                `names`, such as a held-out member, on which the policy would be trained.
        """
        if ":" not in self.kind:
            return self.choose(names, draw)
        what = f"matchmaker {self.kind!r}"
        with as_config_error(what):
            chosen = self.choose(names, draw)
        if chosen not in names:
            raise ConfigError(f"{what} chose {chosen!r:.60}: choose one of {', '.join(names):.200}")
        return names[names.index(chosen)]  # a text of NumPy could not be written to the journal


class Decks(Matchmaker, tag="decks"):
    """Choose the environment's members from shuffled decks, in which each is met once before any is
    met twice, and past policies uniformly.
    """

    def choose(self, names: Sequence[str], draw: Draw) -> str:
        """Choose the deck's member, or any past policy."""
        return draw.from_deck if draw.from_deck in names else draw.source.choice(names)


class Fixed(Matchmaker, tag="fixed"):
    """Let the n-th group of every step meet the same member, as in MAGE's code. Groups are counted
    by grant (`Draw.place`). If a group is dropped, the step trains a later group instead, which may
    meet another member."""

    by_place: ClassVar[bool] = True

    def choose(self, names: Sequence[str], draw: Draw) -> str:
        """Choose by the number of the group in its step."""
        return names[draw.place % len(names)]


class Resampled(Matchmaker, tag="resampled"):
    """Choose any member, uniformly."""

    def choose(self, names: Sequence[str], draw: Draw) -> str:
        """Choose uniformly."""
        return draw.source.choice(names)


class Prioritised(Matchmaker, tag="prioritised"):
    """Choose in proportion to the regret: how much the agent could still gain against a member."""

    # The best response to a past policy is unknown: the best return against it is taken to be the
    # environment's maximum. Among past policies, the rule is then AlphaStar's prioritised
    # fictitious self-play with `f(x) = 1 - x` (Vinyals et al. 2019), except for the uniform draws
    # of `SHARE_OF_ANY`.

    def choose(self, names: Sequence[str], draw: Draw) -> str:
        """Choose by regret."""
        return prioritised(names, lambda name: self._regret(name, draw), draw.source)

    def _regret(self, member: str, draw: Draw) -> float:
        """Return the best return against a member minus the agent's recent mean return."""
        # Not imported above: the league imports the configuration, which imports this module.
        from mage_async.tasks.league import is_policy

        standing = draw.league.standing(member)
        least, most = draw.environment.facts.bounds()
        best = most if is_policy(member) else draw.environment.best_return(member)
        return max(0.0, best - (standing.fast_mean if standing and standing.groups else least))


class Progress(Matchmaker, tag="progress"):
    """Choose in proportion to how much the agent's return against a member has changed lately."""

    # The distance between a fast and a slow mean of the agent's returns (Kanitscheider et al.,
    # arXiv 2106.14876), in either direction: a member that the agent has forgotten is practised
    # again.

    def choose(self, names: Sequence[str], draw: Draw) -> str:
        """Choose by progress."""
        return prioritised(names, lambda name: self._progress(name, draw), draw.source)

    def _progress(self, member: str, draw: Draw) -> float:
        """Return the measured change of the agent's return, plus the change that is still possible.

        The possible change is the whole range of returns for a member that was never met, and
        shrinks by the factor `1 - FAST_WEIGHT` with each group. Without this term a member would
        have the weight 0 after one group, because both means are equal then.
        """
        from mage_async.tasks.league import FAST_WEIGHT

        least, most = draw.environment.facts.bounds()
        standing = draw.league.standing(member)
        if standing is None:
            return most - least
        unknown = (most - least) * (1 - FAST_WEIGHT) ** standing.groups
        return abs(standing.fast_mean - standing.slow_mean) + unknown


def prioritised(names: Sequence[str], weight: Callable[[str], float], source: random.Random) -> str:
    """Draw a name in proportion to its weight, which is not negative. If all weights are 0, and in
    `SHARE_OF_ANY` of the draws, draw uniformly.
    """
    weights: Mapping[str, float] = {name: weight(name) for name in names}
    if source.random() < SHARE_OF_ANY or not any(weights.values()):
        return source.choice(list(weights))
    return source.choices(list(weights), list(weights.values()))[0]
