"""One episode of Kuhn poker against a rival that is asked for actions, as the agent is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mage_async.environments.duel_sides import TwoSides, other
from mage_async.environments.environment import AGENT, RIVAL, Chance, Side
from mage_async.environments.kuhn.opponents import CARDS
from mage_async.environments.kuhn.play import CHIPS, FACING, MOST, OPEN, POSITIONS

_SIDES: tuple[Side, Side] = (AGENT, RIVAL)


@dataclass(frozen=True, slots=True)
class Hand:
    """The luck of one hand."""

    seat: int
    """The agent's."""
    cards: tuple[int, int]
    """The card of the agent and the card of the rival."""


def dealt(chance: Chance, seat: int, num_hands: int) -> list[Hand]:
    """The hands of an episode, seats alternating."""
    hands: list[Hand] = []
    for number in range(num_hands):
        card = chance.choose("my card", (1, 1, 1))
        theirs = chance.choose("opponent's card", tuple(int(each != card) for each in range(3)))
        hands.append(Hand((seat + number) % 2, (card, theirs)))
    return hands


class KuhnDuel(TwoSides):
    """A few hands; the sides are told what `KuhnPlay` would tell them."""

    def __init__(self, game: Any, hands: Sequence[Hand], chance: Chance) -> None:
        super().__init__(chance)
        self._game, self._hands, self._hand = game, hands, 0
        self._begin_hand()

    @property
    def turn(self) -> Side | None:
        """Whose action is wanted; None when all hands are played."""
        if self._hand == len(self._hands):
            return None
        is_agents = self._state.current_player() == self._hands[self._hand].seat
        return AGENT if is_agents else RIVAL

    def anchor(self, side: Side) -> str:
        """The hand being played, from a side."""
        return "done" if self.turn is None else " ".join(self._log[side])

    def legal_actions(self) -> Sequence[str]:
        """Check and bet, or fold and call."""
        return () if self.turn is None else FACING if self._is_bet else OPEN

    def act(self, action: str) -> None:
        """Speak in a hand; an invalid action loses it with two chips, the most there is."""
        side, words = self.turn, self.legal_actions()
        assert side is not None, "the episode is done"
        if action not in words:
            self._refuse(side)
            self._tell(side, "invalid")
            self._tell(other(side), "opp invalid")
            self._end_hand(-MOST if side == AGENT else MOST)
            return
        self._tell(other(side), f"opp {action}")
        self._log[side].append(action)
        self._log[other(side)].append(f"opp {action}")
        choice = words.index(action)
        self._is_bet = self._is_bet or choice == 1
        self._state.apply_action(choice)
        if self._state.is_terminal():
            self._settle()

    def _begin_hand(self) -> None:
        hand = self._hands[self._hand]
        self._state, self._is_bet = self._game.new_initial_state(), False
        for card in hand.cards if hand.seat == 0 else reversed(hand.cards):
            self._state.apply_action(card)
        self._log: list[list[str]] = []
        for side in _SIDES:
            position = POSITIONS[hand.seat if side == AGENT else 1 - hand.seat]
            said = f"you {position} {CARDS[hand.cards[side]]}"
            self._log.append([str(self._hand), said])
            self._tell(side, said)

    def _settle(self) -> None:
        hand = self._hands[self._hand]
        is_fold = self._is_bet and self._state.history()[-1] == 0
        for side in _SIDES:
            self._tell(side, "" if is_fold else f"shown {CARDS[hand.cards[other(side)]]}")
        self._end_hand(int(self._state.returns()[hand.seat]))

    def _end_hand(self, chips: int) -> None:
        """`chips` are the agent's."""
        for side in _SIDES:
            won = chips if side == AGENT else -chips
            self._tell(side, "win" if won > 0 else "lose", CHIPS[abs(won)])
            self._pay(side, float(won))
        self._hand += 1
        if self._hand < len(self._hands):
            self._begin_hand()
