"""Stacked decks, and what the hands that are dealt from them are worth."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

RANKS = (2, 3, 4, 5, 6, 7, 8, 9, 10)
WEIGHTS = (1, 1, 1, 1, 1, 1, 1, 1, 4)
"""A ten comes as ten, jack, queen or king; aces are left out."""
MOST, DEALER_STANDS, MAX_HITS = 21, 17, 4


@dataclass(frozen=True, slots=True)
class Hand:
    """The cards that one hand holds in store, whatever is done."""

    totals: tuple[int, ...]
    """The player's total after each number of hits, up to the first above 21."""
    shows: int
    """The card of the dealer that is seen."""
    dealer: int
    """The dealer's total in the end."""

    def result(self, num_hits: int) -> int:
        """1, 0 or -1 for standing after so many hits."""
        return result(self.totals[num_hits], self.dealer)

    def results(self) -> list[int]:
        """By number of hits."""
        return [self.result(hits) for hits in range(len(self.totals))]


def result(total: int, dealer: int) -> int:
    """1 for a win, 0 for a draw, -1 for a loss, which a total above 21 always is."""
    if total > MOST:
        return -1
    return 1 if dealer > MOST or total > dealer else 0 if total == dealer else -1


@lru_cache(maxsize=4096)
def deal(name: str, num_hands: int) -> tuple[Hand, ...]:
    """The hands of a deck; its name seeds how it is stacked."""
    source = random.Random(f"blackjack/{name}")
    return tuple(_hand(source) for _ in range(num_hands))


def _hand(source: random.Random) -> Hand:
    """A hand that can be won; others are dealt anew."""
    while max((hand := _any_hand(source)).results()) < 1:
        pass
    return hand


def _any_hand(source: random.Random) -> Hand:
    cards = source.choices(RANKS, WEIGHTS, k=2 + MAX_HITS)
    totals = [sum(cards[: 2 + hits]) for hits in range(MAX_HITS + 1)]
    busts = [hits for hits, total in enumerate(totals) if total > MOST]
    shows = dealer = source.choices(RANKS, WEIGHTS)[0]
    while dealer < DEALER_STANDS:
        dealer += source.choices(RANKS, WEIGHTS)[0]
    return Hand(tuple(totals[: busts[0] + 1] if busts else totals), shows, dealer)


def by_chance(hands: Sequence[Hand]) -> float:
    """Expected return of a player that hits and stands with equal chances, in sums over hands."""
    return sum(_by_chance(hand, 0) for hand in hands)


def _by_chance(hand: Hand, num_hits: int) -> float:
    if num_hits == len(hand.totals) - 1:
        return float(hand.result(num_hits))
    return 0.5 * hand.result(num_hits) + 0.5 * _by_chance(hand, num_hits + 1)
