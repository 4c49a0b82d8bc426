"""Exact values of Kuhn poker against known and unknown opponents, in chips per hand.

The agent takes both seats equally often. `P` opponents of a prior; index 0..2 a card, jack to king.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from mage_async.environments.kuhn.opponents import NASH, UNIFORM, Player

_SEATS = (0, 1)
_DEALS = tuple(itertools.permutations(range(3), 2))
"""Both cards, the agent's first."""
_GoOn = Callable[[np.ndarray], float]
"""Value of the hands to come, from a belief [P] that is not normalised."""


def references(
    members: tuple[Player, ...], num_hands: int, *, redeals: bool = True
) -> dict[str, float]:
    """Values against a uniform draw of `members`, by name.

    `random` and `nash` are played whatever happens; `best_fixed` is the best answer to the whole
    mixture, the same in every hand; `without_memory` is the best single-episode
    player of `num_hands` that knows which opponents there are; `best_response` knows the
    opponent. Where hands are not dealt anew, `hindsight` knows the cards and the answers too.
    """
    known = {} if redeals else {"hindsight": hindsight(members)}
    return {
        "random": sum(value(UNIFORM, member) for member in members) / len(members),
        "nash": sum(value(NASH, member) for member in members) / len(members),
        "best_fixed": best_response(members),
        "without_memory": one_episode(members, num_hands),
        "best_response": sum(best_response((member,)) for member in members) / len(members),
        **known,
    }


def hindsight(members: tuple[Player, ...]) -> float:
    """Value of a hand played again, knowing both cards and what the opponent will do."""
    return sum(_hindsight(member, seat) for member in members for seat in _SEATS) / 2 / len(members)


def _hindsight(member: Player, seat: int) -> float:
    style, total = member.style(1 - seat), 0.0
    for card, other in _DEALS:
        won = _sign(card, other)
        answer, bet = max(-1, 2 * won), (1.0, 2.0 * won)  # bet: folded to, called
        for bets, calls in itertools.product((0, 1), repeat=2):
            chance = _chance(style.bets[other], bets) * _chance(style.calls[other], calls)
            if seat == 0:
                total += chance * max(bet[calls], answer if bets else won)
            else:
                total += chance * (answer if bets else max(bet[calls], won))
    return total / len(_DEALS)


def _chance(active: float, chosen: int) -> float:
    return active if chosen else 1 - active


def value(player: Player, opponent: Player) -> float:
    """Expected chips per hand of one way to play against another."""
    return sum(value_in_seat(player, opponent, seat) for seat in _SEATS) / 2


def value_in_seat(player: Player, opponent: Player, seat: int) -> float:
    """Expected chips per hand where `player` sits in `seat`."""
    mine, theirs = player.style(seat), opponent.style(1 - seat)
    total = 0.0
    for card, other in _DEALS:
        first, second = (mine, theirs) if seat == 0 else (theirs, mine)
        cards = (card, other) if seat == 0 else (other, card)
        stake = _first_value(first.bets, first.calls, second.bets, second.calls, cards)
        total += stake if seat == 0 else -stake
    return total / len(_DEALS)


def _first_value(
    first_bets: Sequence[float],
    first_calls: Sequence[float],
    second_bets: Sequence[float],
    second_calls: Sequence[float],
    cards: tuple[int, int],
) -> float:
    """Chips of the first player, for one deal."""
    mine, theirs = cards
    sign = _sign(mine, theirs)
    called = second_calls[theirs] * 2 * sign + (1 - second_calls[theirs])
    answered = first_calls[mine] * 2 * sign - (1 - first_calls[mine])
    checked = second_bets[theirs] * answered + (1 - second_bets[theirs]) * sign
    return first_bets[mine] * called + (1 - first_bets[mine]) * checked


def best_response(members: tuple[Player, ...]) -> float:
    """Value of the best way to play that is the same in every hand, against a uniform draw."""
    return one_episode(members, 1)


@cache
def one_episode(members: tuple[Player, ...], num_hands: int) -> float:
    """Value per hand of the best play of some hands, seats alternating, against an unknown."""
    belief = np.full(len(members), 1 / len(members))
    hands = [_Hand(members, seat) for seat in _SEATS]
    return sum(_best(hands, belief, seat, num_hands) for seat in _SEATS) / 2 / num_hands


def _best(hands: Sequence["_Hand"], belief: np.ndarray, seat: int, num_left: int) -> float:
    """Best return of the hands left, times the probability of what was seen."""
    if not num_left or not belief.any():
        return 0.0
    return hands[seat].value(belief, lambda after: _best(hands, after, 1 - seat, num_left - 1))


class _Hand:
    """One hand in a seat, against each of the opponents: `bets` and `calls` are [P, 3]."""

    def __init__(self, members: Sequence[Player], seat: int) -> None:
        self._seat = seat
        self._bets = np.array([member.style(1 - seat).bets for member in members], float)
        self._calls = np.array([member.style(1 - seat).calls for member in members], float)

    def value(self, belief: np.ndarray, go_on: _GoOn) -> float:
        """Expected chips of this hand and those to come, under the best play of this one."""
        return sum(self._with_card(card, belief, go_on) for card in range(3))

    def _with_card(self, card: int, belief: np.ndarray, go_on: _GoOn) -> float:
        weights = np.repeat(belief[:, None] / 6, 3, axis=1)  # [P, 3], of each opponent and its card
        weights[:, card] = 0
        if self._seat == 0:
            check = self._after_check(card, weights, go_on)
            return max(self._bet(card, weights, go_on), check)
        free = weights * (1 - self._bets)
        checked = max(_show(card, free, 1, go_on), self._bet(card, free, go_on))
        return checked + _answer(card, weights * self._bets, go_on)

    def _after_check(self, card: int, weights: np.ndarray, go_on: _GoOn) -> float:
        free = _show(card, weights * (1 - self._bets), 1, go_on)
        return free + _answer(card, weights * self._bets, go_on)

    def _bet(self, card: int, weights: np.ndarray, go_on: _GoOn) -> float:
        folded = (weights * (1 - self._calls)).sum(1)
        taken = float(folded.sum()) + go_on(folded)
        return taken + _show(card, weights * self._calls, 2, go_on)


def _answer(card: int, weights: np.ndarray, go_on: _GoOn) -> float:
    """Fold or call a bet, whichever is better."""
    folded = weights.sum(1)
    return max(go_on(folded) - float(folded.sum()), _show(card, weights, 2, go_on))


def _show(card: int, weights: np.ndarray, stake: int, go_on: _GoOn) -> float:
    """Show the cards: each of the opponent's is a different thing to have seen."""
    return sum(
        stake * _sign(card, theirs) * float(weights[:, theirs].sum()) + go_on(weights[:, theirs])
        for theirs in range(3)
        if theirs != card
    )


def _sign(mine: int, theirs: int) -> int:
    return 1 if mine > theirs else -1
