"""Tic-tac-toe on OpenSpiel's engine against a hidden opponent; one game an episode, from either
seat.

A board is nine words, row by row: `mine`, `theirs`, or the name of a cell that is free.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mage_async.environments.environment import Chance, Environment, Facts, Outcome, Play, Split
from mage_async.environments.openspiel import Mover, engine
from mage_async.environments.tictactoe_opponents import GAME, HELDOUT, TRAIN, mover
from mage_async.environments.tictactoe_values import references
from mage_async.errors import ConfigError, EnvironmentFault
from mage_async.trajectory import Task

CELLS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MAX_TURNS = 8
_NUMBERS = {cell: number for number, cell in enumerate(CELLS)}
_MINE, _THEIRS = "mine", "theirs"
_RESULTS = {1.0: "win", 0.0: "draw", -1.0: "lose"}
_LINES = (
    *((0, 1, 2), (3, 4, 5), (6, 7, 8)),
    *((0, 3, 6), (1, 4, 7), (2, 5, 8)),
    *((0, 4, 8), (2, 4, 6)),
)

_RULES = """You play tic-tac-toe; three of yours in a line win.
The cells are one two three, four five six, seven eight nine, row by row.
You see the nine cells: mine, theirs, or the name of a free cell. Answer with the name of a free
cell. An invalid action leaves the board as it is. A game not finished in eight turns is lost. A win
counts 1, a draw 0, a loss -1. The opponent has its own way to play, the same in all episodes."""


class TicTacToePlay:
    """One game. The anchor is the board."""

    __slots__ = ("_is_done", "_move", "_seat", "_state", "_turn", "board", "chance", "observation")

    def __init__(self, state: Any, move: Mover, seat: int, chance: Chance) -> None:
        self._state, self._move, self._seat, self.chance = state, move, seat, chance
        self.board = list(CELLS)
        """What each cell shows."""
        self._turn, self._is_done = 0, False
        if seat == 1:
            self._opponent_moves()
        self.observation = self.anchor

    @property
    def anchor(self) -> str:
        """The board."""
        return " ".join(self.board)

    def legal_actions(self) -> Sequence[str]:
        """Names of the free cells until the game is over."""
        return () if self._is_done else [cell for cell in self.board if cell in _NUMBERS]

    def act(self, action: str) -> Outcome:
        """Take a cell; an invalid action takes none but uses up the turn."""
        assert not self._is_done, "the episode is done"
        self._turn += 1
        number = _NUMBERS.get(action)
        if number is None or self.board[number] != action:
            return self._outcome(f"invalid {self.anchor}", is_valid=False)
        self._take(number, _MINE)
        if not self._state.is_terminal():
            self._opponent_moves()
        return self._outcome(self.anchor, is_valid=True)

    def _outcome(self, said: str, *, is_valid: bool) -> Outcome:
        is_over = self._state.is_terminal()
        self._is_done = is_over or self._turn == MAX_TURNS
        if not self._is_done:
            return Outcome(said, 0.0, is_valid)
        reward = float(self._state.returns()[self._seat]) if is_over else -1.0
        return Outcome(f"{said} {_RESULTS[reward]}", reward, is_valid, True)

    def _opponent_moves(self) -> None:
        self._take(self._move(self._state), _THEIRS)

    def _take(self, number: int, whose: str) -> None:
        self._state.apply_action(number)
        self.board[number] = whose


class TicTacToe(Environment):
    """Tic-tac-toe; the opponent's way to play is what a trial has to find out.

    Args:
        simulations: of the searching opponent to train on; 0 for none.
        heldout_simulations: of the one held out; 0 for none.

    Raises:
        ConfigError: a number is negative, both are the same opponent, or OpenSpiel is not
        installed.
    """

    facts = Facts(
        name="tictactoe",
        num_seats=2,
        max_turns=MAX_TURNS,
        min_return=-1.0,
        max_return=1.0,
        units=1,
        has_chance=True,
        words=(*CELLS, _MINE, _THEIRS, "win", "draw", "lose", "invalid"),
    )

    def __init__(self, simulations: int = 100, heldout_simulations: int = 1000) -> None:
        train = _search("simulations", simulations)
        heldout = _search("heldout_simulations", heldout_simulations)
        if train and train == heldout:
            raise ConfigError(f"tictactoe: {train[0]!r} cannot be trained on and held out")
        self._splits: dict[Split, tuple[str, ...]] = {
            "train": (*TRAIN, *train),
            "heldout": (*HELDOUT, *heldout),
        }
        self._game = engine().load_game(GAME)

    def members(self, split: Split) -> tuple[str, ...]:
        """Names of the opponents, such as `random`, `preferred-centre` or `mcts-100`."""
        return self._splits[split]

    def family(self, member: str) -> str:
        """random, preferred, mcts or minimax."""
        self._check(member)
        return member.partition("-")[0]

    def seats(self) -> tuple[int, ...]:
        """Who moves first."""
        return (0, 1)

    def rules(self) -> str:
        """The rules in plain words."""
        return _RULES

    def begin(self, task: Task, episode: int) -> TicTacToePlay:
        """Start a game; in seat 1 the opponent has moved already."""
        self._check(task.member)
        chance = Chance(task.seed, episode)
        move = mover(task.member, chance)
        return TicTacToePlay(self._game.new_initial_state(), move, task.seat, chance)

    def script(self, source: random.Random) -> "TicTacToeScript":
        """Completes its own lines and blocks the other's with a care drawn for the trial."""
        return TicTacToeScript(source, source.choice((0.0, 0.5, 1.0)))

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """All others of the split."""
        self._check(member)
        return tuple(each for each in self._splits[split] if each != member)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Exact values per episode, as far as known, see `tictactoe_values`."""
        values = references(self._splits[split])
        return {name: (each,) * num_episodes for name, each in values.items()}

    def _check(self, member: str) -> None:
        if not any(member in members for members in self._splits.values()):
            raise EnvironmentFault(f"tictactoe: nobody is called {member!r}, as is e.g. 'random'")


@dataclass(slots=True)
class TicTacToeScript:
    """Wins or blocks where one move does, with probability `care`; else takes any free cell."""

    source: random.Random
    care: float

    def choose(self, play: Play) -> str:
        """The next action."""
        assert isinstance(play, TicTacToePlay)
        if self.source.random() < self.care:
            for whose in (_MINE, _THEIRS):
                completing = [cell for line in _LINES if (cell := _completes(play, line, whose))]
                if completing:
                    return completing[0]
        return self.source.choice(play.legal_actions())


def _completes(play: TicTacToePlay, line: tuple[int, ...], whose: str) -> str | None:
    """The free cell of a line whose other two cells are `whose`."""
    shown = [play.board[number] for number in line]
    if shown.count(whose) != 2:
        return None
    return next((cell for cell in shown if cell in _NUMBERS), None)


def _search(name: str, simulations: object) -> tuple[str, ...]:
    """The searching opponent with so many simulations, if any."""
    if not isinstance(simulations, int) or isinstance(simulations, bool) or simulations < 0:
        raise ConfigError(f"tictactoe: `{name}` must be a whole number from 0, got {simulations!r}")
    return (f"mcts-{simulations}",) if simulations else ()
