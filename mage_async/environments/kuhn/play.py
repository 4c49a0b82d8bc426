"""One episode of Kuhn poker: a few hands, in alternating seats.

The deals, and what the opponent would do with its card before and after a bet, are drawn before the
first hand, so that all trials of a group meet the same luck whatever they do. Cards are shown only
at a showdown.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mage_async.environments.environment import Chance, Outcome
from mage_async.environments.kuhn.opponents import CARDS, Player

OPEN = ("check", "bet")  # by OpenSpiel's numbers: 0 passes, 1 bets
FACING = ("fold", "call")
POSITIONS = ("first", "second")
CHIPS = {1: "one", 2: "two"}
MOST = 2  # chips that a hand can cost


@dataclass(frozen=True, slots=True)
class _Deal:
    """The luck of one hand: both cards, and what the opponent would do with its own."""

    seat: int
    """The agent's."""
    card: int
    opponent_card: int
    opponent_bets: int
    opponent_calls: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What a hand has shown of the opponent: all that a player may learn from."""

    seat: int
    """The agent's."""
    card: int
    has_bet: int | None = None
    """Whether it bet when there was no bet yet; None where it had no such decision."""
    has_called: int | None = None
    """Whether it called a bet; None where it did not have to say."""
    shown: int | None = None
    """Its card, after a showdown."""


def _deal(chance: Chance, opponent: Player, seat: int) -> _Deal:
    card = chance.choose("my card", (1, 1, 1))
    other = chance.choose("opponent's card", tuple(int(each != card) for each in range(3)))
    style = opponent.style(1 - seat)
    bets, calls = style.bets[other], style.calls[other]
    will_bet = chance.choose("would bet", (1 - bets, bets))
    return _Deal(seat, card, other, will_bet, chance.choose("would call", (1 - calls, calls)))


class KuhnPlay:
    """A few hands. The anchor is the hand being played."""

    __slots__ = (
        *("_deals", "_game", "_is_bet", "_stake", "_state"),
        *("anchor", "chance", "hand", "observation", "seeing", "seen"),
    )

    def __init__(
        self,
        game: Any,
        opponent: Player,
        seat: int,
        num_hands: int,
        chance: Chance,
        stake: float = 1.0,
    ) -> None:
        self._game, self.chance, self._stake = game, chance, stake
        self._deals = [_deal(chance, opponent, (seat + hand) % 2) for hand in range(num_hands)]
        self.hand = 0
        self.seen: list[Seen] = []
        """What the hands that are over have shown."""
        self.anchor = ""
        self.observation = self._begin_hand()

    @property
    def card(self) -> int:
        """The agent's card in this hand."""
        return self._deals[self.hand].card

    @property
    def is_facing_bet(self) -> bool:
        """Whether the opponent has bet."""
        return self._is_bet

    def legal_actions(self) -> Sequence[str]:
        """Check and bet, or fold and call."""
        if self.hand == len(self._deals):
            return ()
        return FACING if self._is_bet else OPEN

    def act(self, action: str) -> Outcome:
        """Speak in a hand; an invalid action loses it with two chips, the most there is."""
        assert self.hand < len(self._deals), "the episode is done"
        words = self.legal_actions()
        if action not in words:
            return self._end_hand("invalid", -MOST, is_valid=False)
        self._apply(words.index(action))
        said = self._opponent_speaks()
        if self._state.is_terminal():
            return self._settle(said)
        self.anchor = f"{self.anchor} {action} {said}"
        return Outcome(said, 0.0)

    def _begin_hand(self) -> str:
        deal = self._deals[self.hand]
        self._state = self._game.new_initial_state()
        self._is_bet = False
        self.seeing = Seen(deal.seat, deal.card)
        cards = (deal.card, deal.opponent_card)
        for card in cards if deal.seat == 0 else reversed(cards):
            self._state.apply_action(card)
        said = f"you {POSITIONS[deal.seat]} {CARDS[deal.card]} {self._opponent_speaks()}".rstrip()
        self.anchor = f"{self.hand} {said}"
        return said

    def _opponent_speaks(self) -> str:
        """Let the opponent speak where it is its turn; it has one place to at a time."""
        deal, state = self._deals[self.hand], self._state
        if state.is_terminal() or state.current_player() == deal.seat:
            return ""
        if self._is_bet:
            choice, words = deal.opponent_calls, FACING
            self.seeing = replace(self.seeing, has_called=choice)
        else:
            choice, words = deal.opponent_bets, OPEN
            self.seeing = replace(self.seeing, has_bet=choice)
        self._apply(choice)
        return f"opp {words[choice]}"

    def _apply(self, choice: int) -> None:
        self._is_bet = self._is_bet or choice == 1
        self._state.apply_action(choice)

    def _settle(self, said: str) -> Outcome:
        deal = self._deals[self.hand]
        is_fold = self._is_bet and self._state.history()[-1] == 0
        shown = "" if is_fold else f"shown {CARDS[deal.opponent_card]}"
        if not is_fold:
            self.seeing = replace(self.seeing, shown=deal.opponent_card)
        return self._end_hand(f"{said} {shown}".strip(), int(self._state.returns()[deal.seat]))

    def _end_hand(self, said: str, chips: int, *, is_valid: bool = True) -> Outcome:
        self.hand += 1
        self.seen.append(self.seeing)
        is_done = self.hand == len(self._deals)
        result = f"{said} {'win' if chips > 0 else 'lose'} {CHIPS[abs(chips)]}".lstrip()
        if is_done:
            self.anchor = "done"
        following = "" if is_done else f" {self._begin_hand()}"
        return Outcome(result + following, self._stake * chips, is_valid, is_done)
