"""Scripted players of tic-tac-toe: one that lives for the game, one that remembers the trial."""

import random
from dataclasses import dataclass, field

from mage_async.environments.environment import Play
from mage_async.environments.tictactoe.play import MINE, NUMBERS, THEIRS, TicTacToePlay

_LINES = (
    *((0, 1, 2), (3, 4, 5), (6, 7, 8)),
    *((0, 3, 6), (1, 4, 7), (2, 5, 8)),
    *((0, 4, 8), (2, 4, 6)),
)


@dataclass(slots=True)
class TicTacToeScript:
    """Wins or blocks where one move does, with probability `care`; else takes any free cell."""

    source: random.Random
    care: float

    def choose(self, play: Play) -> str:
        """The next action."""
        assert isinstance(play, TicTacToePlay)
        if self.source.random() < self.care:
            for whose in (MINE, THEIRS):
                completing = [cell for line in _LINES if (cell := _completes(play, line, whose))]
                if completing:
                    return completing[0]
        return self.source.choice(play.legal_actions())


@dataclass(slots=True)
class TicTacToeExplorer:
    """Plays a game that it has won once more, opens new ones where it has won none.

    Args:
        source: its luck.
        care: as of `TicTacToeScript`, for the moves that nothing is known of.
        memory: how often it remembers earlier games.
    """

    source: random.Random
    care: float
    memory: float
    _plays: list[TicTacToePlay] = field(default_factory=list)
    """The games of the trial so far."""

    def choose(self, play: Play) -> str:
        """The next action."""
        assert isinstance(play, TicTacToePlay)
        if not self._plays or self._plays[-1] is not play:
            self._plays.append(play)
        remembered = self._remembered(play) if self.source.random() < self.memory else []
        if remembered:
            return self.source.choice(remembered)
        return TicTacToeScript(self.source, self.care).choose(play)

    def _remembered(self, play: TicTacToePlay) -> list[str]:
        """Free cells that speak for themselves: a won game's next one, else an opening not tried.

        Opponents of these games always answer alike, so that what was won is won again.
        """
        earlier = [each for each in self._plays[:-1] if each.taken]
        won = [each for each in earlier if each.result == 1.0]
        length = len(play.taken)
        again = [each.taken[length] for each in won if each.taken[:length] == play.taken]
        if won or length:
            return [cell for cell in again if cell in play.legal_actions()]
        tried = {each.taken[0] for each in earlier}
        return [cell for cell in play.legal_actions() if cell not in tried] if tried else []


def _completes(play: TicTacToePlay, line: tuple[int, ...], whose: str) -> str | None:
    """The free cell of a line whose other two cells are `whose`."""
    shown = [play.board[number] for number in line]
    if shown.count(whose) != 2:
        return None
    return next((cell for cell in shown if cell in NUMBERS), None)
