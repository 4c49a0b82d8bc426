"""The two sides of a duel: observations and rewards that each has not been told yet."""

from mage_async.environments.environment import Chance, Outcome, Side


class TwoSides:
    """The bookkeeping that every duel needs."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self._words: tuple[list[str], list[str]] = [], []
        self._rewards, self._are_valid = [0.0, 0.0], [True, True]

    @property
    def turn(self) -> Side | None:
        """Whose action is wanted; None when the episode is done."""
        raise NotImplementedError

    def hear(self, side: Side) -> Outcome:
        """All that a side was told since it heard last."""
        said = " ".join(self._words[side])
        outcome = Outcome(said, self._rewards[side], self._are_valid[side], self.turn is None)
        self._words[side].clear()
        self._rewards[side], self._are_valid[side] = 0.0, True
        return outcome

    def _tell(self, side: Side, *words: str) -> None:
        self._words[side].extend(word for word in words if word)

    def _pay(self, side: Side, reward: float) -> None:
        self._rewards[side] += reward

    def _refuse(self, side: Side) -> None:
        """Its last action was no legal one."""
        self._are_valid[side] = False


def other(side: Side) -> Side:
    """The other side."""
    return 0 if side else 1
