"""Play Grid: walk to a goal that the observation names.

Rules: a square grid without walls; a step goes up, down, left or right. Reaching the goal earns 1
and ends the episode; nothing else earns anything. Nothing is hidden: the task is hard because a
random walk rarely reaches a far goal, so most trials earn nothing. Every trial ends in some cell,
however, and would have been a success with that cell as its goal: `Grid.reached` returns it, and
hindsight relabelling trains on it. From a corner, a policy that only walks down and right reaches
many goals without reading the observation; from the middle (`start`), with goals on all sides, it
does not.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from mage_async.environments.environment import (
    HELDOUT_EVERY,
    Chance,
    Outcome,
    Play,
    Split,
    check_one_of,
    check_whole,
    split_by,
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
    step,
)
from mage_async.trajectory import Task

GOAL, REACHED, OVER, INVALID = "goal", "reached", "over", "invalid"
Start = Literal["corner", "middle"]
"""Place where an episode begins."""
_RULES = """A grid of {size} times {size} cells, with rows {rows} from top to bottom and
columns {columns} from left to right. You are told the goal, by row and column, and your cell. Say
up, down, left or right. Reaching the goal earns 1 and ends the episode; nothing else earns
anything. You have {turns} steps. The goal is the same in all episodes."""


class GridPlay(SoloPlay):
    """Take steps until the goal is reached or the turns are used up. The anchor, which is equal for
    equal states, is the goal and the cell.
    """

    def __init__(self, start: Cell, goal: Cell, size: int, turns: int, chance: Chance) -> None:
        self._goal, self._size, self._turns, self.chance = goal, size, turns, chance
        self.cell, self._steps = start, 0

    @property
    def observation(self) -> str:
        """The goal and the agent's cell."""
        return f"{GOAL} {cell_text(self._goal)} {cell_text(self.cell)}"

    @property
    def anchor(self) -> str:
        """The goal and the agent's cell."""
        return self.observation

    def actions(self) -> Sequence[str]:
        """Return the directions that stay in the grid."""
        return [way for way in DIRECTIONS if self._cell_after(way) is not None]

    def towards_goal(self) -> list[str]:
        """Return the directions in which the next step lies on a shortest way."""
        distance = steps_between(self.cell, self._goal)
        steps = ((way, self._cell_after(way)) for way in DIRECTIONS)
        return [
            way for way, to in steps if to is not None and steps_between(to, self._goal) < distance
        ]

    def apply(self, action: str) -> Outcome:
        """Take a step; a step out of the grid, or any other action, only uses up a turn."""
        to = self._cell_after(action)
        self.cell, self._steps = to or self.cell, self._steps + 1
        is_there = self.cell == self._goal
        is_over = is_there or self._steps == self._turns
        state = REACHED if is_there else OVER if is_over else cell_text(self.cell)
        observation = f"{INVALID} {state}" if to is None else state
        return Outcome(observation, float(is_there), to is not None, is_over)

    def _cell_after(self, action: str) -> Cell | None:
        """Return the cell one step away; None if it lies outside, or the action is no direction."""
        if action not in DIRECTIONS:
            return None
        row, column = step(self.cell, action)
        return (row, column) if 0 <= row < self._size and 0 <= column < self._size else None


@dataclass(slots=True)
class GridScript(TrialScript[GridPlay]):
    """Walk to the goal, or in a random direction."""

    care: float
    """Probability of a step towards the goal rather than a random one."""

    def action(self, play: GridPlay) -> str:
        """Return the next direction."""
        is_careful = self.source.random() < self.care
        return self.source.choice(play.towards_goal() if is_careful else play.legal_actions())


class Grid(Game[Cell]):
    """Play Grid; the task variant is the goal, such as `beta-three`.

    Args:
        size: Number of rows and of columns.
        turns: Number of steps of an episode.
        nearest: Smallest number of steps to a goal that is played; hindsight may relabel to nearer
            cells.
        start: Place where an episode begins: the upper left `corner` or the `middle`.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(
        self, size: int = 6, turns: int = 12, nearest: int = 1, start: Start = "corner"
    ) -> None:
        check_whole("grid", "size", size, 4, len(ROWS))
        check_one_of("grid", "start", start, get_args(Start))
        self._start = (0, 0) if start == "corner" else (size // 2, size // 2)
        cells = {
            cell_text((row, column), "-"): (row, column)
            for row in range(size)
            for column in range(size)
        }
        distances = {name: steps_between(self._start, cell) for name, cell in cells.items()}
        farthest = max(distances.values())
        check_whole("grid", "turns", turns, farthest, 1000)
        # All goals that are farther away may belong to one split, which leaves the other empty.
        check_whole("grid", "nearest", nearest, 1, farthest - 2)
        self._size, self._turns = size, turns
        goals = {name: cell for name, cell in cells.items() if cell != self._start}
        played = {name: cell for name, cell in goals.items() if distances[name] >= nearest}
        words = (*DIRECTIONS, *ROWS[:size], *COLUMNS[:size], GOAL, REACHED, OVER, INVALID)
        facts = facts_of("grid", turns, words, threshold=0.5, example="down")
        # Hindsight also relabels to goals nearer than `nearest`.
        super().__init__(facts, split_by(played, _is_heldout), "goal", unsplit=goals)

    def family(self, member: str) -> str:
        """Return the number of steps on the shortest way to the goal."""
        return f"steps-{steps_between(self._start, self.variant(member))}"

    def rules(self) -> str:
        """Return the rules in plain words."""
        rows, columns = (", ".join(names[: self._size]) for names in (ROWS, COLUMNS))
        return _RULES.format(size=self._size, turns=self._turns, rows=rows, columns=columns)

    def begin(self, task: Task, episode: int) -> GridPlay:
        """Start in the corner or in the middle."""
        chance = Chance(task.seed, episode)
        return GridPlay(self._start, self.variant(task.member), self._size, self._turns, chance)

    def reached(self, play: Play) -> str | None:
        """Return the agent's cell as a goal; None for the start, which is no goal."""
        assert isinstance(play, GridPlay)
        return cell_text(play.cell, "-") if play.cell != self._start else None

    def script(self, source: random.Random) -> GridScript:
        """Return a script whose care is drawn for the trial."""
        return GridScript(source, source.choice((0.0, 0.5, 0.9)))

    def best_script(self, source: random.Random) -> GridScript:
        """Return a script that takes a shortest way."""
        return GridScript(source, 1.0)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return values per episode: `random` is a mean over 200 trials of random steps, `known`
        takes the shortest way.
        """
        walker = partial(GridScript, care=0.0)
        return {
            **self.measured(split, num_episodes, random=walker),
            "known": (1.0,) * num_episodes,
        }


def steps_between(one: Cell, other: Cell) -> int:
    """Return the number of steps on a shortest way between two cells."""
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def _is_heldout(cell: Cell) -> bool:
    """Return whether a goal is held out; each row and column of such a goal also has trained
    goals.
    """
    return (2 * cell[0] + cell[1]) % HELDOUT_EVERY == HELDOUT_EVERY - 1
