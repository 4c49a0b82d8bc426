"""Kuhn poker on OpenSpiel's engine, against a hidden opponent; chips as reward."""

import random
from typing import Literal, get_args

from mage_async.environments.environment import Chance, Environment, Facts, Split
from mage_async.environments.kuhn_opponents import (
    ARCHETYPES_HELDOUT,
    ARCHETYPES_TRAIN,
    CARDS,
    FAMILY_HELDOUT,
    FAMILY_TRAIN,
    Player,
)
from mage_async.environments.kuhn_play import (
    CHIPS,
    FACING,
    MOST,
    NUM_HANDS,
    OPEN,
    POSITIONS,
    KuhnPlay,
    KuhnScript,
)
from mage_async.environments.kuhn_values import references
from mage_async.environments.openspiel import engine
from mage_async.errors import ConfigError, EnvironmentFault
from mage_async.trajectory import Task

Opponents = Literal["family", "archetypes"]

_SPLITS: dict[Opponents, dict[Split, tuple[Player, ...]]] = {
    "family": {"train": FAMILY_TRAIN, "heldout": FAMILY_HELDOUT},
    "archetypes": {"train": ARCHETYPES_TRAIN, "heldout": ARCHETYPES_HELDOUT},
}

_RULES = """You play Kuhn poker against one opponent, three hands an episode.
Who speaks first alternates. The cards are jack, queen and king.
Each player gets one card and puts in one chip.
You may check or bet one more chip; facing a bet, fold or call.
The higher card wins the pot. Cards are shown only where nobody folded.
An invalid action loses two chips and ends the hand.
The opponent plays by a rule of its own, the same in all episodes."""


class Kuhn(Environment):
    """Kuhn poker; the opponent's rule is what a trial has to find out. The task's seat is the first
    hand's.

    Args:
        opponents: `family`, all 32 that always do the same with a card; or `archetypes`, 14 named
        ones.

    Raises:
        ConfigError: no such opponents, or OpenSpiel is not installed.
    """

    facts = Facts(
        name="kuhn",
        num_seats=2,
        max_turns=NUM_HANDS // 2 + 2 * (NUM_HANDS - NUM_HANDS // 2),
        min_return=-float(MOST * NUM_HANDS),
        max_return=float(MOST * NUM_HANDS),
        units=NUM_HANDS,
        has_chance=True,
        words=(
            *(*OPEN, *FACING, *CARDS, *POSITIONS, *CHIPS.values()),
            *("you", "opp", "shown", "win", "lose", "invalid"),
        ),
    )

    def __init__(self, opponents: Opponents = "family") -> None:
        if opponents not in get_args(Opponents):
            known = " or ".join(repr(each) for each in get_args(Opponents))
            raise ConfigError(f"kuhn: `opponents` must be {known}, got {opponents!r}")
        self._splits = _SPLITS[opponents]
        self._players = {each.name: each for split in self._splits.values() for each in split}
        self._game = engine().load_game("kuhn_poker")

    def members(self, split: Split) -> tuple[str, ...]:
        """Names of the opponents, such as `bet-jack-call-queen-king` or `maniac`."""
        return tuple(player.name for player in self._splits[split])

    def family(self, member: str) -> str:
        """What it calls with; an archetype is its own kind."""
        return self._player(member).family

    def seats(self) -> tuple[int, ...]:
        """Who speaks first in the first hand."""
        return (0, 1)

    def rules(self) -> str:
        """The rules in plain words."""
        return _RULES

    def begin(self, task: Task, episode: int) -> KuhnPlay:
        """Deal the episode's hands and begin the first."""
        chance = Chance(task.seed, episode)
        return KuhnPlay(self._game, self._player(task.member), task.seat, chance)

    def script(self, source: random.Random) -> "KuhnScript":
        """A style that does not adapt: sane in half of the trials, any in the others."""
        if source.random() < 0.5:
            return KuhnScript(source, bets=(0.3, 0.3, 0.8), calls=(0.1, 0.5, 1.0))
        any_of = (0.1, 0.5, 0.9)
        bets, calls = ([source.choice(any_of) for _ in CARDS] for _ in range(2))
        return KuhnScript(source, bets=bets, calls=calls)

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """All others of the split that differ in what they call with."""
        family = self.family(member)
        return tuple(each.name for each in self._splits[split] if each.family != family)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Exact values per hand and episode, see `kuhn_values`."""
        values = references(self._splits[split], NUM_HANDS)
        return {name: (each,) * num_episodes for name, each in values.items()}

    def _player(self, member: str) -> Player:
        if member not in self._players:
            example = next(iter(self._players))
            raise EnvironmentFault(f"kuhn: nobody is called {member!r}, as is e.g. {example!r}")
        return self._players[member]
