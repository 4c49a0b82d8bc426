"""A maze: walls and goal are hidden, and the same in all episodes.

One sees the cell one stands in and its exits. In the first episode the goal has to be looked for;
a player that remembers the way goes straight.
"""

import random
from functools import partial
from types import MappingProxyType

from mage_async.environments.environment import Chance, Environment, Facts, Ladders, Split
from mage_async.environments.maze.play import (
    COLUMNS,
    GOAL,
    INVALID,
    OVER,
    ROWS,
    MazePlay,
    MazeScript,
)
from mage_async.environments.maze.walls import DIRECTIONS, Maze, maze_of, random_return
from mage_async.environments.options import check_whole
from mage_async.environments.scripted_returns import scripted_returns
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import Task

_RULES = """A maze of {size} times {size} cells. You see the name of your cell and its exits.
Say one of them, up, down, left or right, and find the goal, which is hidden in one cell.
Reaching the goal earns 1 on the shortest way, less with every step more. You have {turns} steps.
The maze, the start and the goal are the same in all episodes."""


class MazeGame(Environment):
    """A maze; the way to its goal is what a trial has to find out.

    Args:
        size: cells in a row, and rows.
        loops: walls that are taken out of a maze in which there is one way to each cell.
        turns: steps of an episode.
        mazes: how many there are, a quarter of them held out.

    Raises:
        ConfigError: an option is out of its range.
    """

    ladders: Ladders = MappingProxyType(
        {
            "size": (
                {"size": 3, "turns": 12},
                {"size": 4, "turns": 20},
                {"size": 5, "turns": 30},
                {"size": 6, "turns": 42},
            )
        }
    )

    def __init__(self, size: int = 4, loops: int = 2, turns: int = 20, mazes: int = 512) -> None:
        check_whole("maze", "size", size, 3, len(ROWS))
        check_whole("maze", "loops", loops, 0, 100)
        check_whole("maze", "turns", turns, size * size, 1000)
        check_whole("maze", "mazes", mazes, 8, 1_000_000)
        self._size, self._loops, self._turns = size, loops, turns
        names = tuple(f"maze-{number}" for number in range(mazes))
        self._splits: dict[Split, tuple[str, ...]] = {
            "train": names[mazes // 4 :],
            "heldout": names[: mazes // 4],
        }
        self._known = frozenset(names)
        self.facts = Facts(
            name="maze",
            num_seats=1,
            max_turns=turns,
            min_return=0.0,
            max_return=1.0,
            units=1,
            has_chance=False,
            words=(*DIRECTIONS, *ROWS[:size], *COLUMNS[:size], GOAL, OVER, INVALID),
            wins_above=1e-9,
            loses_below=1e-9,
        )

    def members(self, split: Split) -> tuple[str, ...]:
        """Mazes, such as `maze-17`."""
        return self._splits[split]

    def family(self, member: str) -> str:
        """How many steps the shortest way takes."""
        return f"steps-{self.maze(member).shortest()}"

    def maze(self, member: str) -> Maze:
        """Where one can go.

        Raises:
            EnvironmentFault: there is no such maze.
        """
        if member not in self._known:
            raise EnvironmentFault(f"maze: no maze is called {member!r}, as is e.g. 'maze-0'")
        return maze_of(member, self._size, self._loops)

    def seats(self) -> tuple[int, ...]:
        """The agent is alone."""
        return (0,)

    def rules(self) -> str:
        """The rules in plain words."""
        return _RULES.format(size=self._size, turns=self._turns)

    def begin(self, task: Task, episode: int) -> MazePlay:
        """Start where the maze has its start."""
        return MazePlay(self.maze(task.member), self._turns, Chance(task.seed, episode))

    def script(self, source: random.Random) -> MazeScript:
        """Its care is drawn for the trial; it remembers more often than not."""
        return MazeScript(source, source.choice((0.5, 0.8, 0.95)), source.random() < 0.75)

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Mazes of the split with the goal in another cell."""
        goal = self.maze(member).goal
        return tuple(each for each in self._splits[split] if self.maze(each).goal != goal)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Returns per episode: exact for `random` and `known`, of 200 scripted trials for others.

        `random` takes any exit. `explorer_without_memory` goes to the nearest cell that it has not
        seen in the episode; `explorer` goes to the goal once it has seen that. `known` goes the
        shortest way.
        """
        chance = [random_return(self.maze(each), self._turns) for each in self._splits[split]]
        explorers = {"explorer_without_memory": False, "explorer": True}
        return {
            "random": (sum(chance) / len(chance),) * num_episodes,
            **{
                name: scripted_returns(
                    self, split, num_episodes, partial(MazeScript, care=1.0, remembers=remembers)
                )
                for name, remembers in explorers.items()
            },
            "known": (1.0,) * num_episodes,
        }
