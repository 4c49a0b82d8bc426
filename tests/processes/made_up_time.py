"""Event loops whose time is made up: what a test waits for takes no time, and a slow machine none
of it.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class MadeUpTime(asyncio.SelectorEventLoop):
    """An event loop whose time passes only where nothing else is left to do, as far as the next
    timer, and where a test lets it pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._select = self._selector.select  # type: ignore[attr-defined]
        self._selector.select = self._wait  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now

    def _wait(self, timeout: float | None = None) -> list[Any]:
        """What has come; without a timer there is nothing to do but to wait for it."""
        come = self._select(None if timeout is None else 0.0)
        self.now += 0.0 if come or timeout is None else timeout
        return come


def run(main: Coroutine[Any, Any, T], loop: MadeUpTime | None = None) -> T:
    """Run a coroutine in made-up time."""
    with asyncio.Runner(loop_factory=lambda: loop or MadeUpTime()) as runner:
        return runner.run(main)
