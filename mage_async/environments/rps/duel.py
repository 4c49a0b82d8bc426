"""Rock-paper-scissors against a rival that is asked for actions, as the agent is; without noise.

Both move at once: the rival is asked first, and the agent is told after its own move.
"""

from collections.abc import Sequence

from mage_async.environments.duel_sides import TwoSides
from mage_async.environments.environment import AGENT, RIVAL, Chance, Side
from mage_async.environments.rps.opponents import MOVES, NUM_ROUNDS, result

_RESULTS = ("draw", "win", "lose")  # by result(): 0, 1, -1


class RpsDuel(TwoSides):
    """Four rounds; the sides are told what `RpsPlay` would tell them."""

    def __init__(self, chance: Chance) -> None:
        super().__init__(chance)
        self._num_left, self._anchors = NUM_ROUNDS, ["start", "start"]
        self._theirs: str | None = None

    @property
    def turn(self) -> Side | None:
        """Whose action is wanted; None when the last round is played."""
        if not self._num_left:
            return None
        return RIVAL if self._theirs is None else AGENT

    def anchor(self, side: Side) -> str:
        """The moves of this episode, from a side."""
        return self._anchors[side]

    def legal_actions(self) -> Sequence[str]:
        """The three moves until the last round is played."""
        return MOVES if self._num_left else ()

    def act(self, action: str) -> None:
        """Move; an invalid action loses the round, both sides' do so for both."""
        assert self._num_left, "the episode is done"
        if self._theirs is None:
            self._theirs = action
            return
        moves, self._theirs = (action, self._theirs), None
        self._num_left -= 1
        self._settle(AGENT, *moves)
        self._settle(RIVAL, *reversed(moves))

    def _settle(self, side: Side, mine: str, theirs: str) -> None:
        shown = theirs if theirs in MOVES else "invalid"
        played = mine if mine in MOVES else "invalid"
        self._anchors[side] += f" {played}/{shown}"
        if mine not in MOVES:
            self._refuse(side)
            self._tell(side, "opp", shown, "invalid")
            self._pay(side, -1.0)
            return
        won = result(MOVES.index(mine), MOVES.index(theirs)) if theirs in MOVES else 1
        self._tell(side, "opp", shown, _RESULTS[won])
        self._pay(side, float(won))
