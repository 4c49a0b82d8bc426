"""Kuhn poker on OpenSpiel's engine, against a hidden opponent; chips as reward."""

import math
import random
from functools import partial
from typing import Literal, get_args

from mage_async.environments.environment import Belief, Chance, Environment, Facts, Split
from mage_async.environments.kuhn.duel import KuhnDuel, dealt
from mage_async.environments.kuhn.opponents import (
    ARCHETYPES_HELDOUT,
    ARCHETYPES_TRAIN,
    CARDS,
    CONTRASTS_HELDOUT,
    CONTRASTS_TRAIN,
    FAMILY_HELDOUT,
    FAMILY_TRAIN,
    MAGE_HELDOUT,
    MAGE_TRAIN,
    Player,
)
from mage_async.environments.kuhn.play import (
    CHIPS,
    FACING,
    MOST,
    OPEN,
    POSITIONS,
    KuhnPlay,
)
from mage_async.environments.kuhn.script import KuhnScript, Reader, posterior
from mage_async.environments.kuhn.values import best_response, hindsight, references
from mage_async.environments.openspiel.engine import engine
from mage_async.errors import ConfigError, EnvironmentFault
from mage_async.trajectory import Task

Opponents = Literal["family", "archetypes", "contrasts", "mage"]

_SPLITS: dict[Opponents, dict[Split, tuple[Player, ...]]] = {
    "family": {"train": FAMILY_TRAIN, "heldout": FAMILY_HELDOUT},
    "archetypes": {"train": ARCHETYPES_TRAIN, "heldout": ARCHETYPES_HELDOUT},
    "contrasts": {"train": CONTRASTS_TRAIN, "heldout": CONTRASTS_HELDOUT},
    "mage": {"train": MAGE_TRAIN, "heldout": MAGE_HELDOUT},
}

_STRIDE = 5  # neighbours in a split are alike, and shall not have like stakes

_RULES = """You play Kuhn poker against one opponent, {hands} hands an episode.
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
        opponents: `family`, all 32 that always do the same with a card and call with what beats
            what they call with; `contrasts`, 16 such whose best answers differ most;
            `archetypes`, 14 named ones; or `mage`, the three of MAGE's code, with its greedy
            equilibrium and a drawn one held out.
        hands: of an episode.
        redeals: whether each episode has deals of its own. Without, a trial repeats its first
            episode's, with the opponent's luck in them, as LaMer and MAGE restart a game.
        stakes: what a chip earns against the dearest member of a split; against the cheapest it
            earns 1, between them powers in even steps. Nothing that is said changes.

    Raises:
        ConfigError: no such opponents, hands or stakes, or OpenSpiel is not installed.
    """

    def __init__(
        self,
        opponents: Opponents = "family",
        hands: int = 3,
        redeals: bool = True,
        stakes: float = 1.0,
    ) -> None:
        if opponents not in get_args(Opponents):
            *known, last = (repr(each) for each in get_args(Opponents))
            raise ConfigError(
                f"kuhn: `opponents` must be {', '.join(known)} or {last}, got {opponents!r}"
            )
        if not isinstance(hands, int) or isinstance(hands, bool) or hands < 1:
            raise ConfigError(f"kuhn: `hands` must be a whole number from 1, got {hands!r}")
        if not isinstance(redeals, bool):
            raise ConfigError(f"kuhn: `redeals` must be true or false, got {redeals!r}")
        is_number = isinstance(stakes, int | float) and not isinstance(stakes, bool)
        if not is_number or not 1 <= stakes < math.inf:
            raise ConfigError(f"kuhn: `stakes` must be a number from 1, got {stakes!r}")
        self._num_hands, self._redeals, self._stakes = hands, redeals, stakes
        self.facts = _facts(hands, stakes)
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
        """The seat that speaks first in the first hand."""
        return (0, 1)

    def rules(self) -> str:
        """The rules in plain words."""
        return _RULES.format(hands=self._num_hands)

    def begin(self, task: Task, episode: int) -> KuhnPlay:
        """Deal the episode's hands, or the first one's again, and begin."""
        chance = Chance(task.seed, episode if self._redeals else 0)
        opponent = self._player(task.member)
        stake = self.stake(task.member)
        return KuhnPlay(self._game, opponent, task.seat, self._num_hands, chance, stake)

    def duel(self, task: Task, episode: int) -> KuhnDuel:
        """Deal the episode's hands, or the first one's again, to the agent and a rival. A chip
        earns 1, whatever the stakes.
        """
        chance = Chance(task.seed, episode if self._redeals else 0)
        return KuhnDuel(self._game, dealt(chance, task.seat, self._num_hands), chance)

    def stake(self, member: str) -> float:
        """What a chip earns against a member."""
        if self._stakes == 1.0:
            return 1.0
        players = next(each for each in self._splits.values() if self._player(member) in each)
        place = players.index(self._player(member)) * _STRIDE % len(players)
        return self._stakes ** (place / max(1, len(players) - 1))

    def script(self, source: random.Random) -> KuhnScript:
        """A style drawn for the trial, and a share of turns in which it answers what it has seen.

        The styles are sane in half of the trials, any in the others.
        """
        bets, calls = (0.3, 0.3, 0.8), (0.1, 0.5, 1.0)
        if source.random() < 0.5:
            any_of = (0.1, 0.5, 0.9)
            bets, calls = (tuple(source.choice(any_of) for _ in CARDS) for _ in range(2))
        skill = source.choice((0.3, 0.6, 0.9))
        reader = Reader(self._splits["train"])
        return KuhnScript(source, bets, calls, skill, reader, self._redeals)

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """All others of the split that differ in what they call with."""
        family = self.family(member)
        return tuple(each.name for each in self._splits[split] if each.family != family)

    def belief(self, split: Split) -> Belief:
        """The Bayes filter over what each hand has shown, cards and answers."""
        return partial(posterior, self._splits[split], redeals=self._redeals)

    def best_return(self, member: str) -> float:
        """The return of the best response; where deals repeat, of one that knows the cards too."""
        best = best_response if self._redeals else hindsight
        return best((self._player(member),)) * self._num_hands * self.stake(member)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Exact values per hand and episode, see `kuhn_values`."""
        values = references(self._splits[split], self._num_hands, redeals=self._redeals)
        return {name: (each,) * num_episodes for name, each in values.items()}

    def _player(self, member: str) -> Player:
        if member not in self._players:
            example = next(iter(self._players))
            raise EnvironmentFault(f"kuhn: nobody is called {member!r}, as is e.g. {example!r}")
        return self._players[member]


def _facts(hands: int, stakes: float) -> Facts:
    """Seats alternate, and only the first player can have to speak twice in a hand."""
    return Facts(
        name="kuhn",
        num_seats=2,
        max_turns=hands // 2 + 2 * (hands - hands // 2),
        min_return=-float(MOST * hands * stakes),
        max_return=float(MOST * hands * stakes),
        units=hands,
        has_chance=True,
        words=(
            *(*OPEN, *FACING, *CARDS, *POSITIONS, *CHIPS.values()),
            *("you", "opp", "shown", "win", "lose", "invalid"),
        ),
    )
