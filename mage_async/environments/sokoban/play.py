"""One episode of Sokoban, and a scripted player of it."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from mage_async.environments.cell_sets import cells_of
from mage_async.environments.environment import Chance, Outcome, Play
from mage_async.environments.sokoban.room import Position, Room, distances, push

MOVES = ("up", "down", "left", "right")
WALL, FLOOR, TARGET, BOX, STORED, PLAYER, STANDING = (
    *("wall", "floor", "target", "box", "stored", "player", "standing"),
)
ROW, SOLVED, STUCK, OVER, INVALID = "row", "solved", "stuck", "over", "invalid"


@dataclass(frozen=True, slots=True)
class Rewards:
    """What a step earns: gym-sokoban's numbers. An invalid action costs one step."""

    step: float = -0.1
    on: float = 1.0
    off: float = -1.0
    solved: float = 10.0


REWARDS = Rewards()


@cache
def action_names(most: int) -> dict[str, tuple[int, ...]]:
    """Every action of up to `most` steps, with their numbers."""
    return {
        " ".join(MOVES[number] for number in numbers): numbers
        for length in range(1, most + 1)
        for numbers in itertools.product(range(len(MOVES)), repeat=length)
    }


class SokobanPlay:
    """One episode. The anchor is the room as it stands."""

    __slots__ = (
        "_actions",
        "_faces",
        "_is_done",
        "_turns_left",
        "chance",
        "done",
        "position",
        "room",
    )

    def __init__(self, room: Room, turns: int, steps_per_turn: int, chance: Chance) -> None:
        self.room, self._turns_left, self.chance = room, turns, chance
        self._actions = action_names(steps_per_turn)
        self._faces = _bare(room)
        self._is_done = False
        self.position: Position = room.start
        self.done: list[str] = []
        """Valid actions so far."""

    @property
    def observation(self) -> str:
        """The room at the beginning."""
        return self.anchor

    @property
    def anchor(self) -> str:
        """What stands in each cell, row by row."""
        faces, size = self._faces.copy(), self.room.size
        player, boxes = self.position
        for cell in cells_of(boxes):
            faces[cell + cell // size + 1] = STORED if self.room.targets >> cell & 1 else BOX
        faces[player + player // size + 1] = STANDING if self.room.targets >> player & 1 else PLAYER
        return " ".join(faces)

    @property
    def is_solved(self) -> bool:
        """Whether every box is on a target."""
        return self.position[1] == self.room.targets

    def legal_actions(self) -> Sequence[str]:
        """All actions until the episode is over; a step against a wall is one, and costs."""
        return () if self._is_done else tuple(self._actions)

    def act(self, action: str) -> Outcome:
        """Take up to as many steps as a turn has; those after the room is solved are not taken."""
        assert not self._is_done, "the episode is done"
        self._turns_left -= 1
        numbers = self._actions.get(action)
        if numbers is None:
            return self._outcome(f"{INVALID} {self.anchor}", REWARDS.step, is_valid=False)
        self.done.append(action)
        reward = 0.0
        for number in numbers:
            reward += self._step(self.room.steps()[number])
            if self.is_solved:
                break
        return self._outcome(self.anchor, reward, is_valid=True)

    def _step(self, step: int) -> float:
        room, before = self.room, self.position
        self.position = push(room, before, step)
        stored, were = ((boxes & room.targets).bit_count() for _, boxes in (self.position, before))
        reward = REWARDS.step + REWARDS.on * (stored > were) + REWARDS.off * (stored < were)
        return reward + REWARDS.solved * self.is_solved

    def _outcome(self, said: str, reward: float, *, is_valid: bool) -> Outcome:
        end = self._end()
        self._is_done = bool(end)
        return Outcome(f"{said} {end}".rstrip(), reward, is_valid, self._is_done)

    def _end(self) -> str:
        if self.is_solved:
            return SOLVED
        if self.position[1] & self.room.dead:
            return STUCK
        return "" if self._turns_left else OVER


def _bare(room: Room) -> list[str]:
    """The room without player and boxes, with the word that begins a row."""
    faces: list[str] = []
    for cell in range(room.size * room.size):
        if cell % room.size == 0:
            faces.append(ROW)
        is_floor, is_target = room.floor >> cell & 1, room.targets >> cell & 1
        faces.append(TARGET if is_target else FLOOR if is_floor else WALL)
    return faces


@dataclass(slots=True)
class SokobanScript:
    """Steps towards the solution, or just anywhere; what has solved the room before is done again.

    Args:
        source: its luck.
        steps_per_turn: most steps of an action.
        care: how often a step is one of a shortest solution.
        memory: how often a solution of an earlier episode is followed.
    """

    source: random.Random
    steps_per_turn: int
    care: float
    memory: float
    _plays: list[SokobanPlay] = field(default_factory=list)
    """The episodes of the trial so far."""
    _distances: dict[Position, int] = field(default_factory=dict)

    def choose(self, play: Play) -> str:
        """The next action."""
        assert isinstance(play, SokobanPlay)
        if not self._plays or self._plays[-1] is not play:
            self._plays.append(play)
            self._learn(play.room)
        recalled = self._recall(play)
        if recalled is not None and self.source.random() < self.memory:
            return recalled
        return " ".join(MOVES[number] for number in self._steps(play))

    def _learn(self, room: Room) -> None:
        if len(self._plays) == 1 or self._plays[-2].room is not room:
            self._distances = distances(room.size, room.floor, room.targets, 10**9)

    def _recall(self, play: SokobanPlay) -> str | None:
        """What came next in an earlier episode that went like this one, and was won."""
        for earlier in self._plays[:-1]:
            taken = len(play.done)
            is_alike = earlier.room is play.room and earlier.done[:taken] == play.done
            if earlier.is_solved and is_alike and len(earlier.done) > taken:
                return earlier.done[taken]
        return None

    def _steps(self, play: SokobanPlay) -> list[int]:
        position, numbers = play.position, []
        while len(numbers) < self.steps_per_turn and position[1] != play.room.targets:
            number = self._step(play.room, position)
            position = push(play.room, position, play.room.steps()[number])
            numbers.append(number)
        return numbers

    def _step(self, room: Room, position: Position) -> int:
        numbers = range(len(MOVES))
        if self.source.random() >= self.care:
            return self.source.choice(numbers)
        far = len(self._distances)
        left = [self._distances.get(push(room, position, step), far) for step in room.steps()]
        return self.source.choice([number for number in numbers if left[number] == min(left)])
