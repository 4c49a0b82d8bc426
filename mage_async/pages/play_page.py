"""Playing in a page: a trial in the agent's place, or the agent's own, and what came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from mage_async.pages.frame import Frame
from mage_async.pages.templating import fill

MOST_BUTTONS = 24
"""Legal actions that have a button; more of them are typed."""


@dataclass(frozen=True, slots=True)
class Line:
    """Something that was said, by the environment or by the person."""

    text: str
    is_answer: bool = False


@dataclass(slots=True)
class Played:
    """A trial as far as it has come."""

    sits: bool
    """The person plays first; else only the agent plays."""
    lines: list[Line] = field(default_factory=list)
    choices: Sequence[str] | None = None
    """Legal actions while the person is asked; empty where any text is one, None while not asked.
    """
    may: str = ""
    """The choices in one line."""
    trial: Mapping[str, Any] | None = None
    """The agent's, a `ShownTrial` as plain data."""
    member: str = ""
    """Who was played against; known at the end."""
    version: int = 0
    rewards: Sequence[float] = ()
    """The person's, an episode each."""
    fault: str = ""
    is_over: bool = False

    @property
    def buttons(self) -> Sequence[str]:
        """Actions to click."""
        choices = self.choices or ()
        return choices if len(choices) <= MOST_BUTTONS else ()


def begin_page(frame: Frame, games: Sequence[tuple[int, Played]]) -> Markup:
    """Where a trial is begun, and those under way."""
    return fill("play.html", frame=frame, games=games)


def played_page(frame: Frame, played: Played, address: str) -> Markup:
    """A trial under way; `address` takes the answers."""
    return fill("played.html", frame=frame, played=played, address=address)
