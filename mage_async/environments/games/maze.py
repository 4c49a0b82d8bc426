"""Play Maze: find the goal; in later episodes, go straight to it.

Rules: the agent sees its cell and the exits of the cell. Reaching the goal earns 1 on the shortest
way and less with every further step; with the option `wins_only` it earns 1 on any way. Walls and
goal are hidden, and the same in all episodes: the agent has to search for the goal in the first
episode, and can remember the way in later ones.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType

from mage_async.environments.environment import (
    Chance,
    Ladders,
    Outcome,
    Split,
    check_flag,
    check_whole,
    numbered,
)
from mage_async.environments.games.game import (
    COLUMNS,
    DIRECTIONS,
    ROWS,
    Cell,
    Game,
    SoloPlay,
    TrialScript,
    cell_text,
    facts_of,
    is_heldout_text,
    ladders_of,
    step,
)
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

GOAL, OVER, INVALID = "goal", "over", "invalid"
_LARGEST = 6
"""Largest number of rows and of columns."""
_RULES = """A maze of {cells} cells. You see the name of your cell and its exits.
Say one of them, up, down, left or right, and find the goal, which is hidden in one cell.
{goal} You have {turns} steps.
The maze, the start and the goal are the same in all episodes."""
_SOONER = "Reaching the goal earns 1 on the shortest way, less with every step more."
_WIN = "Reaching the goal earns 1, nothing else does."
_GOAL_IS_SEEN = "\nThe word goal before an exit says that it leads to the goal."
_CORRIDORS = "at most {rows} times {columns}"
Shapes = Sequence[Sequence[int]]
"""[rows, columns] of each size of the mazes of corridors, the border of walls included."""
_Shapes = tuple[tuple[int, int], ...]
"""Checked `Shapes`. Their text is part of the seed of a maze, so they are tuples, whatever the
configuration holds.
"""


@dataclass(frozen=True, slots=True)
class Maze:
    """Hold the cells of a maze; every cell can be reached from every other."""

    exits: dict[Cell, dict[str, Cell]]
    """For each cell, the neighbours without a wall between, by direction."""
    start: Cell
    goal: Cell
    shows_goal: bool = False
    """Whether the goal is seen from the cells next to it."""

    def distances(self, to: Cell) -> dict[Cell, int]:
        """Return the number of steps from each cell to `to`."""
        found, waiting = {to: 0}, deque([to])
        while waiting:
            cell = waiting.popleft()
            for other in self.exits[cell].values():
                if other not in found:
                    found[other] = found[cell] + 1
                    waiting.append(other)
        return found

    def shortest(self) -> int:
        """Return the number of steps from the start to the goal."""
        return self.distances(self.goal)[self.start]


class MazePlay(SoloPlay):
    """Take steps until the goal is reached or the turns are used up. The anchor, which is equal for
    equal states, is the cell.
    """

    def __init__(self, maze: Maze, turns: int, chance: Chance, *, wins_only: bool = False) -> None:
        self._maze, self._turns, self.chance, self._wins_only = maze, turns, chance, wins_only
        self.cell, self._steps = maze.start, 0
        self.seen = {self.cell: self.actions()}
        """Cells visited in this episode, with their exits."""

    @property
    def observation(self) -> str:
        """The agent's cell and its exits. If the goal is seen, the word goal precedes the exit that
        leads to it.
        """
        to_goal = self._exit_to_seen_goal()
        exits = (f"{GOAL} {way}" if way == to_goal else way for way in self.actions())
        return " ".join((cell_text(self.cell), *exits))

    def _exit_to_seen_goal(self) -> str | None:
        """Return the direction in which the agent sees the goal; `None` if it does not."""
        exits = self._maze.exits[self.cell] if self._maze.shows_goal else {}
        return next((way for way, to in exits.items() if to == self._maze.goal), None)

    def known_goal(self) -> Cell | None:
        """Return the goal's cell if this episode has reached or seen it."""
        goal = self._maze.goal
        is_seen = self._maze.shows_goal and not self.seen.keys().isdisjoint(self._maze.exits[goal])
        return goal if is_seen or self.is_at_goal() else None

    @property
    def anchor(self) -> str:
        """The agent's cell."""
        return cell_text(self.cell)

    def actions(self) -> Sequence[str]:
        """Return the exits: the directions without a wall."""
        return tuple(way for way in DIRECTIONS if way in self._maze.exits[self.cell])

    def apply(self, action: str) -> Outcome:
        """Take a step; a step into a wall, or any other action, only uses up a turn."""
        to = self._maze.exits[self.cell].get(action)
        self.cell, self._steps = to or self.cell, self._steps + 1
        self.seen.setdefault(self.cell, self.actions())
        is_there, is_last = self.is_at_goal(), self._steps == self._turns
        state = GOAL if is_there else OVER if is_last else self.observation
        earned = 0.0
        if is_there:
            # With `wins_only` every way pays as much as a shortest one.
            shortest = self._steps if self._wins_only else self._maze.shortest()
            earned = reward(shortest, self._steps, self._turns)
        observation = state if to else f"{INVALID} {state}"
        return Outcome(observation, earned, to is not None, is_there or is_last)

    def is_at_goal(self) -> bool:
        """Return whether the goal was reached."""
        return self.cell == self._maze.goal


def reward(shortest: int, steps: int, turns: int) -> float:
    """Return the reward for reaching the goal: 1 on a shortest way, falling to 0 after all
    turns.
    """
    return 1.0 if steps == shortest else (turns - steps) / (turns - shortest)


@dataclass(slots=True)
class MazeScript(TrialScript[MazePlay]):
    """Explore: go to the nearest cell not seen yet or, once the goal was seen, to the goal."""

    care: float
    """Probability of choosing a direction with care rather than at random."""
    remembers: bool
    """Whether the script uses earlier episodes."""

    def action(self, play: MazePlay) -> str:
        """Return the next direction."""
        if self.source.random() >= self.care:
            return self.source.choice(play.actions())
        plays = self.plays if self.remembers else [play]
        seen = {cell: exits for each in plays for cell, exits in each.seen.items()}
        goals = (goal for each in plays if (goal := each.known_goal()))
        return self._way(play.cell, seen, next(goals, None))

    def _way(self, start: Cell, seen: dict[Cell, Sequence[str]], goal: Cell | None) -> str:
        """Return the first step of a shortest way over seen cells to the goal or, if the goal is
        unknown, to an unseen cell.
        """
        waiting, met = deque([(start, "")]), {start}
        while waiting:
            cell, first = waiting.popleft()
            if first and (cell == goal if goal else cell not in seen):
                return first
            for way in self.source.sample(seen.get(cell, ()), len(seen.get(cell, ()))):
                to = step(cell, way)
                if to not in met:
                    met.add(to)
                    waiting.append((to, first or way))
        raise AssertionError("a maze whose goal is not known has cells that were not seen")


class MazeGame(Game[str]):
    """Play Maze; the task variant is a maze, such as `maze-17`.

    Args:
        size: Number of rows and of columns.
        loops: Number of walls removed from a maze in which exactly one way leads to each cell.
        turns: Number of steps of an episode.
        mazes: Number of mazes; a quarter of them is held out.
        shapes: Sizes [rows, columns], the border of walls included. If given, mazes are corridors
            with a few loops, `size` and `loops` are not used, and each maze draws one of these
            sizes. The goal is the farthest cell, and is seen from the cells next to it. These are
            ORBIT's mazes (arXiv 2602.04089).
        shortest: With `shapes`, least and largest number of steps on the shortest way.
        wins_only: Whether the goal pays 1, whatever the number of steps.

    Raises:
        ConfigError: an option is out of its range, no maze of `shapes` has a shortest way within
            `shortest`, or all mazes of these options are of the same split.
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

    def __init__(
        self,
        size: int = 4,
        loops: int = 2,
        turns: int = 20,
        mazes: int = 512,
        shapes: Shapes = (),
        shortest: Sequence[int] = (),
        wins_only: bool = False,
    ) -> None:
        check_whole("maze", "size", size, 3, _LARGEST)
        check_whole("maze", "loops", loops, 0, 100)
        check_whole("maze", "mazes", mazes, 8, 1_000_000)
        check_flag("maze", "wins_only", wins_only)
        self._shapes, self._shortest = _checked(shapes, shortest)
        if shapes:
            self.ladders = ladders_of()  # `size` changes nothing
        # Without the border of walls, which `shapes` count too.
        sides = zip(*self._shapes, strict=True) if shapes else ((size + 2,), (size + 2,))
        rows, columns = (max(each) - 2 for each in sides)
        # A shortest way passes no cell twice, so this many turns suffice for it.
        least_turns = self._shortest[1] if shapes else size * size
        check_whole("maze", "turns", turns, least_turns, 1000)
        self._size, self._loops, self._turns, self._wins_only = size, loops, turns, wins_only
        self._cells = (_CORRIDORS if shapes else "{rows} times {columns}").format(
            rows=rows, columns=columns
        )
        words = (*DIRECTIONS, *ROWS[:rows], *COLUMNS[:columns], GOAL, OVER, INVALID)
        # An episode is won if it earns anything. A goal that is reached with the last turn may earn
        # nothing; such an episode is lost.
        facts = facts_of("maze", turns, words, threshold=1e-9)
        super().__init__(facts, numbered("maze", mazes), "maze")
        self.maze = lru_cache(maxsize=4096)(self._make_maze)
        """Returns the maze of a task variant."""
        # Make a maze of each split, which fails if the options cannot be met together.
        for members in self._splits.values():
            self.maze(next(iter(members)))

    def family(self, member: str) -> str:
        """Return the number of steps on the shortest way to the goal."""
        return f"steps-{self.maze(member).shortest()}"

    def _make_maze(self, member: str) -> Maze:
        """Generate a maze of the variant's split. The exits, start and goal of a maze decide its
        split, so that no maze is in both.
        """
        name, is_heldout = self.variant(member), member in self._splits["heldout"]
        for number in range(_MAX_TRIES):
            seed = f"{name}/{number}" if number else name
            if self._shapes:
                maze = corridors_of(seed, self._shapes, self._shortest)
            else:
                maze = maze_of(seed, self._size, self._loops)
            # Sorted, because equal mazes may have been dug in another order.
            exits = sorted((cell, sorted(ways)) for cell, ways in maze.exits.items())
            if is_heldout_text(f"{exits}/{maze.start}/{maze.goal}") == is_heldout:
                return maze
        split = "held-out" if is_heldout else "training"
        raise ConfigError(
            f"maze: there are too few mazes of these options: {_MAX_TRIES} draws gave no {split} "
            "one; allow more `shapes` or a wider `shortest`"
        )

    def rules(self) -> str:
        """Return the rules in plain words."""
        goal = (_WIN if self._wins_only else _SOONER) + (_GOAL_IS_SEEN if self._shapes else "")
        return _RULES.format(cells=self._cells, goal=goal, turns=self._turns)

    def begin(self, task: Task, episode: int) -> MazePlay:
        """Start at the maze's start."""
        maze, chance = self.maze(task.member), Chance(task.seed, episode)
        return MazePlay(maze, self._turns, chance, wins_only=self._wins_only)

    def script(self, source: random.Random) -> MazeScript:
        """Return a script whose care is drawn for the trial; three in four remember."""
        return MazeScript(source, source.choice((0.5, 0.8, 0.95)), source.random() < 0.75)

    def overlap(self, one: str, other: str) -> int:
        """Return 1 if the goal is in the same cell of both mazes, else 0."""
        return int(self.maze(one).goal == self.maze(other).goal)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return values per episode: `random` and `known` are exact, the others are means over 200
        scripted trials.

        `random` takes any exit. `explorer_without_memory` goes to the nearest cell that it has not
        seen in the episode; `explorer` goes to the goal once it has seen it. `known` takes the
        shortest way.
        """
        chance = [
            random_return(self.maze(each), self._turns, wins_only=self._wins_only)
            for each in self._splits[split]
        ]
        return {
            "random": (sum(chance) / len(chance),) * num_episodes,
            **self.measured(
                split,
                num_episodes,
                explorer_without_memory=partial(MazeScript, care=1.0, remembers=False),
                explorer=partial(MazeScript, care=1.0, remembers=True),
            ),
            "known": (1.0,) * num_episodes,
        }


def random_return(maze: Maze, turns: int, *, wins_only: bool = False) -> float:
    """Return the exact expected return of a uniform random walk."""
    # Go backwards from the last turn: `values` has each cell's expected reward after `steps` steps.
    values, shortest = dict.fromkeys(maze.exits, 0.0), maze.shortest()
    for steps in range(turns, 0, -1):
        values[maze.goal] = reward(steps if wins_only else shortest, steps, turns)
        values = {
            cell: sum(values[to] for to in ways.values()) / len(ways)
            for cell, ways in maze.exits.items()
        }
    return values[maze.start]


# The functions below generate mazes.


_MAX_TRIES = 200
"""Largest number of mazes that are drawn for one task variant, until one is of its split."""


def maze_of(name: str, size: int, loops: int) -> Maze:
    """Generate the maze whose name is the seed: a tree of passages, and `loops` further passages.

    The goal is drawn from the farther half of the cells, by distance from the start.
    """
    source = random.Random(f"maze/{name}/{size}/{loops}")
    exits: dict[Cell, dict[str, Cell]] = {
        (row, column): {} for row in range(size) for column in range(size)
    }
    start = source.choice(sorted(exits))
    _grow(exits, start, source)
    for _ in range(loops):
        _remove_wall(exits, source)
    distance = Maze(exits, start, start).distances(start)
    by_distance = sorted(distance, key=lambda cell: (distance[cell], cell))
    return Maze(exits, start, source.choice(by_distance[len(by_distance) // 2 :]))


def _grow(exits: dict[Cell, dict[str, Cell]], start: Cell, source: random.Random) -> None:
    """Dig passages to all cells, depth first."""
    path, seen = [start], {start}
    while path:
        ways = [(way, to) for way, to in _neighbours(exits, path[-1]) if to not in seen]
        if not ways:
            path.pop()
            continue
        way, to = source.choice(ways)
        _join(exits, path[-1], way, to)
        path.append(to)
        seen.add(to)


def _remove_wall(exits: dict[Cell, dict[str, Cell]], source: random.Random) -> None:
    """Remove a random wall, if there is one."""
    walls = [
        (cell, way, to)
        for cell in sorted(exits)
        for way, to in _neighbours(exits, cell)
        if way not in exits[cell]
    ]
    if walls:
        _join(exits, *source.choice(walls))


def _neighbours(exits: dict[Cell, dict[str, Cell]], cell: Cell) -> list[tuple[str, Cell]]:
    """Return the direction and the cell of each neighbour, walls ignored."""
    return [(way, step(cell, way)) for way in DIRECTIONS if step(cell, way) in exits]


def _join(exits: dict[Cell, dict[str, Cell]], cell: Cell, way: str, to: Cell) -> None:
    """Open a passage between two neighbours, in both directions."""
    back = next(each for each in DIRECTIONS if step(to, each) == cell)
    exits[cell][way], exits[to][back] = to, cell


# Mazes of corridors, one cell wide, as ORBIT's environment digs them.


def _checked(shapes: Shapes, shortest: Sequence[int]) -> tuple[_Shapes, tuple[int, ...]]:
    """Return the shapes and the bounds on the shortest way as tuples.

    Raises:
        ConfigError: shapes or bounds have another type, or are out of range.
    """
    for name, value in (("shapes", shapes), ("shortest", shortest)):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"maze: `{name}` must be a list, got {value!r}")
    for shape in shapes:
        if not isinstance(shape, list | tuple) or len(shape) != 2:
            raise ConfigError(f"maze: `shapes` holds pairs of rows and columns, got {shape!r}")
        for number in shape:
            check_whole("maze", "shapes", number, 5, len(ROWS) + 2)
    for number in shortest:
        check_whole("maze", "shortest", number, 1, 1000)
    if shapes and (len(shortest) != 2 or shortest[0] > shortest[1]):
        raise ConfigError(f"maze: `shortest` must be [least, most] steps, got {shortest!r}")
    return tuple((rows, columns) for rows, columns in shapes), tuple(shortest)


def corridors_of(name: str, shapes: _Shapes, shortest: tuple[int, ...]) -> Maze:
    """Generate the maze of corridors whose name is the seed: its goal is the cell farthest from the
    start, at a number of steps within `shortest`.

    Raises:
        ConfigError: none of 1,000 mazes has such a shortest way.
    """
    source = random.Random(f"corridors/{name}/{shapes}/{shortest}")
    for _ in range(1000):
        rows, columns = source.choice(shapes)
        start = source.randrange(rows - 2), source.randrange(columns - 2)
        cells = _dig(start, rows - 2, columns - 2, source)
        exits = {
            cell: {way: to for way in DIRECTIONS if (to := step(cell, way)) in cells}
            for cell in sorted(cells)
        }
        distance = Maze(exits, start, start).distances(start)
        goal = max(distance, key=lambda cell: distance[cell])
        if shortest[0] <= distance[goal] <= shortest[1]:
            return Maze(exits, start, goal, shows_goal=True)
    raise ConfigError(
        f"maze: no maze of `shapes` = {shapes} has a shortest way of {shortest[0]} to {shortest[1]}"
    )


def _dig(start: Cell, rows: int, columns: int, source: random.Random) -> set[Cell]:
    """Dig corridors from the start, cell by cell; return the dug cells.

    A cell may be dug if it is next to only one dug cell. When no such cell is left, dig two or
    three cells that are next to two dug cells: these close loops.
    """
    inside = {(row, column) for row in range(rows) for column in range(columns)}
    cells, ends = {start}, [start]

    def num_open(cell: Cell) -> int:
        """Return the number of a cell's neighbours that are dug."""
        return sum(step(cell, way) in cells for way in DIRECTIONS)

    while ends:
        # Dig one neighbour of an end or, with probability 0.3, up to two.
        end, dug, most = source.choice(ends), 0, 2 if source.random() >= 0.7 else 1
        for way in source.sample(tuple(DIRECTIONS), len(DIRECTIONS)):
            to = step(end, way)
            if dug < most and to in inside - cells and num_open(to) <= 1:
                cells.add(to)
                ends.append(to)
                dug += 1
        if not dug:
            ends.remove(end)
    for _ in range(source.randint(2, 3)):
        if joining := [cell for cell in sorted(inside - cells) if num_open(cell) == 2]:
            cells.add(source.choice(joining))
    return cells
