"""MineSweeper: the mines lie where they lay in the episode before.

Every episode has the same mines and the same opening, so what an episode has shown, even a lost
one, helps to win a later one.
"""

import random
from functools import lru_cache, partial
from types import MappingProxyType
from typing import get_args

from mage_async.environments.cell_sets import cells_of, in_rows
from mage_async.environments.environment import Chance, Environment, Facts, Ladders, Split
from mage_async.environments.minesweeper.board import (
    Board,
    board_of,
    cell_names,
    layouts,
)
from mage_async.environments.minesweeper.play import (
    INVALID,
    LOST,
    OVER,
    REWARDS,
    SHOWN,
    STRUCK,
    WON,
    MineSweeperPlay,
    View,
)
from mage_async.environments.minesweeper.script import MineSweeperScript
from mage_async.environments.options import check_one_of, check_whole
from mage_async.environments.scripted_returns import scripted_returns
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import Task

_HELDOUT_SHARE = 4  # one board in so many
_RULES = """A board of {size} rows of {size} cells hides {mines} mines. You open one cell a turn.
A cell has two letters: its row, then its column, both from a to {last}.
{view}
An open cell shows how many of its up to eight neighbours have a mine: clear, one, two, and so on.
Opening a clear cell opens everything around it. Opening a mine loses; opening all others wins.
Winning earns {win:g}; opening several cells at once {cascade:g}, one cell {single:g}, a mine
{mine:g}, what is not the name of a closed cell {invalid:g}. An episode ends after {turns} turns.
The mines, and the cells that are open at the beginning, are the same in all episodes."""
_VIEWS = {
    "board": "You see the cells row by row; a closed one shows its name.",
    "news": "You see each newly opened cell and what it shows.",
}


class MineSweeper(Environment):
    """MineSweeper; where the mines lie is what a trial has to find out.

    Args:
        size: cells in a row, and rows.
        mines: on the board; at most a quarter of the cells.
        turns: most turns of an episode.
        view: see the whole `board` after each turn, or only the `news`: what has opened.
        boards: how many there are, a quarter of them held out; fewer where there are not so many.

    Raises:
        ConfigError: an option is out of its range.
    """

    ladders: Ladders = MappingProxyType({"mines": tuple({"mines": count} for count in range(1, 8))})

    def __init__(
        self,
        size: int = 6,
        mines: int = 3,
        turns: int = 7,
        view: View = "board",
        boards: int = 2048,
    ) -> None:
        check_whole("minesweeper", "size", size, 3, 26)
        check_whole("minesweeper", "mines", mines, 1, size * size // 4)
        check_whole("minesweeper", "turns", turns, 1, size * size)
        check_whole("minesweeper", "boards", boards, 8, 1_000_000)
        check_one_of("minesweeper", "view", view, get_args(View))
        self._size, self._num_mines, self._turns, self._view = size, mines, turns, view
        every = layouts(size, mines, boards)
        self._sets = {self._name(each): each for each in every}
        names, num_heldout = tuple(self._sets), len(every) // _HELDOUT_SHARE
        self._splits: dict[Split, tuple[str, ...]] = {
            "train": names[num_heldout:],
            "heldout": names[:num_heldout],
        }
        self._cached = lru_cache(maxsize=4096)(self._make_board)
        self.facts = Facts(
            name="minesweeper",
            num_seats=1,
            max_turns=turns,
            min_return=turns * REWARDS.invalid,
            max_return=REWARDS.win + (turns - 1) * REWARDS.cascade,
            units=1,
            has_chance=True,
            words=(
                *cell_names(size),
                *SHOWN[: min(mines, 8) + 1],
                *(STRUCK, WON, LOST, OVER, INVALID),
            ),
        )

    def members(self, split: Split) -> tuple[str, ...]:
        """Boards by the cells of their mines, such as `ac-bd-fa`."""
        return self._splits[split]

    def family(self, member: str) -> str:
        """Its difficulty: how many cells a player that knows the mines has to open."""
        return f"clicks-{self.board(member).num_clicks()}"

    def board(self, member: str) -> Board:
        """Where its mines lie, and what follows from it."""
        return self._cached(member)

    def seats(self) -> tuple[int, ...]:
        """The agent is alone."""
        return (0,)

    def rules(self) -> str:
        """The rules in plain words, with the rewards."""
        return _RULES.format(
            size=self._size,
            mines=self._num_mines,
            last=cell_names(self._size)[-1][0],
            view=_VIEWS[self._view],
            turns=self._turns,
            **{name: getattr(REWARDS, name) for name in REWARDS.__slots__},
        )

    def laid_out(self, said: str) -> str:
        """A row of the board a line; news stay as they are."""
        return in_rows(said, self._size, INVALID) if self._view == "board" else said

    def begin(self, task: Task, episode: int) -> MineSweeperPlay:
        """Start an episode, with the opening that all episodes of the task have."""
        board = self.board(task.member)
        chance = Chance(task.seed, 0)
        openings = board.openings()
        opening = openings[chance.choose("opening", (1,) * len(openings))]
        return MineSweeperPlay(board, opening, self._turns, self._view, chance)

    def script(self, source: random.Random) -> MineSweeperScript:
        """Its care and its memory are drawn for the trial."""
        care, memory = source.choice((0.0, 0.5, 1.0)), source.choice((0.0, 0.5, 0.95))
        return self._player(care, memory, source)

    def expert(self, source: random.Random) -> MineSweeperScript:
        """Reasons from all that the trial has shown."""
        return self._player(1.0, 1.0, source)

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Boards of the split that have no mine where it has one."""
        mines = self._mines(member)
        return tuple(name for name in self._splits[split] if not self._sets[name] & mines)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Returns of scripted players in 200 trials, per episode.

        `random` opens any cell, `solver_without_memory` the one least likely to have a mine,
        `solver` does so with what earlier episodes have shown.
        """
        players = {"random": (0.0, 0.0), "solver_without_memory": (1.0, 0.0), "solver": (1.0, 1.0)}
        return {
            name: scripted_returns(self, split, num_episodes, partial(self._player, *style))
            for name, style in players.items()
        }

    def _player(self, care: float, memory: float, source: random.Random) -> MineSweeperScript:
        return MineSweeperScript(source, self._num_mines, care, memory)

    def _name(self, mines: int) -> str:
        names = cell_names(self._size)
        return "-".join(names[cell] for cell in cells_of(mines))

    def _mines(self, member: str) -> int:
        if member not in self._sets:
            example = next(iter(self._sets))
            raise EnvironmentFault(
                f"minesweeper: no board is called {member!r}, as is e.g. {example!r}"
            )
        return self._sets[member]

    def _make_board(self, member: str) -> Board:
        return board_of(self._size, self._mines(member))
