"""Keeps SGLang's process alive: starts it, reads its messages, kills it when it hangs.

task     waits for                     then
keep     the process's next message    hands it on; after its end, starts another
watch    the clock                     kills a process that owes an answer for too long
"""

import asyncio
import time
from collections.abc import Callable

from mage_async.errors import RunError
from mage_services.engines.sglang.child import SglangChild
from mage_services.engines.sglang.messages import Failed, Message, Serving, Start
from mage_services.processes.process import ticks

START_S = 600.0
"""From the process's start to its first word: imports, the model, graphs."""
WATCH_S = 1.0
BACK_OFF_S = 0.5
"""Before the second start in a row; doubled for each further one, up to a minute."""
EVERYTHING = ""
"""What a start and a load owe: while they do, nothing else does."""


class Keeper:
    """One process after the other.

    Args:
        start: what the process with this number, from 0, is to serve.
        hear: takes its messages.
        mourn: told of its end; whatever it knew is lost.
        max_deaths: so many in a row, without `cheer` between, are made good.
    """

    def __init__(
        self,
        start: Callable[[int], Start],
        hear: Callable[[Message], None],
        mourn: Callable[[], None],
        *,
        threads: int,
        max_deaths: int,
    ) -> None:
        self._start, self._hear, self._mourn = start, hear, mourn
        self._threads, self._max_deaths = threads, max_deaths
        self._child: SglangChild | None = None
        self._has_served = False
        self._num_deaths = 0
        self._due: dict[str, float] = {}
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        """Process id, while there is a process."""
        return None if self._child is None else self._child.pid

    def send(self, message: Message) -> None:
        """Send a message to the process; without a process it is discarded."""
        if self._child is not None:
            self._child.send(message)

    def owe(self, what: str, seconds: float) -> None:
        """The process has to answer this within so many seconds."""
        self._due[what] = time.monotonic() + seconds

    def paid(self, what: str) -> None:
        """The process has answered."""
        self._due.pop(what, None)

    def cheer(self) -> None:
        """The process has done something good: its deaths so far are forgotten."""
        self._num_deaths = 0

    async def keep(self) -> None:
        """Keep a process running. Cancellation kills it.

        Raises:
            RunError: it cannot be started, or dies again and again.
        """
        while True:
            why = await self._live()
            self._num_deaths += 1
            if self._num_deaths > self._max_deaths or not self._has_served:
                raise RunError(f"SGLang's process {why}; what it printed is in this process's log")
            self.num_restarts += 1
            if self._num_deaths > 1:
                await asyncio.sleep(min(60.0, BACK_OFF_S * 2 ** (self._num_deaths - 2)))

    async def watch(self) -> None:
        """Kill a process that owes an answer for too long. Cancellation leaves nothing."""
        async for _ in ticks(WATCH_S):
            now, whole = time.monotonic(), self._due.get(EVERYTHING)
            dues = self._due.values() if whole is None else [whole]
            if self._child is not None and any(due < now for due in dues):
                self._child.kill()

    async def _live(self) -> str:
        """One process from its start to its end; says how that came."""
        child = self._child = await SglangChild.start(self._threads)
        self.owe(EVERYTHING, START_S)
        try:
            child.send(self._start(self.num_restarts))
            why = await self._converse(child)
        finally:
            child.kill()
            self._child = None
            self._due.clear()
            self._mourn()
            ended = await child.wait()
        return why or ended

    async def _converse(self, child: SglangChild) -> str:
        """Hand on what the process says until it ends; the reason it gave, if any."""
        why = ""
        while (message := await child.receive()) is not None:
            match message:
                case Failed():
                    why = f"failed: {message.reason}"
                    continue
                case Serving():
                    self._has_served = True
                    self.paid(EVERYTHING)
            self._hear(message)
        return why
