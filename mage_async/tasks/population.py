"""The population of a run beyond its scripted members: versions of the policy, and all ratings.

A version becomes a *rival* every so many steps, as soon as its weights are on disk; where there are
too many, a rule removes one. With `every = 0` the only rival is the newest version: self-play.

Ratings are Elo's (The Rating of Chessplayers, 1978): a player rated 400 higher is expected to score
10 to 1. A group trained is one game of the agent against its member. Its score is the mean
place of the episodes' returns between the least and the most that the environment declares, which
for a win, a draw and a loss are the usual 1, 1/2 and 0. Groups are rated one after the other, in
order of grant. The agent's rating goes on from version to version; a rival begins with the one that
the agent has then.

All of it follows from the journal's records, in their order, so that a restarted learner knows the
same population with the same ratings.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from mage_async.config.sections.admission import Keep, Population
from mage_async.environments.environment import Facts
from mage_async.trajectory import Group

PREFIX = "policy-"
ITSELF = "policy"
"""The policy in both seats, as a member; in ratings also all versions that were met as the newest.
"""
STEP = 16.0
"""Rating points that a group can move, at most."""
FADE, SLOW_FADE = 0.25, 0.05
"""Weight of a member's latest group in what the agent achieves against it now, and in what it has
achieved for long.
"""

Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]


def name_of(version: int) -> str:
    """A version as a member."""
    return f"{PREFIX}{version}"


def is_policy(member: str) -> bool:
    """Whether a member is the policy or a version of it, and none of the environment's own."""
    return member == ITSELF or version_of(member) is not None


def version_of(member: str) -> int | None:
    """The version that a member is; None for one of the environment's own."""
    digits = member.removeprefix(PREFIX)
    return int(digits) if digits != member and digits.isdecimal() else None


class Standing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is known of a member from the groups that were trained against it."""

    rating: float = 0.0
    groups: Natural = 0
    episodes: Natural = 0
    total: float = 0.0
    """Sum of the agent's returns against the member, over all episodes."""
    recent: float = 0.0
    """The agent's mean return in late groups, which count the more the later they are."""
    long: float = 0.0
    """The same over many more groups."""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A population, for the journal: all that `League` remembers."""

    rivals: tuple[Natural, ...] = ()
    """Versions that are kept, oldest first."""
    rating: float = 0.0
    """Rating of the agent."""
    standings: dict[str, Standing] = {}


ALONE = Population()
"""The environment's members alone."""


class League:
    """The members of a population and their ratings.

    Without arguments: the league of a run that asks for neither rivals nor ratings.
    """

    def __init__(self, rules: Population = ALONE, facts: Facts | None = None) -> None:
        self._rules, self._facts = rules, facts
        self.rating = 0.0
        """Rating of the agent."""
        self._kept: list[int] = []
        self._newest: int | None = None
        self._standings: dict[str, Standing] = {}

    @property
    def is_on(self) -> bool:
        """Whether anything here is asked for; otherwise nothing is counted or kept."""
        rules = self._rules
        return rules.rivals > 0 or rules.both_seats > 0 or rules.matchmaker != "decks"

    def rivals(self) -> tuple[int, ...]:
        """Versions that a new group may meet, oldest first."""
        if not self._rules.rivals or self._newest is None:
            return ()
        return tuple(self._kept) if self._rules.every else (self._newest,)

    def kept(self) -> set[int]:
        """Versions whose weights must not be removed."""
        return set(self._kept)

    def standing(self, member: str) -> Standing | None:
        """The standing of a member; None where no trial has met it."""
        return self._standings.get(member)

    def table(self) -> Table:
        """All that is to be remembered."""
        return Table(rivals=tuple(self._kept), rating=self.rating, standings=dict(self._standings))

    def begin(self, table: Table | None) -> None:
        """Take over what the journal says."""
        table = table if table is not None and self.is_on else Table()
        self._kept, self.rating = list(table.rivals), table.rating
        self._standings = dict(table.standings)
        self._newest = max(self._kept, default=None)

    def takes(self, version: int) -> bool:
        """Whether a version is a rival one day, for some time; its weights have to last."""
        rules = self._rules
        return rules.rivals > 0 and (not rules.every or version % rules.every == 0)

    def wants(self, version: int) -> bool:
        """Whether a version will be a rival when its weights are on disk, and is none yet.

        Until they are, no group of this version or a newer one is granted, so that the member a
        group meets does not depend on the speed of a disk.
        """
        if not self._rules.every:
            return self.takes(version) and (self._newest is None or version > self._newest)
        return self.takes(version) and version not in self._kept

    def published(self, version: int) -> None:
        """The weights of a version are on disk, and the journal says so."""
        if self._rules.every and self.wants(version):
            self._kept.append(version)
            self._standings[name_of(version)] = Standing(rating=self.rating)
            while len(self._kept) > self._rules.kept:
                self._kept.remove(one_too_many(self._kept, self._ratings(), self._rules.keep))
        self._newest = max(version, self._newest or 0)

    def trained(self, groups: Sequence[Group]) -> None:
        """Groups were trained, in order of grant, and the journal says so."""
        if self.is_on:
            for group in groups:
                self._rate(group)

    def _ratings(self) -> dict[int, float]:
        return {each: self._standings[name_of(each)].rating for each in self._kept}

    def _rate(self, group: Group) -> None:
        member = group.trials[0].task.member
        if not self._rules.every and version_of(member) is not None:
            member = ITSELF
        returns = [each for trial in group.trials for each in trial.episode_rewards()]
        past = self._standings.get(member, Standing())
        mean = sum(returns) / len(returns)
        change = STEP * (self._score(mean) - expected(self.rating, past.rating))
        if member == ITSELF:
            change = 0.0  # against itself there is nothing to rate
        self.rating += change
        self._standings[member] = Standing(
            rating=past.rating - change,
            groups=past.groups + 1,
            episodes=past.episodes + len(returns),
            total=past.total + sum(returns),
            recent=mean if not past.groups else past.recent + FADE * (mean - past.recent),
            long=mean if not past.groups else past.long + SLOW_FADE * (mean - past.long),
        )

    def _score(self, value: float) -> float:
        """0 for the least that the environment declares, 1 for the most."""
        assert self._facts is not None, "whoever rates knows the environment"
        least, most = self._facts.bounds()
        return min(1.0, max(0.0, (value - least) / (most - least)))


def expected(rating: float, other: float) -> float:
    """The score to be expected against another: 10 to 1 for 400 points more."""
    return 1 / (1 + 10 ** ((other - rating) / 400))


def one_too_many(versions: Sequence[int], ratings: Mapping[int, float], keep: Keep) -> int:
    """The version to give up; never the newest, which is the last, unless it is alone.

    `newest` gives up the oldest, `best` the lowest rated (of equals the oldest), `spread` one
    between the oldest and the newest, so that the gap it leaves is the smallest (of equals the
    oldest).
    """
    older, inner = versions[:-1] or versions, range(1, len(versions) - 1)
    if keep == "best":
        return min(older, key=lambda version: (ratings[version], version))
    if keep == "newest" or not inner:
        return older[0]
    return versions[min(inner, key=lambda place: versions[place + 1] - versions[place - 1])]
