"""Sokoban: push every box onto a target; the room is the same in all episodes.

Nothing is hidden, but a box that was pushed wrong cannot be pulled back: an episode shows which
moves to avoid in the next.
"""

import random
import zlib
from functools import lru_cache, partial
from types import MappingProxyType

from mage_async.environments.environment import Chance, Environment, Facts, Ladders, Split
from mage_async.environments.options import check_whole
from mage_async.environments.scripted_returns import scripted_returns
from mage_async.environments.sokoban.play import (
    BOX,
    FLOOR,
    INVALID,
    MOVES,
    OVER,
    PLAYER,
    REWARDS,
    ROW,
    SOLVED,
    STANDING,
    STORED,
    STUCK,
    TARGET,
    WALL,
    SokobanPlay,
    SokobanScript,
)
from mage_async.environments.sokoban.room import Room, make_room
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import Task

_HELDOUT_SHARE = 4  # one room in so many
_RULES = """Push the boxes onto the targets, in a room of {size} rows of {size} cells.
You see the room row by row: wall, floor, target, box, player; stored is a box on a target,
standing is you on one. Answer with one to {steps} of up, down, left, right, separated by spaces.
You can push a box, one at a time, but never pull. A step earns {step:g}; a box that comes onto a
target earns {on:g}, one that leaves it {off:g}; the room solved earns {solved:g} more.
Any other answer earns what a step does. An episode ends after {turns} turns, and where a box can
no longer be pushed to any target."""


class Sokoban(Environment):
    """Sokoban; the task variant (`member`) is a room.

    Args:
        size: cells in a row, and rows, the border of walls included.
        boxes: in the room.
        turns: most turns of an episode.
        steps_per_turn: most steps of one action.
        shortest: least number of steps that a room takes.
        longest: most steps that the shortest solution of a room has.
        rooms: how many there are, a quarter of them held out.

    Raises:
        ConfigError: an option is out of its range.
    """

    ladders: Ladders = MappingProxyType({"boxes": tuple({"boxes": count} for count in range(1, 5))})

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
        self._size, self._num_boxes, self._turns, self._steps = size, boxes, turns, steps_per_turn
        self._lengths = range(shortest, longest + 1)
        names = tuple(f"room-{number}" for number in range(rooms))
        self._splits: dict[Split, tuple[str, ...]] = {
            "train": names[rooms // _HELDOUT_SHARE :],
            "heldout": names[: rooms // _HELDOUT_SHARE],
        }
        self._numbers = {name: number for number, name in enumerate(names)}
        self._num_heldout = rooms // _HELDOUT_SHARE
        self.room = lru_cache(maxsize=4096)(self._make_room)
        """The room of a task variant."""
        self.facts = Facts(
            name="sokoban",
            num_seats=1,
            max_turns=turns,
            min_return=turns * steps_per_turn * REWARDS.step,
            max_return=REWARDS.solved + boxes * REWARDS.on,
            units=1,
            has_chance=False,
            words=(
                *MOVES,
                *(ROW, WALL, FLOOR, TARGET, BOX, STORED, PLAYER, STANDING),
                *(SOLVED, STUCK, OVER, INVALID),
            ),
        )

    def members(self, split: Split) -> tuple[str, ...]:
        """Rooms by number; how one looks decides its split, so that none is in both."""
        return self._splits[split]

    def family(self, member: str) -> str:
        """Its difficulty: steps of the shortest solution, by fives."""
        least = self.room(member).length // 5 * 5
        return f"steps-{least}-{least + 4}"

    def seats(self) -> tuple[int, ...]:
        """The agent is alone."""
        return (0,)

    def rules(self) -> str:
        """The rules in plain words, with the rewards."""
        rewards = {name: getattr(REWARDS, name) for name in REWARDS.__slots__}
        return _RULES.format(size=self._size, steps=self._steps, turns=self._turns, **rewards)

    def laid_out(self, said: str) -> str:
        """A row of the room a line."""
        return said.replace(f" {ROW} ", f"\n{ROW} ")

    def begin(self, task: Task, episode: int) -> SokobanPlay:
        """Put player and boxes where they stand at the beginning."""
        chance = Chance(task.seed, episode)
        return SokobanPlay(self.room(task.member), self._turns, self._steps, chance)

    def script(self, source: random.Random) -> SokobanScript:
        """Its care and its memory are drawn for the trial."""
        care, memory = source.choice((0.0, 0.5, 0.8, 1.0)), source.choice((0.0, 0.5, 0.95))
        return self._player(care, memory, source)

    def expert(self, source: random.Random) -> SokobanScript:
        """Goes a shortest way."""
        return self._player(1.0, 0.0, source)

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """All other rooms of the split."""
        self._number(member)
        return tuple(each for each in self._splits[split] if each != member)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Returns in 200 rooms, per episode.

        `random` takes any steps, `retry` does too but repeats what has solved the room;
        `solver` goes the shortest way.
        """
        players = {"random": (0.0, 0.0), "retry": (0.0, 1.0), "solver": (1.0, 0.0)}
        return {
            name: scripted_returns(self, split, num_episodes, partial(self._player, *style))
            for name, style in players.items()
        }

    def _player(self, care: float, memory: float, source: random.Random) -> SokobanScript:
        return SokobanScript(source, self._steps, care, memory)

    def _number(self, member: str) -> int:
        if member not in self._numbers:
            raise EnvironmentFault(f"sokoban: no room is called {member!r}, as is e.g. 'room-0'")
        return self._numbers[member]

    def _make_room(self, member: str) -> Room:
        number = self._number(member)
        source = random.Random(f"sokoban/{self._size}/{self._num_boxes}/{number}")
        is_heldout = number < self._num_heldout
        room = make_room(
            source,
            self._size,
            self._num_boxes,
            self._lengths,
            lambda room: _looks_heldout(room) == is_heldout,
        )
        if room is None:
            raise EnvironmentFault(
                f"sokoban: found no room of {self._size} by {self._size} with {self._num_boxes} "
                f"boxes that takes {self._lengths.start} to {self._lengths.stop - 1} steps"
            )
        return room


def _looks_heldout(room: Room) -> bool:
    """Whether a room is of the held-out quarter of all there could be."""
    looks = f"{room.floor}/{room.targets}/{room.start}"
    return zlib.crc32(looks.encode()) % _HELDOUT_SHARE == 0
