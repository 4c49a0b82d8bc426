"""Play Boxes: one of two buttons opens each box.

Rules: an episode visits each box once; at a box the agent presses one button, and then sees the
right one. The code of right buttons is hidden, and the same in all episodes. The button seen at a
box helps only in later episodes: without memory half of the boxes open, with it all of them.
Nothing is random.
"""

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mage_async.environments.environment import (
    Chance,
    Outcome,
    Split,
    check_one_of,
    check_whole,
    split_by,
)
from mage_async.environments.games.game import (
    Game,
    SoloPlay,
    TrialScript,
    facts_of,
    ladders_of,
    num_equal,
)
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

BUTTONS = ("left", "right")
BOXES = ("red", "green", "blue", "gold", "black", "white")
OPENED, SHUT, OVER, INVALID = "opened", "shut", "over", "invalid"
Code = tuple[str, ...]
"""Right button of each box."""
Scripted = Literal["remembers", "guesses"]
"""Styles of the script: it remembers the buttons of earlier episodes, or guesses."""
_HELDOUT = {
    3: ("lll",),
    4: ("llll", "llrr"),
    5: ("lllll", "lllrr", "llrlr", "lrllr"),
    6: ("llllll", "lllrlr", "llrlrr", "llrrrl", "lrllrr", "lrlrrl", "lrrlll", "lrrrlr"),
}
"""Held-out codes for each number of boxes, by the initials of their buttons. The complement of each
is held out too, so both buttons of every box are equally frequent in both splits. Among all choices
of a quarter of the codes, these make the buttons of any two boxes most nearly independent.
"""
_RULES = """Each of {count} boxes, {names}, is opened by one button: left or right.
At each box press one. You are told the right button. It stays the same in all episodes."""


class BoxesPlay(SoloPlay):
    """Visit each box once. The anchor, which is equal for equal states, is the box alone, because
    no other turn affects its reward.
    """

    def __init__(self, code: Code, chance: Chance) -> None:
        self._code, self.chance, self.box = code, chance, 0
        self.observation = BOXES[0]
        self.known: dict[int, str] = {}
        """Right buttons that this episode has shown, by the index of the box."""

    @property
    def anchor(self) -> str:
        """The box, or `over`."""
        return BOXES[self.box] if self.box < len(self._code) else OVER

    def actions(self) -> Sequence[str]:
        """Return the two buttons."""
        return BUTTONS

    def apply(self, action: str) -> Outcome:
        """Press a button; an invalid action earns and shows nothing."""
        box, right, result = BOXES[self.box], self._code[self.box], INVALID
        if action in BUTTONS:
            self.known[self.box] = right
            result = f"{OPENED if action == right else SHUT} {box} {right}"
        self.box += 1
        reward, is_done = (action == right) / len(self._code), self.box == len(self._code)
        return Outcome(f"{result} {self.anchor}", reward, action in BUTTONS, is_done)


@dataclass(slots=True)
class BoxesScript(TrialScript[BoxesPlay]):
    """Press the button that an earlier episode has shown, if the script remembers, or a random
    one.
    """

    style: Scripted
    slip: float
    """Probability of pressing a random button although the right one is known."""

    def facts(self) -> Sequence[str]:
        """Return the box and the right button of each known box."""
        known = {box: button for play in self.plays for box, button in play.known.items()}
        return [f"{BOXES[box]} {button}" for box, button in sorted(known.items())]

    def action(self, play: BoxesPlay) -> str:
        """Return the next button."""
        known = [seen.known[play.box] for seen in self.plays if play.box in seen.known]
        if known and self.style == "remembers" and self.source.random() >= self.slip:
            return known[0]
        return self.source.choice(BUTTONS)


class Boxes(Game[Code]):
    """Play Boxes; the task variant is the code of the buttons, such as `left-right-right-left`.

    Args:
        boxes: Number of boxes, from 3 to 6; 4 have 16 codes and 5 have 32, a quarter of them held
            out.
        scripted: Whether the script of a warm start `remembers` earlier episodes or `guesses`.
        near: Code, such as `left-left-right-left`, to which the codes of all tasks are similar,
            including held-out ones; a memory across tasks can learn it. "" for any codes.
        differ: Number of boxes in which a code may differ from `near`.

    Raises:
        ConfigError: an option is out of its range, or `near` leaves no code to hold out.
    """

    ladders = ladders_of(boxes=_HELDOUT)

    def __init__(
        self, boxes: int = 4, scripted: Scripted = "remembers", near: str = "", differ: int = 1
    ) -> None:
        check_whole("boxes", "boxes", boxes, min(_HELDOUT), max(_HELDOUT))
        check_one_of("boxes", "scripted", scripted, get_args(Scripted))
        self._boxes, self._scripted = BOXES[:boxes], scripted
        codes = {"-".join(code): code for code in itertools.product(BUTTONS, repeat=boxes)}
        played = codes
        if near:
            check_one_of("boxes", "near", near, tuple(codes))
            check_whole("boxes", "differ", differ, 1, boxes)
            # Smallest number of boxes in which a code agrees with `near`.
            least = boxes - differ
            played = {
                name: code for name, code in codes.items() if num_equal(code, codes[near]) >= least
            }
        splits = split_by(played, _is_heldout)
        if not splits["heldout"]:
            raise ConfigError(
                f"boxes: no held-out code is as near to {near} as `differ` = {differ} says: raise "
                "`differ`, or choose another `near`"
            )
        words = (*BUTTONS, *self._boxes, OPENED, SHUT, OVER, INVALID)
        # An episode is won if every box opens.
        facts = facts_of("boxes", boxes, words, threshold=1 - 0.5 / boxes)
        # `near` narrows the splits only: `swaps` may return any of the codes.
        super().__init__(facts, splits, unsplit=codes)

    def rules(self) -> str:
        """Return the rules in plain words."""
        names = f"{', '.join(self._boxes[:-1])} and {self._boxes[-1]}"
        return _RULES.format(count=len(self._boxes), names=names)

    def begin(self, task: Task, episode: int) -> BoxesPlay:
        """Start at the first box."""
        return BoxesPlay(self.variant(task.member), Chance(task.seed, episode))

    def script(self, source: random.Random) -> BoxesScript:
        """Return a script that explores and then uses its knowledge, with few slips or some."""
        return BoxesScript(source, self._scripted, source.choice((0.05, 0.2)))

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Return the complement of `member`: knowledge of `member` opens no box of it."""
        return ("-".join(_complement(self.variant(member))),)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return exact returns per episode.

        `random` presses any button. `without_memory` plays the best single episode again and again,
        `with_memory` begins with that episode and then opens every box. Both know the codes of
        `train`; of a held-out code they know only that it is one of all codes.
        """
        codes = [*self._splits["train"].values()]
        if split != "train":
            codes += self._splits["heldout"].values()
        first = best_first_episode(codes)
        return {
            "random": (0.5,) * num_episodes,
            "without_memory": (first,) * num_episodes,
            "with_memory": (first,) + (1.0,) * (num_episodes - 1),
        }


def best_first_episode(codes: Sequence[Code]) -> float:
    """Return the best expected return of a first episode, for a player that knows only that the
    code is one of `codes`.

    At each box the player presses the button that is more frequent among the codes that agree with
    the buttons seen so far.
    """
    num_boxes, num_right = len(codes[0]), 0
    for box in range(num_boxes):
        # For each sequence of earlier buttons, how often each button is the next right one.
        counts: defaultdict[Code, Counter[str]] = defaultdict(Counter)
        for code in codes:
            counts[code[:box]][code[box]] += 1
        num_right += sum(max(each.values()) for each in counts.values())
    return num_right / (len(codes) * num_boxes)


def _is_heldout(code: Code) -> bool:
    """Return whether a code or its complement is among `_HELDOUT`."""
    initials = ("".join(button[0] for button in each) for each in (code, _complement(code)))
    return any(each in _HELDOUT[len(code)] for each in initials)


def _complement(code: Code) -> Code:
    """Return the code with the other button for each box."""
    return tuple(BUTTONS[1 - BUTTONS.index(button)] for button in code)
