"""Equal prompts are computed once: one goes first, and the others wait for its keys.

A server that is sent them at the same moment computes each of them; sent one after the other, the
second finds the keys of the first. So the trials of a group, whose first prompts are equal, wait
for one of them to be read.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Warming(Generic[T]):
    """The prompts being computed, and the turns that wait for each."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, list[T]] = {}

    def enter(self, place: Hashable, who: T) -> bool:
        """Whether `who` goes first; otherwise it waits until `leave` returns it."""
        if place not in self._waiting:
            self._waiting[place] = []
            return True
        self._waiting[place].append(who)
        return False

    def leave(self, place: Hashable) -> list[T]:
        """The first one has computed its prompt, or has given up; returns what waited."""
        return self._waiting.pop(place, [])

    def clear(self) -> list[T]:
        """Forget all prompts; returns what waited."""
        waited = [one for group in self._waiting.values() for one in group]
        self._waiting.clear()
        return waited
