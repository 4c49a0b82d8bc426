"""A game of OpenSpiel against a rival that is asked for actions, as the agent is."""

from collections.abc import Sequence
from typing import Any

from mage_async.environments.duel_sides import TwoSides
from mage_async.environments.environment import AGENT, RIVAL, Chance, Side
from mage_async.environments.openspiel.play import INVALID, Look, one_line, result_words


class OpenSpielDuel(TwoSides):
    """One game; the sides are told what `OpenSpielPlay` would tell them.

    Args:
        seat: the agent's.
        turns: of a side; a side that has used its turns before the game ends gets the least
            return, and the other side what that costs.
    """

    def __init__(
        self, game: Any, seat: int, turns: int, look: Look, deals: Chance, chance: Chance
    ) -> None:
        super().__init__(chance)
        self._seat, self._look, self._deals = seat, look, deals
        self._left, self._is_done = [turns, turns], False
        self._least, self._most = float(game.min_utility()), float(game.max_utility())
        self.state = game.new_initial_state()
        self._deal()
        if self.turn is not None:
            self._tell(self.turn, self.anchor(self.turn))

    @property
    def turn(self) -> Side | None:
        """Whose action is wanted; None when the game is over."""
        if self._is_done:
            return None
        return AGENT if self.state.current_player() == self._seat else RIVAL

    def anchor(self, side: Side) -> str:
        """What a side sees."""
        return self._look(self.state, self._seat_of(side))

    def actions(self) -> dict[str, int]:
        """OpenSpiel's actions by name, of the side whose turn it is."""
        if self.turn is None:
            return {}
        state, seat = self.state, self._seat_of(self.turn)
        return {
            one_line(state.action_to_string(seat, each)): each for each in state.legal_actions()
        }

    def legal_actions(self) -> Sequence[str]:
        """Names of the actions, until the game is over."""
        return tuple(self.actions())

    def act(self, action: str) -> None:
        """Make a move; an invalid one makes none but uses up the turn."""
        side, number = self.turn, self.actions().get(action)
        assert side is not None, "the episode is done"
        self._left[side] -= 1
        if number is None:
            self._refuse(side)
            self._tell(side, INVALID)
        else:
            self.state.apply_action(number)
            self._deal()
        if self.state.is_terminal():
            returns = self.state.returns()
            self._end(float(returns[self._seat]), float(returns[1 - self._seat]))
        elif not self._left[side]:
            pays = min(-self._least, self._most)
            self._end(*(self._least, pays) if side == AGENT else (pays, self._least))
        else:
            following = self.turn
            assert following is not None, "a game that is not over is somebody's turn"
            self._tell(following, self.anchor(following))

    def _deal(self) -> None:
        while self.state.is_chance_node():
            outcomes = self.state.chance_outcomes()
            index = self._deals.choose("deal", [weight for _, weight in outcomes])
            self.state.apply_action(outcomes[index][0])

    def _end(self, agents: float, rivals: float) -> None:
        self._is_done = True
        for side, earned in ((AGENT, agents), (RIVAL, rivals)):
            self._tell(side, self.anchor(side), result_words(earned))
            self._pay(side, earned)

    def _seat_of(self, side: Side) -> int:
        return self._seat if side == AGENT else 1 - self._seat
