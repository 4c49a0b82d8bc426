"""One game of tic-tac-toe on OpenSpiel's engine, from either seat."""

from collections.abc import Sequence
from typing import Any, Literal

from mage_async.environments.environment import Chance, Outcome
from mage_async.environments.openspiel.engine import Mover

View = Literal["board", "news"]

CELLS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SEATS = ("first", "second")
MINE, THEIRS = "mine", "theirs"
RESULTS = {1.0: "win", 0.0: "draw", -1.0: "lose"}
INVALID = "invalid"
MAX_TURNS = 8
NUMBERS = {cell: number for number, cell in enumerate(CELLS)}


class TicTacToePlay:
    """One game. The anchor is the board: nine words, row by row, `mine`, `theirs`, or the name of a
    cell that is free.
    """

    __slots__ = (
        *("_is_done", "_move", "_seat", "_state", "_turn", "_view"),
        *("board", "chance", "observation", "result", "taken"),
    )

    def __init__(self, state: Any, move: Mover, seat: int, view: View, chance: Chance) -> None:
        self._state, self._move, self._seat, self._view = state, move, seat, view
        self.chance = chance
        self.board = list(CELLS)
        """What each cell shows."""
        self.taken: list[str] = []
        """The agent's cells in the order in which it took them."""
        self.result: float | None = None
        """What the game was worth, once it is over."""
        self._turn, self._is_done = 0, False
        news = [SEATS[seat]] + ([self._opponent_moves()] if seat == 1 else [])
        self.observation = self._said(news)

    @property
    def anchor(self) -> str:
        """The board."""
        return " ".join(self.board)

    def legal_actions(self) -> Sequence[str]:
        """Names of the free cells until the game is over."""
        return () if self._is_done else [cell for cell in self.board if cell in NUMBERS]

    def act(self, action: str) -> Outcome:
        """Take a cell; an invalid action takes none but uses up the turn."""
        assert not self._is_done, "the episode is done"
        self._turn += 1
        number = NUMBERS.get(action)
        if number is None or self.board[number] != action:
            said = INVALID if self._view == "news" else f"{INVALID} {self.anchor}"
            return self._outcome(said, is_valid=False)
        self.taken.append(action)
        self._take(number, MINE)
        news = [] if self._state.is_terminal() else [self._opponent_moves()]
        return self._outcome(self._said(news), is_valid=True)

    def _outcome(self, said: str, *, is_valid: bool) -> Outcome:
        is_over = self._state.is_terminal()
        self._is_done = is_over or self._turn == MAX_TURNS
        if not self._is_done:
            return Outcome(said, 0.0, is_valid)
        self.result = float(self._state.returns()[self._seat]) if is_over else -1.0
        return Outcome(f"{said} {RESULTS[self.result]}".lstrip(), self.result, is_valid, True)

    def _said(self, news: Sequence[str]) -> str:
        """The whole board, or what has happened."""
        return self.anchor if self._view == "board" else " ".join(news)

    def _opponent_moves(self) -> str:
        """Let the opponent move; the name of the cell that it takes."""
        number = self._move(self._state)
        self._take(number, THEIRS)
        return CELLS[number]

    def _take(self, number: int, whose: str) -> None:
        self._state.apply_action(number)
        self.board[number] = whose
