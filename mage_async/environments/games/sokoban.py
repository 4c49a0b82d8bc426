"""Play Sokoban: push every box onto a target.

Rules: the agent walks in a room of walls, boxes and targets; it can push a box but never pull one.
Nothing is hidden, but a wrongly pushed box cannot be pulled back, so an episode shows which moves
to avoid in the next. The room is the same in all episodes. Cells are numbers, row by row from 0; a
set of cells is an integer whose bit `n` stands for cell `n`. A move is an index of `MOVES`. The
border is wall, so a step never leaves the room.
"""

import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache, partial

from mage_async.environments.environment import Chance, Outcome, Split, check_whole, numbered
from mage_async.environments.games.game import (
    Game,
    SoloPlay,
    TrialScript,
    cells_of,
    facts_of,
    is_heldout_text,
    ladders_of,
    set_of,
)
from mage_async.errors import ConfigError, EnvironmentFault
from mage_async.trajectory import Task

MOVES = ("up", "down", "left", "right")
WALL, FLOOR, TARGET, BOX, STORED, PLAYER, STANDING = (
    *("wall", "floor", "target", "box", "stored", "player", "standing"),
)
ROW, SOLVED, STUCK, OVER, INVALID = "row", "solved", "stuck", "over", "invalid"


@dataclass(frozen=True, slots=True)
class Rewards:
    """Hold the rewards of a step, as in gym-sokoban. An invalid action costs one step."""

    step: float = -0.1
    """Reward of every step, to which the others are added."""
    on: float = 1.0
    """Reward for a box that comes onto a target."""
    off: float = -1.0
    """Reward for a box that leaves a target."""
    solved: float = 10.0
    """Reward for the step after which every box is on a target, added to the others."""


REWARDS = Rewards()
_RULES = """Push the boxes onto the targets, in a room of {size} rows of {size} cells.
You see the room row by row: wall, floor, target, box, player; stored is a box on a target,
standing is you on one. Answer with one to {steps} of up, down, left, right, separated by spaces.
You can push a box, one at a time, but never pull. A step earns {step:g}; a box that comes onto a
target earns {on:g}, one that leaves it {off:g}; the room solved earns {solved:g} more.
Any other answer earns what a step does. An episode ends after {turns} turns, and where a box can
no longer be pushed to any target."""

Position = tuple[int, int]
"""Cell of the player, and set of the cells with a box."""


@dataclass(frozen=True, slots=True)
class Room:
    """Describe a room in its initial state."""

    size: int
    """Number of rows and of columns, including the border."""
    floor: int
    """Set of the cells that are not wall."""
    targets: int
    """Set of the cells to which boxes have to be pushed."""
    start: Position
    length: int
    """Number of steps of the shortest solution."""
    dead: int
    """Set of the floor cells from which a box cannot be pushed to any target, wherever other boxes
    are.
    """

    def steps(self) -> tuple[int, int, int, int]:
        """Return the numbers that up, down, left and right add to a cell's number."""
        return (-self.size, self.size, -1, 1)


class SokobanPlay(SoloPlay):
    """Play one episode. The anchor, which is equal for equal states, is the current room."""

    def __init__(self, room: Room, turns: int, steps_per_turn: int, chance: Chance) -> None:
        self.room, self._turns_left, self.chance = room, turns, chance
        self._actions = action_names(steps_per_turn)
        self._empty_room = _words_without_boxes(room)
        self.position: Position = room.start
        self.observation = self.anchor
        self.done: list[str] = []
        """Valid actions so far."""

    @property
    def anchor(self) -> str:
        """The contents of each cell, row by row."""
        words, size = self._empty_room.copy(), self.room.size
        player, boxes = self.position
        for cell in cells_of(boxes):
            # `words` has one more word at the beginning of each row, `row`.
            words[cell + cell // size + 1] = STORED if self.room.targets >> cell & 1 else BOX
        words[player + player // size + 1] = STANDING if self.room.targets >> player & 1 else PLAYER
        return " ".join(words)

    @property
    def is_solved(self) -> bool:
        """Whether every box is on a target."""
        return self.position[1] == self.room.targets

    def actions(self) -> Sequence[str]:
        """Return all actions; a step against a wall is legal, and costs."""
        return tuple(self._actions)

    def apply(self, action: str) -> Outcome:
        """Take the steps of an action; steps after the room is solved are not taken."""
        self._turns_left -= 1
        moves = self._actions.get(action)
        reward = REWARDS.step if moves is None else 0.0
        if moves is not None:
            self.done.append(action)
        for move in moves or ():
            reward += self._step(self.room.steps()[move])
            if self.is_solved:
                break
        end = self._end()
        words = (INVALID if moves is None else "", self.anchor, end)
        return Outcome(" ".join(filter(None, words)), reward, moves is not None, bool(end))

    def _step(self, step: int) -> float:
        """Take one step; return its reward."""
        stored_before = self._num_stored()
        self.position = push(self.room, self.position, step)
        stored = self._num_stored()
        reward = REWARDS.step
        if stored > stored_before:
            reward += REWARDS.on
        if stored < stored_before:
            reward += REWARDS.off
        return reward + REWARDS.solved if self.is_solved else reward

    def _num_stored(self) -> int:
        """Return the number of boxes on targets."""
        return (self.position[1] & self.room.targets).bit_count()

    def _end(self) -> str:
        """Return the word for the end of the episode; "" if it goes on."""
        if self.is_solved:
            return SOLVED
        if self.position[1] & self.room.dead:
            return STUCK
        return "" if self._turns_left else OVER


@cache
def action_names(most: int) -> dict[str, tuple[int, ...]]:
    """Return all actions of up to `most` steps, with the move of each step."""
    return {
        " ".join(MOVES[move] for move in moves): moves
        for length in range(1, most + 1)
        for moves in itertools.product(range(len(MOVES)), repeat=length)
    }


def _words_without_boxes(room: Room) -> list[str]:
    """Return the words of the room without player and boxes, with the word that begins each row."""
    words: list[str] = []
    for cell in range(room.size * room.size):
        words += [ROW] if cell % room.size == 0 else []
        is_floor, is_target = room.floor >> cell & 1, room.targets >> cell & 1
        words.append(TARGET if is_target else FLOOR if is_floor else WALL)
    return words


@dataclass(slots=True)
class SokobanScript(TrialScript[SokobanPlay]):
    """Take steps towards the solution, or any steps; once an episode has solved the room, repeat
    its actions.

    Args:
        source: Random source.
        steps_per_turn: Largest number of steps in an action.
        care: Probability that a step is one of a shortest solution.
        memory: Probability of following a solution of an earlier episode.
    """

    steps_per_turn: int
    care: float
    memory: float
    _distances: dict[Position, int] = field(default_factory=dict)
    """Number of steps to the solution, from each position of the current room."""

    def begin(self) -> None:
        """Solve the room, which is the same in all episodes."""
        if not self._distances:
            room = self.plays[0].room
            # No bound on the steps: the search ends with the room, or at `_MAX_POSITIONS`.
            self._distances = distances(room.size, room.floor, room.targets, 10**9)

    def action(self, play: SokobanPlay) -> str:
        """Return the next action."""
        repeated = self._action_of_solution(play)
        if repeated is not None and self.source.random() < self.memory:
            return repeated
        return " ".join(MOVES[move] for move in self._next_moves(play))

    def _action_of_solution(self, play: SokobanPlay) -> str | None:
        """Return the next action of an earlier episode that began like this one and was solved;
        None if there is no such episode.
        """
        taken = len(play.done)
        for earlier in self.plays[:-1]:
            began_so = earlier.done[:taken] == play.done
            if earlier.is_solved and began_so and len(earlier.done) > taken:
                return earlier.done[taken]
        return None

    def _next_moves(self, play: SokobanPlay) -> list[int]:
        """Return the moves of an action."""
        position, moves = play.position, list[int]()
        while len(moves) < self.steps_per_turn and position[1] != play.room.targets:
            move = self._next_move(play.room, position)
            position = push(play.room, position, play.room.steps()[move])
            moves.append(move)
        return moves

    def _next_move(self, room: Room, position: Position) -> int:
        """Return a move that shortens the way to the solution, or any move."""
        moves = range(len(MOVES))
        if self.source.random() >= self.care:
            return self.source.choice(moves)
        far = len(self._distances)  # above every distance: for positions that are not known
        left = [self._distances.get(push(room, position, step), far) for step in room.steps()]
        return self.source.choice([move for move in moves if left[move] == min(left)])


class Sokoban(Game[str]):
    """Play Sokoban; the task variant is a room, such as `room-17`.

    Args:
        size: Number of rows and of columns, including the border of walls.
        boxes: Number of boxes.
        turns: Largest number of turns in an episode.
        steps_per_turn: Largest number of steps in one action.
        shortest: Smallest number of steps of a room's shortest solution.
        longest: Largest number of steps of a room's shortest solution.
        rooms: Number of rooms, a quarter of them held out.

    Raises:
        ConfigError: an option is out of its range, or no room satisfies the options together.
    """

    ladders = ladders_of(boxes=range(1, 5))

    def __init__(
        self,
        size: int = 6,
        boxes: int = 2,
        turns: int = 7,
        steps_per_turn: int = 3,
        shortest: int = 5,
        longest: int = 21,
        rooms: int = 2048,
    ) -> None:
        check_whole("sokoban", "size", size, 5, 20)
        check_whole("sokoban", "boxes", boxes, 1, 6)
        check_whole("sokoban", "turns", turns, 1, 1000)
        check_whole("sokoban", "steps_per_turn", steps_per_turn, 1, 4)
        check_whole("sokoban", "shortest", shortest, 1, turns * steps_per_turn)
        check_whole("sokoban", "longest", longest, shortest, turns * steps_per_turn)
        check_whole("sokoban", "rooms", rooms, 8, 1_000_000)
        self._size, self._num_boxes = size, boxes
        self._turns, self._steps_per_turn = turns, steps_per_turn
        self._lengths = range(shortest, longest + 1)
        self.room = lru_cache(maxsize=4096)(self._make_room)
        """Returns the room of a task variant."""
        words = (
            *(*MOVES, ROW, WALL, FLOOR, TARGET, BOX, STORED, PLAYER, STANDING),
            *(SOLVED, STUCK, OVER, INVALID),
        )
        returns = (turns * steps_per_turn * REWARDS.step, REWARDS.solved + boxes * REWARDS.on)
        # Only the turn that solves a room earns at least `solved`. It has more boxes on targets at
        # its end than at its beginning, which earns more than its steps cost, up to four of them.
        # Any other turn earns at most `on` in each of its steps.
        facts = facts_of("sokoban", turns, words, returns, win_reward=REWARDS.solved)
        super().__init__(facts, numbered("room", rooms), "room")
        # Only drawing rooms shows whether some room satisfies all options together.
        try:
            for members in self._splits.values():
                self.room(next(iter(members)))
        except EnvironmentFault as fault:
            raise ConfigError(str(fault)) from fault

    def family(self, member: str) -> str:
        """Return the difficulty: steps of the shortest solution, in classes of five."""
        least = self.room(member).length // 5 * 5
        return f"steps-{least}-{least + 4}"

    def rules(self) -> str:
        """Return the rules in plain words, with the rewards."""
        return _RULES.format(
            size=self._size, steps=self._steps_per_turn, turns=self._turns, **asdict(REWARDS)
        )

    def laid_out(self, observation: str) -> str:
        """Return the room with one row a line."""
        return observation.replace(f" {ROW} ", f"\n{ROW} ")

    def begin(self, task: Task, episode: int) -> SokobanPlay:
        """Start with player and boxes at their initial cells."""
        chance = Chance(task.seed, episode)
        return SokobanPlay(self.room(task.member), self._turns, self._steps_per_turn, chance)

    def script(self, source: random.Random) -> SokobanScript:
        """Return a script whose care and memory are drawn for the trial."""
        care, memory = source.choice((0.0, 0.5, 0.8, 1.0)), source.choice((0.0, 0.5, 0.95))
        return self._player(care, memory, source)

    def best_script(self, source: random.Random) -> SokobanScript:
        """Return a script that follows a shortest solution."""
        return self._player(1.0, 0.0, source)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return the mean returns of scripted players over 200 trials, per episode.

        `random` takes any steps. `retry` takes any steps until an episode has solved the room, and
        then repeats that episode's actions. `solver` follows a shortest solution.
        """
        styles = {"random": (0.0, 0.0), "retry": (0.0, 1.0), "solver": (1.0, 0.0)}
        players = {name: partial(self._player, *style) for name, style in styles.items()}
        return self.measured(split, num_episodes, **players)

    def _player(self, care: float, memory: float, source: random.Random) -> SokobanScript:
        """Return a script with this care and memory."""
        return SokobanScript(source, self._steps_per_turn, care, memory)

    def _make_room(self, member: str) -> Room:
        """Draw a room of the variant's split whose shortest solution has one of the lengths."""
        number, size = self.variant(member).removeprefix("room-"), self._size
        source = random.Random(f"sokoban/{size}/{self._num_boxes}/{number}")
        is_heldout = member in self._splits["heldout"]
        for _ in range(_MAX_TRIES):
            floor = _carve(source, size)
            cells = list(cells_of(floor))
            # A target and another cell for each box, and a cell for the player.
            if len(cells) < 2 * self._num_boxes + 1:
                continue
            targets = set_of(source.sample(cells, self._num_boxes))
            room = _scramble(source, size, floor, targets, self._lengths)
            # How a room looks decides its split, so that no room is in both.
            if room is not None and is_heldout == is_heldout_text(
                f"{room.floor}/{room.targets}/{room.start}"
            ):
                return room
        raise EnvironmentFault(
            f"sokoban: found no room of {size} by {size} with {self._num_boxes} "
            f"boxes that takes {self._lengths.start} to {self._lengths.stop - 1} steps; change "
            "`size`, `boxes`, `shortest` or `longest`"
        )


def push(room: Room, position: Position, step: int) -> Position:
    """Return the position after a step; the same position if a wall or a box is in the way."""
    player, boxes = position
    ahead = player + step
    if not room.floor >> ahead & 1:
        return position
    if boxes >> ahead & 1:
        beyond = ahead + step
        if not (room.floor & ~boxes) >> beyond & 1:
            return position
        # Move the box: clear the bit of its old cell, and set that of its new one.
        boxes ^= 1 << ahead | 1 << beyond
    return ahead, boxes


# The functions below make rooms, backwards from a solved position, so that each can be solved.


_TURN = 0.35
"""Probability that the random walk that carves a room changes its direction."""
_MAX_POSITIONS = 100_000
"""Number of positions after which the search backwards from the solved ones stops."""
_MAX_TRIES = 2000
"""Largest number of rooms that are drawn for one task variant."""


def _carve(source: random.Random, size: int) -> int:
    """Return floor along a random walk, with a random side step at each cell."""
    steps = (-size, size, -1, 1)
    inside = set_of(
        row * size + column for row in range(1, size - 1) for column in range(1, size - 1)
    )
    cell = source.choice(list(cells_of(inside)))
    step, floor = source.choice(steps), 1 << cell
    for _ in range(4 * size):
        if source.random() < _TURN:
            step = source.choice(steps)
        # `inside >> cell + step & 1` is 1 if the next cell lies within the border.
        if inside >> cell + step & 1:
            cell += step
        floor |= 1 << cell | (1 << cell + source.choice(steps) & inside)
    return floor


def _scramble(
    source: random.Random, size: int, floor: int, targets: int, lengths: range
) -> Room | None:
    """Return a room in which no box stands on a target.

    The number of steps of its shortest solution is drawn from `lengths`; if no position is so far
    from the solved ones, it is the largest smaller number in `lengths` that occurs. Return None if
    none occurs.
    """
    found = distances(size, floor, targets, source.choice(lengths))
    starts = [
        position
        for position, length in found.items()
        if length >= lengths.start and not position[1] & targets
    ]
    if not starts:
        return None
    farthest = max(map(found.__getitem__, starts))
    start = source.choice([each for each in starts if found[each] == farthest])
    return Room(size, floor, targets, start, found[start], floor & ~_alive(size, floor, targets))


def distances(size: int, floor: int, targets: int, most: int) -> dict[Position, int]:
    """Return the steps to the nearest solved position, for all positions at most `most` steps from
    one.

    The search plays backwards: a step away from a cell may pull along the box on the other side. It
    stops after the 100,000 nearest positions.
    """
    found: dict[Position, int] = {(cell, targets): 0 for cell in cells_of(floor & ~targets)}
    waiting = deque(found)
    while waiting and len(found) < _MAX_POSITIONS:
        player, boxes = position = waiting.popleft()
        distance = found[position] + 1
        if distance > most:
            break
        free = floor & ~boxes
        for step in (-size, size, -1, 1):
            if not free >> player + step & 1:
                continue
            predecessors = [(player + step, boxes)]
            # A box on the other side may have been pushed there by this step: pull it back.
            if boxes >> player - step & 1:
                predecessors.append((player + step, boxes ^ (1 << player - step | 1 << player)))
            for predecessor in predecessors:
                if predecessor not in found:
                    found[predecessor] = distance
                    waiting.append(predecessor)
    return found


def _alive(size: int, floor: int, targets: int) -> int:
    """Return the cells from which a box that is alone in the room can be pushed to a target."""
    alive, waiting = targets, list(cells_of(targets))
    while waiting:
        cell = waiting.pop()
        for step in (-size, size, -1, 1):
            before = cell + step
            # A box is pushed from `before` to `cell` by a player who stands at `before + step`.
            if alive >> before & 1 or not floor >> before & 1 or not floor >> before + step & 1:
                continue
            alive |= 1 << before
            waiting.append(before)
    return alive
