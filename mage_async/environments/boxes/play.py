"""One episode of boxes: a press at each box."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mage_async.environments.boxes.codes import BOXES, BUTTONS, Code
from mage_async.environments.environment import Chance, Outcome, Play

OPENED, SHUT, OVER, INVALID = "opened", "shut", "over", "invalid"
Scripted = Literal["remembers", "guesses"]


class BoxesPlay:
    """One visit to each box. The anchor is the box: no other turn bears on its reward."""

    __slots__ = ("_code", "box", "chance", "known")

    def __init__(self, code: Code, chance: Chance) -> None:
        self._code, self.chance, self.box = code, chance, 0
        self.known: dict[int, str] = {}
        """Buttons this episode has shown to be right, by box."""

    @property
    def observation(self) -> str:
        """The first box."""
        return BOXES[0]

    @property
    def anchor(self) -> str:
        """The box."""
        return self._name()

    def legal_actions(self) -> Sequence[str]:
        """The two buttons until every box has been visited."""
        return BUTTONS if self.box < len(self._code) else ()

    def act(self, action: str) -> Outcome:
        """Press a button; an invalid action earns and tells nothing."""
        assert self.box < len(self._code), "the episode is done"
        told, is_right = self._press(action), action == self._code[self.box]
        self.box += 1
        is_done = self.box == len(self._code)
        reward = is_right / len(self._code)
        return Outcome(f"{told} {self._name()}", reward, action in BUTTONS, is_done)

    def _press(self, action: str) -> str:
        if action not in BUTTONS:
            return INVALID
        right = self._code[self.box]
        self.known[self.box] = right
        return f"{OPENED if action == right else SHUT} {BOXES[self.box]} {right}"

    def _name(self) -> str:
        return BOXES[self.box] if self.box < len(self._code) else OVER


@dataclass(slots=True)
class BoxesScript:
    """Presses at random; where it remembers, a button that an earlier episode has shown to be
    right is pressed again, but for a slip.
    """

    source: random.Random
    style: Scripted
    slip: float
    """Probability of pressing at random although the button is known."""
    _plays: list[BoxesPlay] = field(default_factory=list)
    """The episodes of the trial so far."""

    def choose(self, play: Play) -> str:
        """The next button, knowing what earlier episodes have shown."""
        assert isinstance(play, BoxesPlay)
        if not self._plays or self._plays[-1] is not play:
            self._plays.append(play)
        known = [seen.known[play.box] for seen in self._plays if play.box in seen.known]
        if known and self.style == "remembers" and self.source.random() >= self.slip:
            return known[0]
        return self.source.choice(BUTTONS)
