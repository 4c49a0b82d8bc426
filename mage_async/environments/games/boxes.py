"""Boxes: one of two buttons opens each box.

Rules: an episode visits each box once; at a box the agent presses one button, and then sees the
right one. Hidden is the code of right buttons, which stays for the whole trial. Knowledge of a box
helps only in later episodes: half of the boxes open without memory, all of them with it. There is
no chance.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from mage_async.environments.environment import Chance, Facts, Ladders, Outcome, Play, Split
from mage_async.environments.games.game import Game, num_equal, remember
from mage_async.environments.options import check_one_of, check_whole
from mage_async.trajectory import Task

BUTTONS = ("left", "right")
BOXES = ("red", "green", "blue", "gold", "black", "white")
OPENED, SHUT, OVER, INVALID = "opened", "shut", "over", "invalid"
Code = tuple[str, ...]
"""The right button of each box."""
Scripted = Literal["remembers", "guesses"]
_HELDOUT = {
    3: ("lll",),
    4: ("llll", "llrr"),
    5: ("lllll", "lllrr", "llrlr", "lrllr"),
    6: ("llllll", "lllrlr", "llrlrr", "llrrrl", "lrllrr", "lrlrrl", "lrrlll", "lrrrlr"),
}
"""Held-out codes by the number of boxes; each also stands for its complement. All buttons are
equally frequent in both splits, and two boxes are as independent as a quarter of the codes allows.
"""
_RULES = """Each of {count} boxes, {names}, is opened by one button: left or right.
At each box press one. You are told the right button. It stays the same in all episodes."""


class BoxesPlay:
    """One visit to each box. The anchor is the box: no other turn affects its reward."""

    def __init__(self, code: Code, chance: Chance) -> None:
        self._code, self.chance, self.box = code, chance, 0
        self.known: dict[int, str] = {}
        """Right buttons that this episode has shown, by box."""

    @property
    def observation(self) -> str:
        """The first box."""
        return BOXES[0]

    @property
    def anchor(self) -> str:
        """The box, or `over`."""
        return BOXES[self.box] if self.box < len(self._code) else OVER

    def legal_actions(self) -> Sequence[str]:
        """Return the two buttons, until every box has been visited."""
        return BUTTONS if self.box < len(self._code) else ()

    def act(self, action: str) -> Outcome:
        """Press a button; an invalid action earns and shows nothing."""
        assert self.box < len(self._code), "the episode is done"
        result, is_right = self._press(action), action == self._code[self.box]
        self.box += 1
        is_done = self.box == len(self._code)
        reward = is_right / len(self._code)
        return Outcome(f"{result} {self.anchor}", reward, action in BUTTONS, is_done)

    def _press(self, action: str) -> str:
        if action not in BUTTONS:
            return INVALID
        right = self._code[self.box]
        self.known[self.box] = right
        return f"{OPENED if action == right else SHUT} {BOXES[self.box]} {right}"


@dataclass(slots=True)
class BoxesScript:
    """Presses at random or, where it remembers, the button that an earlier episode has shown."""

    source: random.Random
    style: Scripted
    slip: float
    """Probability of pressing at random although the right button is known."""
    _plays: list[BoxesPlay] = field(default_factory=list)

    def choose(self, play: Play) -> str:
        """Return the next button."""
        assert isinstance(play, BoxesPlay)
        remember(self._plays, play)
        known = [seen.known[play.box] for seen in self._plays if play.box in seen.known]
        if known and self.style == "remembers" and self.source.random() >= self.slip:
            return known[0]
        return self.source.choice(BUTTONS)


class Boxes(Game):
    """Boxes in a row; the task variant is the code of their buttons, such as
    `left-right-right-left`.

    Args:
        boxes: from 3 to 6; 4 have 16 codes and 5 have 32, a quarter of them held out.
        scripted: whether the script of a warm start `remembers` earlier episodes or `guesses`.
        near: a code, such as `left-right-right-left`: the codes of all tasks, also held-out ones,
            are similar to it, which a memory across tasks can learn. Empty: any code.
        differ: number of boxes in which a code may differ from `near`.

    Raises:
        ConfigError: an option is out of its range.
    """

    ladders: Ladders = MappingProxyType({"boxes": tuple({"boxes": count} for count in _HELDOUT)})

    def __init__(
        self, boxes: int = 4, scripted: Scripted = "remembers", near: str = "", differ: int = 1
    ) -> None:
        check_one_of("boxes", "boxes", boxes, tuple(_HELDOUT))
        check_one_of("boxes", "scripted", scripted, get_args(Scripted))
        self._boxes, self._scripted = BOXES[:boxes], scripted
        codes = _codes(boxes)
        self._codes = {"-".join(code): code for split in codes.values() for code in split}
        if near:
            check_one_of("boxes", "near", near, tuple(self._codes))
            check_whole("boxes", "differ", differ, 1, boxes)
            codes = {split: _similar(c, self._codes[near], differ) for split, c in codes.items()}
        self._by_split = codes
        facts = Facts(
            name="boxes",
            max_turns=boxes,
            min_return=0.0,
            max_return=1.0,
            words=(*BUTTONS, *self._boxes, OPENED, SHUT, OVER, INVALID),
            wins_above=1 - 0.5 / boxes,
            loses_below=1 - 0.5 / boxes,
        )
        super().__init__(facts, {s: tuple(map("-".join, c)) for s, c in codes.items()})
        self._names = frozenset(self._codes)  # `near` narrows the splits, not the codes that exist

    def rules(self) -> str:
        """Return the rules in plain words."""
        names = f"{', '.join(self._boxes[:-1])} and {self._boxes[-1]}"
        return _RULES.format(count=len(self._boxes), names=names)

    def begin(self, task: Task, episode: int) -> BoxesPlay:
        """Start at the first box."""
        self.check(task.member)
        return BoxesPlay(self._codes[task.member], Chance(task.seed, episode))

    def script(self, source: random.Random) -> BoxesScript:
        """Return a script that explores and then uses its knowledge, with few slips or some."""
        return BoxesScript(source, self._scripted, source.choice((0.05, 0.2)))

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Return the complement, with which knowledge of `member` opens no box."""
        self.check(member)
        return ("-".join(_complement(self._codes[member])),)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return exact returns per episode.

        `random` presses any button. `without_memory` plays the best single episode again and again,
        `with_memory` begins with that episode and then opens every box. Both know the codes of
        `train`; of a held-out code they know only that it is one of all codes.
        """
        codes = self._by_split["train"]
        if split != "train":
            codes += self._by_split["heldout"]
        first = best_first_episode(codes)
        return {
            "random": (0.5,) * num_episodes,
            "without_memory": (first,) * num_episodes,
            "with_memory": (first,) + (1.0,) * (num_episodes - 1),
        }


def best_first_episode(codes: Sequence[Code]) -> float:
    """Return the best expected return of one episode for a player that knows only these codes.

    The player presses the more frequent button among the codes that agree with the boxes so far.
    """
    num_boxes = len(codes[0])
    right = sum(
        max(sum(code[box] == button for code in group) for button in BUTTONS)
        for box in range(num_boxes)
        for group in _equal_before(codes, box)
    )
    return right / (len(codes) * num_boxes)


def _equal_before(codes: Sequence[Code], box: int) -> Iterator[list[Code]]:
    """Group the codes by their buttons before a box."""
    for _, group in itertools.groupby(sorted(codes), key=lambda code: code[:box]):
        yield list(group)


def _codes(num_boxes: int) -> dict[Split, tuple[Code, ...]]:
    """Return all codes, a quarter of them held out."""
    every = tuple(itertools.product(BUTTONS, repeat=num_boxes))
    button_of = {button[0]: button for button in BUTTONS}
    halves = [tuple(button_of[letter] for letter in short) for short in _HELDOUT[num_boxes]]
    heldout = {*halves, *map(_complement, halves)}
    return {
        "train": tuple(code for code in every if code not in heldout),
        "heldout": tuple(code for code in every if code in heldout),
    }


def _similar(codes: Sequence[Code], near: Code, differ: int) -> tuple[Code, ...]:
    """Return the codes that differ from `near` in at most `differ` boxes."""
    return tuple(code for code in codes if len(near) - num_equal(code, near) <= differ)


def _complement(code: Code) -> Code:
    """Return the code with the other button for each box."""
    return tuple(BUTTONS[1 - BUTTONS.index(button)] for button in code)
