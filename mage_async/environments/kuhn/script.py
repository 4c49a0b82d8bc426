"""A scripted player of Kuhn poker: a style of its own, and some skill in reading the opponent.

`P` opponents that a reader thinks possible.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mage_async.environments.environment import Play
from mage_async.environments.kuhn.opponents import Player
from mage_async.environments.kuhn.play import FACING, OPEN, KuhnPlay, Seen

Deal = tuple[int, int]
"""Which deal a hand was: number of the episode that dealt it, number of the hand."""

_SLIP = 0.05
"""Assumed chance that an opponent does the opposite of what its style says: an opponent of no known
style is then still read by the style it is nearest to."""
_SIGNS = np.sign(np.subtract.outer(np.arange(3), np.arange(3))).astype(float)
"""[mine, theirs]: 1 where my card wins."""


class Reader:
    """Believes what Bayes says of all it has seen; answers as if each hand were the last.

    Args:
        prior: the opponents thought possible, all equally likely at first.
        slip: chance that a style is not followed.
    """

    def __init__(self, prior: Sequence[Player], slip: float = _SLIP) -> None:
        styles = [(player.style(0), player.style(1)) for player in prior]
        bets = np.array([[style.bets for style in both] for both in styles], float)
        calls = np.array([[style.calls for style in both] for both in styles], float)
        self._bets = slip + (1 - 2 * slip) * bets
        self._calls = slip + (1 - 2 * slip) * calls
        self._even = np.full(len(prior), 1 / len(prior))
        self._seen: dict[Deal, Seen] = {}
        self._likelihoods: dict[Deal, np.ndarray] = {}

    def learn(self, deal: Deal, seen: Seen) -> None:
        """Take in what a hand has shown, beside what the same deal showed before."""
        known = self._seen.get(deal, seen)
        self._seen[deal] = seen = _joined(known, seen)
        self._likelihoods[deal] = self._weights(self._even, seen).sum(1)

    def belief(self) -> np.ndarray:
        """How probable each opponent is: float64 [P]."""
        weights = np.prod([self._even, *self._likelihoods.values()], axis=0)
        return weights / weights.sum()

    def acts(self, deal: Deal, seeing: Seen) -> bool:
        """Whether to bet, or to call where the opponent has bet."""
        known = self._seen.get(deal, seeing)
        others = [each for number, each in self._likelihoods.items() if number != deal]
        weights = self._weights(np.prod([self._even, *others], axis=0), _joined(known, seeing))
        stakes = _SIGNS[seeing.card]
        if seeing.has_bet:
            return _gain(weights, 2 * stakes) > -_sum(weights)
        bets, calls = self._bets[:, 1 - seeing.seat], self._calls[:, 1 - seeing.seat]
        bets = bets if known.has_bet is None else np.full_like(bets, known.has_bet)
        calls = calls if known.has_called is None else np.full_like(calls, known.has_called)
        bet = _gain(weights * calls, 2 * stakes) + _sum(weights * (1 - calls))
        if seeing.seat == 1:
            return bet > _gain(weights, stakes)
        bet_into = weights * bets
        answer = max(_gain(bet_into, 2 * stakes), -_sum(bet_into))
        return bet > _gain(weights * (1 - bets), stakes) + answer

    def _weights(self, belief: np.ndarray, seen: Seen) -> np.ndarray:
        """How likely each opponent is with each card, after a hand: float64 [P, 3]."""
        weights = np.repeat(belief[:, None], 3, axis=1)
        weights[:, seen.card] = 0.0
        if seen.shown is not None:
            weights[:, [card for card in range(3) if card != seen.shown]] = 0.0
        for said, style in ((seen.has_bet, self._bets), (seen.has_called, self._calls)):
            if said is not None:
                chances = style[:, 1 - seen.seat]
                weights *= chances if said else 1 - chances
        return weights


def _joined(known: Seen, seen: Seen) -> Seen:
    """What two plays of one deal have shown together."""
    return Seen(
        seen.seat,
        seen.card,
        known.has_bet if seen.has_bet is None else seen.has_bet,
        known.has_called if seen.has_called is None else seen.has_called,
        known.shown if seen.shown is None else seen.shown,
    )


def _gain(weights: np.ndarray, stakes: np.ndarray) -> float:
    return _sum(weights * stakes)


def _sum(weights: np.ndarray) -> float:
    return float(weights.sum())


def posterior(
    members: Sequence[Player], plays: Sequence[Play], *, redeals: bool
) -> dict[str, float]:
    """How probable each opponent is after the hands of a trial, all equally at first.

    Where the deals are repeated, so is the opponent's luck: seeing it again says nothing more.
    """
    reader = Reader(members, slip=0.0)
    for episode, play in enumerate(plays):
        assert isinstance(play, KuhnPlay)
        is_open = bool(play.legal_actions())
        for hand, seen in enumerate([*play.seen, play.seeing] if is_open else play.seen):
            reader.learn((episode if redeals else 0, hand), seen)
    shares = reader.belief().tolist()
    return dict(zip((each.name for each in members), shares, strict=True))


@dataclass(slots=True)
class KuhnScript:
    """Bets and calls with set probabilities by card, or, with skill, as a reader advises.

    The reader needs every hand of the trial, whichever script chose its actions.
    """

    source: random.Random
    bets: Sequence[float]
    calls: Sequence[float]
    skill: float
    """Share of turns in which the reader is asked."""
    reader: Reader
    redeals: bool
    """Whether each episode has deals of its own, or all have the first one's."""
    _plays: list[KuhnPlay] = field(default_factory=list)

    def choose(self, play: Play) -> str:
        """The next action."""
        assert isinstance(play, KuhnPlay)
        self._learn(play)
        words, chances = (FACING, self.calls) if play.is_facing_bet else (OPEN, self.bets)
        if self.source.random() < self.skill:
            return words[self.reader.acts(self._deal(play.hand), play.seeing)]
        return words[self.source.random() < chances[play.card]]

    def _learn(self, play: KuhnPlay) -> None:
        """Take in the hands that ended since the last turn."""
        if not self._plays or self._plays[-1] is not play:
            if self._plays:
                self._take(self._plays[-1])
            self._plays.append(play)
        self._take(play)

    def _take(self, play: KuhnPlay) -> None:
        for hand, seen in enumerate(play.seen):
            self.reader.learn(self._deal(hand), seen)

    def _deal(self, hand: int) -> Deal:
        return (len(self._plays) if self.redeals else 0, hand)
