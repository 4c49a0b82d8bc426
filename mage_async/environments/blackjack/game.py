"""Blackjack: the deck is stacked, and every episode deals the same cards.

Each hand has cards in store that do not depend on what is done in other hands: those that the
player would draw, and those of the dealer. To know the odds helps within one episode; only memory
tells which hand to hit against them.
"""

import random
from functools import partial

from mage_async.environments.blackjack.deck import Hand, by_chance, deal
from mage_async.environments.blackjack.play import (
    ACTIONS,
    BUST,
    DEALER,
    INVALID,
    NUMBERS,
    ORDINALS,
    OVER,
    RESULTS,
    BlackjackPlay,
    BlackjackScript,
)
from mage_async.environments.blackjack.values import best_hits
from mage_async.environments.environment import Chance, Environment, Facts, Split
from mage_async.environments.options import check_whole
from mage_async.environments.scripted_returns import scripted_returns
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import Task

_RULES = """Blackjack, {hands} hands an episode. You see your total and one card of the dealer.
Say hit for another card, or stand. A total above 21 is bust and loses; after four hits you stand.
The dealer draws up to 17. The higher total wins 1, the lower loses 1. Every hand can be won.
Every episode deals the same cards in the same order."""


class Blackjack(Environment):
    """Blackjack; how the deck is stacked is what a trial has to find out.

    Args:
        hands: of an episode.
        decks: how many there are, a quarter of them held out.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(self, hands: int = 3, decks: int = 512) -> None:
        check_whole("blackjack", "hands", hands, 1, len(ORDINALS))
        check_whole("blackjack", "decks", decks, 8, 1_000_000)
        self._num_hands = hands
        names = tuple(f"deck-{number}" for number in range(decks))
        self._splits: dict[Split, tuple[str, ...]] = {
            "train": names[decks // 4 :],
            "heldout": names[: decks // 4],
        }
        self._known = frozenset(names)
        self.facts = Facts(
            name="blackjack",
            num_seats=1,
            max_turns=4 * hands,
            min_return=-float(hands),
            max_return=float(hands),
            units=hands,
            has_chance=False,
            words=(
                *ACTIONS,
                *("one", *NUMBERS),
                *ORDINALS[:hands],
                *RESULTS.values(),
                *(DEALER, BUST, OVER, INVALID),
            ),
        )

    def members(self, split: Split) -> tuple[str, ...]:
        """Decks, such as `deck-17`."""
        return self._splits[split]

    def family(self, member: str) -> str:
        """How many hands the best player of unknown decks wins."""
        return f"easy-{sum(hand.result(best_hits(hand)) > 0 for hand in self.hands(member))}"

    def hands(self, member: str) -> tuple[Hand, ...]:
        """What a deck deals.

        Raises:
            EnvironmentFault: there is no such deck.
        """
        if member not in self._known:
            raise EnvironmentFault(f"blackjack: no deck is called {member!r}, as is e.g. 'deck-0'")
        return deal(member, self._num_hands)

    def seats(self) -> tuple[int, ...]:
        """The agent is alone against the dealer."""
        return (0,)

    def rules(self) -> str:
        """The rules in plain words."""
        return _RULES.format(hands=self._num_hands)

    def begin(self, task: Task, episode: int) -> BlackjackPlay:
        """Deal the first hand."""
        return BlackjackPlay(self.hands(task.member), Chance(task.seed, episode))

    def script(self, source: random.Random) -> BlackjackScript:
        """Its care and its memory are drawn for the trial."""
        care, memory = source.choice((0.5, 0.8)), source.choice((0.0, 0.5, 0.95))
        return BlackjackScript(source, care, memory)

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Decks of the split that deal the same totals to begin with least often."""
        hands = self.hands(member)
        same = {
            other: sum(_looks_alike(*pair) for pair in zip(hands, self.hands(other), strict=True))
            for other in self._splits[split]
            if other != member
        }
        least = min(same.values())
        return tuple(other for other, count in same.items() if count == least)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Returns per hand and episode: exact, of `solver` in 200 scripted trials.

        `random` hits and stands with equal chances. `without_memory` plays best where all cards are
        unknown, `solver` does so at first, and later what has won, or one hit more than what has
        lost. `known` knows the deck, and wins every hand.
        """
        hands = [hand for deck in self._splits[split] for hand in self.hands(deck)]
        unknown = sum(hand.result(best_hits(hand)) for hand in hands) / len(hands)
        make = partial(BlackjackScript, care=1.0, memory=1.0)
        return {
            "random": (by_chance(hands) / len(hands),) * num_episodes,
            "without_memory": (unknown,) * num_episodes,
            "solver": scripted_returns(self, split, num_episodes, make),
            "known": (1.0,) * num_episodes,
        }


def _looks_alike(one: Hand, other: Hand) -> bool:
    return (one.totals[0], one.shows) == (other.totals[0], other.shows)
