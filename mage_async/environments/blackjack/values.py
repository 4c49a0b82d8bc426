"""The best play of an unknown hand, by dynamic programming.

Hands that cannot be won are never dealt, so cards are not equally likely to those of a whole deck:
each way on is weighed by the probability that the hand can be won on it. It can where the largest
total that is not bust wins.
"""

from collections.abc import Iterator
from functools import cache

from mage_async.environments.blackjack.deck import (
    DEALER_STANDS,
    MAX_HITS,
    MOST,
    RANKS,
    WEIGHTS,
    Hand,
    result,
)

_CARDS = tuple((rank, weight / sum(WEIGHTS)) for rank, weight in zip(RANKS, WEIGHTS, strict=True))


def best_hits(hand: Hand) -> int:
    """Hits of the best player to whom the hand is unknown."""
    hits = 0
    while hits < len(hand.totals) - 1 and should_hit(hand.totals[hits], hand.shows, hits):
        hits += 1
    return hits


def expected_return() -> float:
    """What that player earns, over all hands that are dealt."""
    begun = [
        (one * two * three, first + second, shows)
        for first, one in _CARDS
        for second, two in _CARDS
        for shows, three in _CARDS
    ]
    earned = sum(chance * _value(total, shows, 0) for chance, total, shows in begun)
    return earned / sum(chance * _winnable(total, shows, 0) for chance, total, shows in begun)


@cache
def should_hit(total: int, shows: int, num_hits: int) -> bool:
    """Whether another card is worth more than standing."""
    if num_hits == MAX_HITS or total > MOST:
        return False
    return _after_hit(total, shows, num_hits) > _standing(total, shows, num_hits)


@cache
def _value(total: int, shows: int, num_hits: int) -> float:
    """The best return from here, times the probability that the hand can be won."""
    standing = _standing(total, shows, num_hits)
    return standing if num_hits == MAX_HITS else max(standing, _after_hit(total, shows, num_hits))


def _after_hit(total: int, shows: int, num_hits: int) -> float:
    return sum(
        chance * _value(total + rank, shows, num_hits + 1)
        if total + rank <= MOST
        else -chance * _winnable(total, shows, MAX_HITS)
        for rank, chance in _CARDS
    )


@cache
def _standing(total: int, shows: int, num_hits: int) -> float:
    return sum(
        chance * result(total, dealer) * _wins(total, dealer, num_hits)
        for dealer, chance in _ends(shows, 1.0)
    )


@cache
def _winnable(total: int, shows: int, num_hits: int) -> float:
    ends = _ends(shows, 1.0)
    return sum(chance * _wins(total, dealer, num_hits) for dealer, chance in ends)


@cache
def _wins(total: int, dealer: int, num_hits: int) -> float:
    """The probability that the largest total that is not bust wins."""
    if num_hits == MAX_HITS:
        return float(result(total, dealer) > 0)
    return sum(
        chance * _wins(total + rank, dealer, num_hits + 1)
        if total + rank <= MOST
        else chance * _wins(total, dealer, MAX_HITS)
        for rank, chance in _CARDS
    )


def _ends(dealer: int, chance: float) -> Iterator[tuple[int, float]]:
    """Totals that the dealer ends with, and how likely each way there is."""
    if dealer >= DEALER_STANDS:
        yield dealer, chance
        return
    for rank, each in _CARDS:
        yield from _ends(dealer + rank, chance * each)
