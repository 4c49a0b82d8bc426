"""Sokoban's rooms: made by playing backwards from the solved room, so that each can be solved.

Cells are numbers, row by row from 0; a set of them is an integer (`cell_sets`). The border is wall,
so a step never leaves the room. A position is the player's cell and the set of boxes.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mage_async.environments.cell_sets import cells_of, set_of

Position = tuple[int, int]
"""The player's cell, and the set of cells with a box."""

_TURN = 0.35
"""How often the walk that carves a room changes its direction."""
_MOST_POSITIONS = 100_000
_MOST_TRIES = 2000


@dataclass(frozen=True, slots=True)
class Room:
    """Where everything stands at the beginning."""

    size: int
    """Cells in a row, and rows, the border included."""
    floor: int
    """The set that is not wall."""
    targets: int
    start: Position
    length: int
    """Steps of the shortest solution."""
    dead: int
    """Floor from which a box can be pushed to no target, whatever else stands where."""

    def steps(self) -> tuple[int, int, int, int]:
        """What up, down, left and right add to a cell."""
        return (-self.size, self.size, -1, 1)


def make_room(
    source: random.Random,
    size: int,
    num_boxes: int,
    lengths: range,
    wanted: Callable[[Room], bool],
) -> Room | None:
    """A room with a shortest solution of one of the `lengths` that is `wanted`, or None where none
    was found in many tries.
    """
    for _ in range(_MOST_TRIES):
        floor = _carve(source, size)
        cells = list(cells_of(floor))
        if len(cells) < 2 * num_boxes + 1:
            continue
        targets = set_of(source.sample(cells, num_boxes))
        room = _scramble(source, size, floor, targets, lengths)
        if room is not None and wanted(room):
            return room
    return None


def _carve(source: random.Random, size: int) -> int:
    """Floor along a random walk, one side step at each cell."""
    steps = (-size, size, -1, 1)
    inside = set_of(
        row * size + column for row in range(1, size - 1) for column in range(1, size - 1)
    )
    cell = source.choice(list(cells_of(inside)))
    step, floor = source.choice(steps), 1 << cell
    for _ in range(4 * size):
        if source.random() < _TURN:
            step = source.choice(steps)
        if inside >> cell + step & 1:
            cell += step
        floor |= 1 << cell | (1 << cell + source.choice(steps) & inside)
    return floor


def _scramble(
    source: random.Random, size: int, floor: int, targets: int, lengths: range
) -> Room | None:
    """A position without a box on a target; its distance from the solved ones is drawn from the
    wanted, or as near below as the room allows.
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
    """Steps to the nearest solved position, of all positions at most so far from one.

    Plays backwards: a step away from a cell may pull the box behind along. Stops after 100,000
    positions, the nearest ones.
    """
    found: dict[Position, int] = {(cell, targets): 0 for cell in cells_of(floor & ~targets)}
    waiting = deque(found)
    while waiting and len(found) < _MOST_POSITIONS:
        player, boxes = position = waiting.popleft()
        distance = found[position] + 1
        if distance > most:
            break
        free = floor & ~boxes
        for step in (-size, size, -1, 1):
            if not free >> player + step & 1:
                continue
            befores = [(player + step, boxes)]
            if boxes >> player - step & 1:
                befores.append((player + step, boxes ^ (1 << player - step | 1 << player)))
            for before in befores:
                if before not in found:
                    found[before] = distance
                    waiting.append(before)
    return found


def _alive(size: int, floor: int, targets: int) -> int:
    """Cells from which a single box in the room could be pushed to a target."""
    alive, waiting = targets, list(cells_of(targets))
    while waiting:
        cell = waiting.pop()
        for step in (-size, size, -1, 1):
            before = cell + step
            if alive >> before & 1 or not floor >> before & 1 or not floor >> before + step & 1:
                continue
            alive |= 1 << before
            waiting.append(before)
    return alive


def solve(room: Room) -> list[int] | None:
    """A shortest solution as numbers of steps (up, down, left, right), searched forwards; None
    where there is none.
    """
    came: dict[Position, tuple[Position, int]] = {}
    waiting, seen = deque([room.start]), {room.start}
    while waiting:
        position = waiting.popleft()
        if position[1] == room.targets:
            return _path(came, position)
        for number, step in enumerate(room.steps()):
            after = push(room, position, step)
            if after not in seen:
                seen.add(after)
                came[after] = (position, number)
                waiting.append(after)
    return None


def push(room: Room, position: Position, step: int) -> Position:
    """The position after a step; the same where a wall or a box is in the way."""
    player, boxes = position
    ahead = player + step
    if not room.floor >> ahead & 1:
        return position
    if boxes >> ahead & 1:
        beyond = ahead + step
        if not (room.floor & ~boxes) >> beyond & 1:
            return position
        boxes ^= 1 << ahead | 1 << beyond
    return ahead, boxes


def _path(came: dict[Position, tuple[Position, int]], position: Position) -> list[int]:
    numbers: list[int] = []
    while position in came:
        position, number = came[position]
        numbers.append(number)
    return numbers[::-1]
