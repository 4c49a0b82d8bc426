"""One episode of the grid, and a script that walks towards its goal."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mage_async.environments.environment import Chance, Outcome, Play
from mage_async.environments.maze import play as maze
from mage_async.environments.maze.play import GOAL, INVALID, OVER
from mage_async.environments.maze.walls import DIRECTIONS, Cell

ROWS = (*maze.ROWS, "tau", "zeta", "kappa")
COLUMNS = (*maze.COLUMNS, "seven", "eight", "nine")
REACHED = "reached"


def steps_between(one: Cell, other: Cell) -> int:
    """How many steps the shortest way takes."""
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def name_of(cell: Cell) -> str:
    """A cell as a task variant, such as `beta-three`."""
    return f"{ROWS[cell[0]]}-{COLUMNS[cell[1]]}"


class GridPlay:
    """Steps until the goal is reached or the turns are used up. The anchor is goal and cell."""

    __slots__ = ("_goal", "_is_over", "_size", "_steps", "_turns", "cell", "chance")

    def __init__(self, start: Cell, goal: Cell, size: int, turns: int, chance: Chance) -> None:
        self._goal, self._size, self._turns, self.chance = goal, size, turns, chance
        self.cell, self._steps, self._is_over = start, 0, False

    @property
    def observation(self) -> str:
        """The goal, and the cell one stands in."""
        return f"{GOAL} {_said(self._goal)} {_said(self.cell)}"

    @property
    def anchor(self) -> str:
        """The goal and the cell."""
        return self.observation

    def legal_actions(self) -> Sequence[str]:
        """Directions that stay in the grid, until the episode is over."""
        return () if self._is_over else [way for way in DIRECTIONS if self._to(way) is not None]

    def towards_goal(self) -> list[str]:
        """Directions on a shortest way."""
        far = steps_between(self.cell, self._goal)
        steps = ((way, self._to(way)) for way in DIRECTIONS)
        return [way for way, to in steps if to is not None and steps_between(to, self._goal) < far]

    def act(self, action: str) -> Outcome:
        """Take a step; one that leaves the grid, or is no direction, only uses up a turn."""
        assert not self._is_over, "the episode is done"
        to = self._to(action)
        self.cell, self._steps = to or self.cell, self._steps + 1
        is_there = self.cell == self._goal
        self._is_over = is_there or self._steps == self._turns
        told = REACHED if is_there else OVER if self._is_over else _said(self.cell)
        said = f"{INVALID} {told}" if to is None else told
        return Outcome(said, float(is_there), to is not None, self._is_over)

    def _to(self, action: str) -> Cell | None:
        if action not in DIRECTIONS:
            return None
        down, right = DIRECTIONS[action]
        row, column = self.cell[0] + down, self.cell[1] + right
        return (row, column) if 0 <= row < self._size and 0 <= column < self._size else None


@dataclass(slots=True)
class GridScript:
    """Walks to the goal, or anywhere."""

    source: random.Random
    care: float
    """Probability of a step towards the goal."""

    def choose(self, play: Play) -> str:
        """The next direction."""
        assert isinstance(play, GridPlay)
        is_careful = self.source.random() < self.care
        return self.source.choice(play.towards_goal() if is_careful else play.legal_actions())


def _said(cell: Cell) -> str:
    return f"{ROWS[cell[0]]} {COLUMNS[cell[1]]}"
