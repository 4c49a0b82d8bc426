"""Boxes: one of two buttons opens each box, and the buttons stay for the whole trial.

An episode visits each box once, so that what is learned about a box helps in later episodes alone:
half of the boxes open without memory, all of them with it. Nothing is drawn by chance.
"""

import random
from types import MappingProxyType
from typing import get_args

from mage_async.environments.boxes.codes import (
    BOXES,
    BUTTONS,
    NUM_BOXES,
    Code,
    alike,
    best_first_episode,
    codes_of,
    complement,
)
from mage_async.environments.boxes.play import (
    INVALID,
    OPENED,
    OVER,
    SHUT,
    BoxesPlay,
    BoxesScript,
    Scripted,
)
from mage_async.environments.environment import Chance, Environment, Facts, Ladders, Split
from mage_async.environments.options import check_one_of, check_whole
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import Task

_RULES = """Each of {count} boxes, {names}, is opened by one button: left or right.
At each box press one. You are told the right button. It stays the same in all episodes."""


class Boxes(Environment):
    """Boxes in a row; a code of their buttons is what a trial has to find out.

    Args:
        boxes: from 3 to 6; 4 have 16 codes and 5 have 32, a quarter of them held out.
        scripted: a warm start's script `remembers` what earlier episodes have shown, or `guesses`.
        near: a code, such as `left-right-right-left`: the codes of all tasks, held-out ones too,
            are like it, which is what a memory across tasks can find out. Empty: any code.
        differ: boxes in which a code may differ from `near`.

    Raises:
        ConfigError: an option is out of its range.
    """

    ladders: Ladders = MappingProxyType({"boxes": tuple({"boxes": count} for count in NUM_BOXES)})

    def __init__(
        self, boxes: int = 4, scripted: Scripted = "remembers", near: str = "", differ: int = 1
    ) -> None:
        check_one_of("boxes", "boxes", boxes, NUM_BOXES)
        check_one_of("boxes", "scripted", scripted, get_args(Scripted))
        self._names, self._scripted = BOXES[:boxes], scripted
        self._splits = codes_of(boxes)
        self._codes = {"-".join(code): code for codes in self._splits.values() for code in codes}
        if near:
            check_one_of("boxes", "near", near, tuple(self._codes))
            check_whole("boxes", "differ", differ, 1, boxes)
            house = self._codes[near]
            self._splits = {split: alike(c, house, differ) for split, c in self._splits.items()}
        self.facts = Facts(
            name="boxes",
            num_seats=1,
            max_turns=boxes,
            min_return=0.0,
            max_return=1.0,
            units=1,
            has_chance=False,
            words=(*BUTTONS, *self._names, OPENED, SHUT, OVER, INVALID),
            wins_above=1 - 0.5 / boxes,
            loses_below=1 - 0.5 / boxes,
        )

    def members(self, split: Split) -> tuple[str, ...]:
        """Codes, such as `left-right-right-left`."""
        return tuple("-".join(code) for code in self._splits[split])

    def family(self, member: str) -> str:
        """All codes are of one kind."""
        return "code"

    def seats(self) -> tuple[int, ...]:
        """The agent is alone."""
        return (0,)

    def rules(self) -> str:
        """The rules in plain words."""
        names = f"{', '.join(self._names[:-1])} and {self._names[-1]}"
        return _RULES.format(count=len(self._names), names=names)

    def begin(self, task: Task, episode: int) -> BoxesPlay:
        """Start at the first box."""
        return BoxesPlay(self._code(task.member), Chance(task.seed, episode))

    def script(self, source: random.Random) -> BoxesScript:
        """Explores, then exploits, with few slips or some."""
        return BoxesScript(source, self._scripted, source.choice((0.05, 0.2)))

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """The code with the other button at each box: what was learned opens no box."""
        return ("-".join(complement(self._code(member))),)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Exact returns per episode.

        `random` presses any button. `without_memory` plays the best single episode again and
        again, `with_memory` begins with that one and then opens every box. These know the codes of
        `train`; of a held-out code they only know that it is one of all.
        """
        every = self._splits["train"] + self._splits["heldout"]
        codes = self._splits["train"] if split == "train" else every
        first = best_first_episode(codes)
        return {
            "random": (0.5,) * num_episodes,
            "without_memory": (first,) * num_episodes,
            "with_memory": (first,) + (1.0,) * (num_episodes - 1),
        }

    def _code(self, member: str) -> Code:
        if member not in self._codes:
            example = next(iter(self._codes))
            raise EnvironmentFault(f"boxes: no code is called {member!r}, as is e.g. {example!r}")
        return self._codes[member]
