"""Mazes: where one can go from each cell, and how far the goal is."""

import random
from collections import deque
from dataclasses import dataclass
from functools import lru_cache

DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
Cell = tuple[int, int]
"""Row and column."""


@dataclass(frozen=True, slots=True)
class Maze:
    """A square of cells; every cell can be reached from every other."""

    exits: dict[Cell, dict[str, Cell]]
    """By cell, the cells beside it that no wall parts from it, by direction."""
    start: Cell
    goal: Cell

    def distances(self, to: Cell) -> dict[Cell, int]:
        """Steps from each cell to one."""
        far, waiting = {to: 0}, deque([to])
        while waiting:
            cell = waiting.popleft()
            for other in self.exits[cell].values():
                if other not in far:
                    far[other] = far[cell] + 1
                    waiting.append(other)
        return far

    def shortest(self) -> int:
        """Steps from the start to the goal."""
        return self.distances(self.goal)[self.start]


@lru_cache(maxsize=4096)
def maze_of(name: str, size: int, loops: int) -> Maze:
    """The maze of a name, which seeds it: a tree of passages and a few more of them.

    The goal is among the cells that are farthest from the start, the upper left half of them.
    """
    source = random.Random(f"maze/{name}/{size}/{loops}")
    exits: dict[Cell, dict[str, Cell]] = {
        (row, column): {} for row in range(size) for column in range(size)
    }
    start = source.choice(sorted(exits))
    _grow(exits, start, source)
    for _ in range(loops):
        _open(exits, source)
    far = Maze(exits, start, start).distances(start)
    away = sorted(far, key=lambda cell: (far[cell], cell))
    return Maze(exits, start, source.choice(away[len(away) // 2 :]))


def _grow(exits: dict[Cell, dict[str, Cell]], start: Cell, source: random.Random) -> None:
    """Passages to all cells, depth first."""
    path, seen = [start], {start}
    while path:
        ways = [(way, to) for way, to in _beside(exits, path[-1]) if to not in seen]
        if not ways:
            path.pop()
            continue
        way, to = source.choice(ways)
        _join(exits, path[-1], way, to)
        path.append(to)
        seen.add(to)


def _open(exits: dict[Cell, dict[str, Cell]], source: random.Random) -> None:
    """One wall less, where there is one."""
    walls = [
        (cell, way, to)
        for cell in sorted(exits)
        for way, to in _beside(exits, cell)
        if way not in exits[cell]
    ]
    if walls:
        _join(exits, *source.choice(walls))


def _beside(exits: dict[Cell, dict[str, Cell]], cell: Cell) -> list[tuple[str, Cell]]:
    moves = ((way, (cell[0] + down, cell[1] + right)) for way, (down, right) in DIRECTIONS.items())
    return [(way, to) for way, to in moves if to in exits]


def _join(exits: dict[Cell, dict[str, Cell]], cell: Cell, way: str, to: Cell) -> None:
    down, right = DIRECTIONS[way]
    back = next(each for each, move in DIRECTIONS.items() if move == (-down, -right))
    exits[cell][way], exits[to][back] = to, cell


def reward(shortest: int, steps: int, turns: int) -> float:
    """What reaching the goal after so many steps earns: 1 on a shortest way, 0 after all turns."""
    return 1.0 if steps == shortest else (turns - steps) / (turns - shortest)


def random_return(maze: Maze, turns: int) -> float:
    """Expected return of a walk that takes any exit, exactly."""
    shortest = maze.shortest()
    values = dict.fromkeys(maze.exits, 0.0)
    for steps in range(turns, 0, -1):
        values[maze.goal] = reward(shortest, steps, turns)
        values = {
            cell: sum(values[to] for to in ways.values()) / len(ways)
            for cell, ways in maze.exits.items()
        }
    return values[maze.start]
