"""A grid without walls: the goal is told, and only the step that reaches it earns anything.

Nothing is hidden. What makes the task hard is that a random walk rarely comes to a far goal, so
most trials earn nothing. Every trial comes to some cell, though, and would have been a success with
that cell as its goal: `reached` says so, and hindsight relabelling trains on it. From a corner a
policy that keeps to two directions comes to many goals without reading which one is asked for; from
the middle, with goals on all sides, it does not.
"""

import random
from functools import partial
from typing import Literal, get_args

from mage_async.environments.environment import Chance, Environment, Facts, Play, Split
from mage_async.environments.grid.play import (
    COLUMNS,
    REACHED,
    ROWS,
    GridPlay,
    GridScript,
    name_of,
    steps_between,
)
from mage_async.environments.maze.play import GOAL, INVALID, OVER
from mage_async.environments.maze.walls import DIRECTIONS, Cell
from mage_async.environments.options import check_one_of, check_whole
from mage_async.environments.scripted_returns import scripted_returns
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import Task

Start = Literal["corner", "middle"]
_HELDOUT_SHARE = 4  # one cell in so many
_RULES = """A grid of {size} times {size} cells, with rows {rows} from top to bottom and
columns {columns} from left to right. You are told the goal, by row and column, and your cell. Say
up, down, left or right. Reaching the goal earns 1 and ends the episode; nothing else earns
anything. You have {turns} steps. The goal is the same in all episodes."""


class Grid(Environment):
    """The grid; its task variant (`member`) is the goal, such as `beta-three`.

    Args:
        size: cells in a row, and rows.
        turns: steps of an episode.
        nearest: fewest steps to a goal that is played; nearer cells can still be relabelled to.
        start: where an episode begins: in the upper left `corner` or in the `middle`.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(
        self, size: int = 6, turns: int = 12, nearest: int = 1, start: Start = "corner"
    ) -> None:
        check_whole("grid", "size", size, 4, len(ROWS))
        check_one_of("grid", "start", start, get_args(Start))
        self._start = (0, 0) if start == "corner" else (size // 2, size // 2)
        cells = [(row, column) for row in range(size) for column in range(size)]
        farthest = max(steps_between(self._start, cell) for cell in cells)
        check_whole("grid", "turns", turns, farthest, 1000)
        check_whole("grid", "nearest", nearest, 1, farthest - 2)
        self._size, self._turns = size, turns
        self._cells = {name_of(cell): cell for cell in cells if cell != self._start}
        self._splits: dict[Split, tuple[str, ...]] = {"train": (), "heldout": ()}
        for name, cell in self._cells.items():
            if self._far(cell) >= nearest:
                self._splits["heldout" if _is_heldout(cell) else "train"] += (name,)
        self.facts = Facts(
            name="grid",
            num_seats=1,
            max_turns=turns,
            min_return=0.0,
            max_return=1.0,
            units=1,
            has_chance=False,
            words=(*DIRECTIONS, *ROWS[:size], *COLUMNS[:size], GOAL, REACHED, OVER, INVALID),
            wins_above=0.5,
            loses_below=0.5,
            example="down",
        )

    def members(self, split: Split) -> tuple[str, ...]:
        """Goals; of the held-out ones every row and column is a row or column of trained ones."""
        return self._splits[split]

    def family(self, member: str) -> str:
        """How many steps the shortest way takes."""
        return f"steps-{self._far(self._cell(member))}"

    def seats(self) -> tuple[int, ...]:
        """The agent is alone."""
        return (0,)

    def rules(self) -> str:
        """The rules in plain words."""
        rows, columns = (", ".join(names[: self._size]) for names in (ROWS, COLUMNS))
        return _RULES.format(size=self._size, turns=self._turns, rows=rows, columns=columns)

    def begin(self, task: Task, episode: int) -> GridPlay:
        """Start in the corner or in the middle."""
        chance = Chance(task.seed, episode)
        return GridPlay(self._start, self._cell(task.member), self._size, self._turns, chance)

    def reached(self, play: Play) -> str | None:
        """The cell one stands in; that where every episode starts is no goal."""
        assert isinstance(play, GridPlay)
        return name_of(play.cell) if play.cell != self._start else None

    def script(self, source: random.Random) -> GridScript:
        """Its care is drawn for the trial."""
        return GridScript(source, source.choice((0.0, 0.5, 0.9)))

    def expert(self, source: random.Random) -> GridScript:
        """Goes a shortest way."""
        return GridScript(source, 1.0)

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """All other goals of the split."""
        self._cell(member)
        return tuple(each for each in self._splits[split] if each != member)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Returns per episode: of `random` in 200 trials; `known` goes the shortest way."""
        player = partial(GridScript, care=0.0)
        return {
            "random": scripted_returns(self, split, num_episodes, player),
            "known": (1.0,) * num_episodes,
        }

    def _far(self, cell: Cell) -> int:
        return steps_between(self._start, cell)

    def _cell(self, member: str) -> Cell:
        if member not in self._cells:
            raise EnvironmentFault(f"grid: no goal is called {member!r}, as is e.g. 'beta-two'")
        return self._cells[member]


def _is_heldout(cell: Cell) -> bool:
    return (2 * cell[0] + cell[1]) % _HELDOUT_SHARE == _HELDOUT_SHARE - 1
