"""Keep the league: past versions of the policy that play as opponents, and the ratings of all
members.

A group plays against a *member*, which has a name: a hidden opponent or a task variant of the
environment, or a version of the policy. Every `population.every` steps a version of the policy
becomes a *rival*, a past policy in the opponent's seat, once its weights are on disk. If there are
too many rivals, the rule `population.keep` removes one. With `every = 0` the only rival is the
newest version: self-play.

Ratings are Elo ratings (The Rating of Chessplayers, 1978): a player rated 400 points higher is
expected to score 10 to 1. Each trained group counts as one game of the agent against its member.
The score of the game is the group's mean return, scaled to 0..1 between the bounds that the
environment declares, so that a win, a draw and a loss score 1, 1/2 and 0. Groups are rated in order
of grant. The agent keeps its rating from version to version; a new rival starts with the agent's
rating.

The league is a function of the journal's records in their order, so that a restarted learner has
the same rivals and ratings.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from mage_async.config.schema import Keep, Population
from mage_async.environments.environment import Facts
from mage_async.trajectory import Group

PREFIX = "policy-"
"""Prefix of the member name of a version: it is `policy-VERSION`."""
ITSELF = "policy"
"""Member name of the policy that plays both seats. If the newest version is the only rival, all
versions are rated together under this name.
"""
MAX_RATING_CHANGE = 16.0
"""Largest number of rating points by which one group changes a rating."""
FAST_WEIGHT, SLOW_WEIGHT = 0.25, 0.05
"""Weight of the latest group in the fast and in the slow moving average of the agent's returns
against a member.
"""

Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]


def name_of(version: int) -> str:
    """Return the member name of a version."""
    return f"{PREFIX}{version}"


def is_policy(member: str) -> bool:
    """Return whether a member is the policy or one of its versions."""
    return member == ITSELF or version_of(member) is not None


def version_of(member: str) -> int | None:
    """Return the version of a member; None for a member of the environment."""
    digits = member.removeprefix(PREFIX)
    return int(digits) if digits != member and digits.isdecimal() else None


class Standing(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    rename={"fast_mean": "recent", "slow_mean": "long"},  # names in the journal
):
    """Hold rating and returns of a member, from the groups that were trained against it."""

    rating: float = 0.0
    groups: Natural = 0
    episodes: Natural = 0
    total: float = 0.0
    """Sum of the agent's returns against the member, over all episodes."""
    fast_mean: float = 0.0
    """Fast moving average of the agent's mean return in a group."""
    slow_mean: float = 0.0
    """Slow moving average of the agent's mean return in a group."""


class LeagueState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Hold the state of a `League`, for the journal."""

    rivals: tuple[Natural, ...] = ()
    """Versions in the opponent's seat, oldest first."""
    rating: float = 0.0
    """Rating of the agent."""
    standings: dict[str, Standing] = {}
    """Standing of each member that is a rival or was met, by name."""


class League:
    """Hold the rivals of a run, and the ratings of all members.

    Without arguments it has no rivals and keeps no ratings.

    Args:
        config: Table `population` of the configuration.
        facts: Facts of the environment, which bound its returns; needed once a group is rated.
        self_play_share: Share of groups in which the policy plays both seats, in 0..1.
    """

    def __init__(
        self,
        config: Population | None = None,
        facts: Facts | None = None,
        self_play_share: float = 0.0,
    ) -> None:
        self._config, self._facts = config or Population(), facts
        self.self_play_share = self_play_share
        self.rating = 0.0
        """Rating of the agent."""
        self._kept: list[int] = []
        """Versions kept as rivals, oldest first; none if the newest is the only rival."""
        self._newest: int | None = None
        """The newest version whose weights are on disk."""
        self._standings: dict[str, Standing] = {}

    @property
    def is_on(self) -> bool:
        """Whether the configuration uses rivals, self-play or a matchmaker other than the default
        ("decks"); otherwise nothing is rated or kept.
        """
        config = self._config
        return config.rivals > 0 or self.self_play_share > 0 or config.matchmaker.kind != "decks"

    def rivals(self) -> tuple[int, ...]:
        """Return the versions that a new group may meet, oldest first."""
        if not self._config.rivals or self._newest is None:
            return ()
        return tuple(self._kept) if self._config.every else (self._newest,)

    def kept(self) -> set[int]:
        """Return the versions whose weights must not be removed."""
        return set(self._kept)

    def standing(self, member: str) -> Standing | None:
        """Return the standing of a member; None if it is neither a rival nor was met."""
        return self._standings.get(member)

    def state(self) -> LeagueState:
        """Return the state of the league for the journal."""
        standings = dict(self._standings)
        return LeagueState(rivals=tuple(self._kept), rating=self.rating, standings=standings)

    def restore(self, state: LeagueState | None) -> None:
        """Restore the state of the league from the journal; None for no rivals and no ratings."""
        state = state if state is not None and self.is_on else LeagueState()
        self._kept, self.rating = list(state.rivals), state.rating
        self._standings = dict(state.standings)
        self._newest = max(self._kept, default=None)

    def becomes_rival(self, version: int) -> bool:
        """Return whether a version is to become a rival, whose weights are then written durably."""
        config = self._config
        return config.rivals > 0 and (not config.every or version % config.every == 0)

    def awaits(self, version: int) -> bool:
        """Return whether a version will become a rival, and its weights are not on disk yet.

        Until then no group of this version or a newer one is granted, so that the member a
        group meets does not depend on the speed of a disk.
        """
        if not self._config.every:
            is_new = self._newest is None or version > self._newest
        else:
            is_new = version not in self._kept
        return is_new and self.becomes_rival(version)

    def published(self, version: int) -> None:
        """Record that the weights of a version are on disk, which may make the version a rival."""
        if self._config.every and self.awaits(version):
            self._kept.append(version)
            self._standings[name_of(version)] = Standing(rating=self.rating)
            while len(self._kept) > self._config.kept:
                ratings = {each: self._standings[name_of(each)].rating for each in self._kept}
                self._kept.remove(version_to_remove(self._kept, ratings, self._config.keep))
        self._newest = max(version, self._newest or 0)

    def trained(self, groups: Sequence[Group]) -> None:
        """Rate trained groups in order of grant, after the journal has recorded the step."""
        if self.is_on:
            for group in groups:
                self._rate(group)

    def _rate(self, group: Group) -> None:
        """Change the rating of the agent, and the standing of the member that a group met."""
        member = group.trials[0].task.member
        if not self._config.every and version_of(member) is not None:
            member = ITSELF  # the newest version, whichever it was: they share one standing
        returns = [each for trial in group.trials for each in trial.episode_rewards()]
        past = self._standings.get(member, Standing())
        mean = sum(returns) / len(returns)
        change = MAX_RATING_CHANGE * (self._score(mean) - expected(self.rating, past.rating))
        if member == ITSELF:
            change = 0.0  # a game of the agent against itself does not measure its strength
        self.rating += change
        # The first group sets both averages; later ones move them.
        fast, slow = (FAST_WEIGHT, SLOW_WEIGHT) if past.groups else (1.0, 1.0)
        self._standings[member] = Standing(
            rating=past.rating - change,
            groups=past.groups + 1,
            episodes=past.episodes + len(returns),
            total=past.total + sum(returns),
            fast_mean=past.fast_mean + fast * (mean - past.fast_mean),
            slow_mean=past.slow_mean + slow * (mean - past.slow_mean),
        )

    def _score(self, value: float) -> float:
        """Scale a return to 0..1 between the bounds that the environment declares."""
        assert self._facts is not None, "groups are rated only where the environment is known"
        least, most = self._facts.bounds()
        return min(1.0, max(0.0, (value - least) / (most - least)))


def expected(rating: float, other: float) -> float:
    """Return the expected score against `other`: 10 to 1 for 400 points more."""
    return 1 / (1 + 10 ** ((other - rating) / 400))


def version_to_remove(versions: Sequence[int], ratings: Mapping[int, float], keep: Keep) -> int:
    """Return the rival to remove; never the last, which is the newest, unless it is alone.

    `newest` gives up the oldest, `best` the lowest rated (of equals the oldest), `spread` one
    between the oldest and the newest, so that the gap it leaves is the smallest (of equals the
    oldest).

    Args:
        versions: Versions of the rivals, oldest first.
        ratings: Ratings by version.
    """
    older, inner = versions[:-1] or versions, range(1, len(versions) - 1)
    if keep == "best":
        return min(older, key=lambda version: (ratings[version], version))
    if keep == "newest" or not inner:
        return older[0]
    return versions[min(inner, key=lambda place: versions[place + 1] - versions[place - 1])]
