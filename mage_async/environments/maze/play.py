"""One episode of the maze, and a script that explores it and then goes straight."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mage_async.environments.environment import Chance, Outcome, Play
from mage_async.environments.maze.walls import DIRECTIONS, Cell, Maze, reward

ROWS = ("alpha", "beta", "gamma", "delta", "omega", "sigma")
COLUMNS = ("one", "two", "three", "four", "five", "six")
GOAL, OVER, INVALID = "goal", "over", "invalid"


class MazePlay:
    """Steps until the goal is reached or the turns are used up. The anchor is the cell."""

    __slots__ = ("_is_over", "_maze", "_steps", "_turns", "cell", "chance", "seen")

    def __init__(self, maze: Maze, turns: int, chance: Chance) -> None:
        self._maze, self._turns, self.chance = maze, turns, chance
        self.cell, self._steps, self._is_over = maze.start, 0, False
        self.seen = {self.cell: self.exits()}
        """Cells that this episode has come to, with the exits that were seen there."""

    @property
    def observation(self) -> str:
        """The cell one stands in, and where one can go."""
        row, column = self.cell
        return " ".join((ROWS[row], COLUMNS[column], *self.exits()))

    @property
    def anchor(self) -> str:
        """The cell."""
        return f"{ROWS[self.cell[0]]} {COLUMNS[self.cell[1]]}"

    def exits(self) -> tuple[str, ...]:
        """Directions without a wall."""
        return tuple(way for way in DIRECTIONS if way in self._maze.exits[self.cell])

    def legal_actions(self) -> Sequence[str]:
        """The exits, until the goal is reached."""
        return () if self._is_over else self.exits()

    def act(self, action: str) -> Outcome:
        """Go; where there is a wall, or for what is no direction, a turn is used up."""
        assert not self._is_over, "the episode is done"
        to = self._maze.exits[self.cell].get(action)
        self.cell, self._steps = to or self.cell, self._steps + 1
        self.seen.setdefault(self.cell, self.exits())
        is_there, is_last = self.cell == self._maze.goal, self._steps == self._turns
        self._is_over = is_there or is_last
        told = GOAL if is_there else OVER if is_last else self.observation
        earned = reward(self._maze.shortest(), self._steps, self._turns) if is_there else 0.0
        said = told if to else f"{INVALID} {told}"
        return Outcome(said, earned, to is not None, self._is_over)

    def is_at_goal(self) -> bool:
        """Whether the goal was reached."""
        return self.cell == self._maze.goal


@dataclass(slots=True)
class MazeScript:
    """Goes to the nearest exit that it does not know, and by what it knows to the goal."""

    source: random.Random
    care: float
    """Probability of not going anywhere."""
    remembers: bool
    """Earlier episodes count."""
    _plays: list[MazePlay] = field(default_factory=list)

    def choose(self, play: Play) -> str:
        """The next direction."""
        assert isinstance(play, MazePlay)
        if not self._plays or self._plays[-1] is not play:
            self._plays.append(play)
        if self.source.random() >= self.care:
            return self.source.choice(play.exits())
        plays = self._plays if self.remembers else [play]
        seen = {cell: exits for each in plays for cell, exits in each.seen.items()}
        goals = [each.cell for each in plays if each.is_at_goal()]
        return self._way(play.cell, seen, goals[0] if goals else None)

    def _way(self, start: Cell, seen: dict[Cell, tuple[str, ...]], goal: Cell | None) -> str:
        """The first step of a shortest way over cells that were seen to the goal or, where that is
        not known, to a cell that was not.
        """
        waiting, met = deque([(start, "")]), {start}
        while waiting:
            cell, first = waiting.popleft()
            if first and (cell == goal if goal else cell not in seen):
                return first
            ways = self.source.sample(seen.get(cell, ()), len(seen.get(cell, ())))
            for way in ways:
                to = cell[0] + DIRECTIONS[way][0], cell[1] + DIRECTIONS[way][1]
                if to not in met:
                    met.add(to)
                    waiting.append((to, first or way))
        raise AssertionError("a maze whose goal is not known has cells that were not seen")
