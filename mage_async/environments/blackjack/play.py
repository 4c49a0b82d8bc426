"""One episode of Blackjack: a few hands from one deck."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from mage_async.environments.blackjack.deck import MAX_HITS, MOST, Hand, result
from mage_async.environments.blackjack.values import should_hit
from mage_async.environments.environment import Chance, Outcome, Play

HIT, STAND = "hit", "stand"
ACTIONS = (HIT, STAND)
RESULTS = {1: "win", 0: "draw", -1: "lose"}
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
NUMBERS = (
    "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
DEALER, BUST, OVER, INVALID = "dealer", "bust", "over", "invalid"


class BlackjackPlay:
    """Hands, one after the other. The anchor is the hand and the number of hits in it."""

    __slots__ = ("_hands", "chance", "hits", "number", "seen")

    def __init__(self, hands: Sequence[Hand], chance: Chance) -> None:
        self._hands, self.chance = hands, chance
        self.number, self.hits = 0, 0
        self.seen: list[tuple[list[int], int]] = []
        """Of each finished hand, the totals that were seen, and the dealer's."""

    @property
    def observation(self) -> str:
        """The first hand."""
        return self._dealt()

    @property
    def anchor(self) -> str:
        """The hand, and what was done in it."""
        return f"{self.number} {self.hits}"

    @property
    def hand(self) -> Hand:
        """The hand that is played."""
        return self._hands[self.number]

    def legal_actions(self) -> Sequence[str]:
        """Hit or stand, until all hands are played."""
        return ACTIONS if self.number < len(self._hands) else ()

    def act(self, action: str) -> Outcome:
        """Hit, or stand; what is neither loses the hand."""
        assert self.number < len(self._hands), "the episode is done"
        is_valid = action in ACTIONS
        self.hits += action == HIT
        total = self.hand.totals[self.hits]
        told = _number(total) if is_valid else INVALID
        if action == HIT and total <= MOST and self.hits < MAX_HITS:
            return Outcome(told, 0.0)
        earned = self.hand.result(self.hits) if is_valid else -1
        ended = f"{DEALER} {_number(self.hand.dealer)} {RESULTS[earned]}"
        self._next()
        is_done = self.number == len(self._hands)
        said = f"{told} {ended} {OVER if is_done else self._dealt()}"
        return Outcome(said, float(earned), is_valid, is_done)

    def _next(self) -> None:
        self.seen.append((list(self.hand.totals[: self.hits + 1]), self.hand.dealer))
        self.number, self.hits = self.number + 1, 0

    def _dealt(self) -> str:
        hand = self.hand
        return f"{ORDINALS[self.number]} {_number(hand.totals[0])} {DEALER} {_number(hand.shows)}"


def _number(total: int) -> str:
    """A total in words."""
    if total > MOST:
        return BUST
    return NUMBERS[total - 2] if total <= 20 else "twenty one"


@dataclass(slots=True)
class BlackjackScript:
    """Plays unknown cards as is best for those; where it remembers a hand, does better."""

    source: random.Random
    care: float
    """Probability of not playing at random."""
    memory: float
    """Probability that a hand is played by what earlier episodes have shown."""
    _plays: list[BlackjackPlay] = field(default_factory=list)
    _wanted: int | None = None
    """Hits that the present hand is to have, where that is known."""

    def choose(self, play: Play) -> str:
        """Hit or stand."""
        assert isinstance(play, BlackjackPlay)
        if not self._plays or self._plays[-1] is not play:
            self._plays.append(play)
        if not play.hits:
            self._wanted = self._plan(play) if self.source.random() < self.memory else None
        if self.source.random() >= self.care:
            return self.source.choice(ACTIONS)
        if self._wanted is not None:
            return HIT if play.hits < self._wanted else STAND
        total = play.hand.totals[play.hits]
        return HIT if should_hit(total, play.hand.shows, play.hits) else STAND

    def _plan(self, play: BlackjackPlay) -> int | None:
        """The best number of hits that is known, or one more than was tried where all have lost."""
        seen = [each.seen[play.number] for each in self._plays[:-1]]
        if not seen:
            return None
        totals, dealer = max(seen, key=lambda each: len(each[0]))
        results = [result(total, dealer) for total in totals]
        can_go_on = totals[-1] <= MOST and len(totals) <= MAX_HITS
        if max(results) < 0 and can_go_on:
            return len(totals)
        return results.index(max(results))
