"""Leases: which objects of users' classes are open, how many may be, and for how long unused.

A lease lasts from before an object's `reset` to the end of its `close`. Places are handed on in the
order in which they were asked for.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from mage_async.environments.calls import Call, Callee
from mage_async.errors import CallFault


@dataclass(slots=True)
class Leases:
    """Used on one event loop."""

    most_open: int
    """0: any number."""
    idle_s: float
    """An object that is not called for so long loses its lease; 0: none does."""
    reap: Callable[[Callee], None]
    """Closes an object whose lease has ended."""
    _open: dict[Callee, asyncio.TimerHandle | None] = field(default_factory=dict, init=False)
    """Each with the clock of its idle time, where that runs."""
    _ended: set[Callee] = field(default_factory=set, init=False)
    """Objects that lost their leases, and whose trials have not heard of it yet."""
    _freed: asyncio.Condition = field(default_factory=asyncio.Condition, init=False)

    async def begin(self, call: Call) -> None:
        """Before a call: have a place for its object, and stop its idle time. Cancellation leaves
        no place taken.

        Raises:
            CallFault: the lease has ended.
        """
        hosted, method = call.hosted, call.request.method
        if method == "reset" and hosted not in self._open:
            async with self._freed:
                await self._freed.wait_for(self._has_room)
                self._open[hosted] = None
        elif method == "step" and hosted in self._ended:
            raise CallFault(
                f"{call.place}: the object was not called for environment.idle_s = "
                f"{self.idle_s:g}, and was closed"
            )
        self._stop_clock(hosted)

    async def end(self, call: Call) -> None:
        """After a call, however it ended."""
        hosted = call.hosted
        if call.request.method == "close":
            self._stop_clock(hosted)
            self._ended.discard(hosted)
            if hosted in self._open:
                await self._free(hosted)
        elif hosted in self._open and self.idle_s:
            loop = asyncio.get_running_loop()
            self._open[hosted] = loop.call_later(self.idle_s, self._expire, hosted)

    async def room(self, most_s: float) -> None:
        """Wait until an object of this process has been closed, or so many seconds."""
        try:
            async with asyncio.timeout(most_s), self._freed:
                await self._freed.wait()
        except TimeoutError:
            return

    async def give_back(self, hosted: Callee) -> None:
        """An object without a lease has been closed."""
        if hosted in self._open:
            await self._free(hosted)

    def _has_room(self) -> bool:
        return len(self._open) < (self.most_open or math.inf)

    async def _free(self, hosted: Callee) -> None:
        async with self._freed:
            self._open.pop(hosted, None)
            self._freed.notify_all()

    def _stop_clock(self, hosted: Callee) -> None:
        if (clock := self._open.get(hosted)) is not None:
            clock.cancel()
            self._open[hosted] = None

    def _expire(self, hosted: Callee) -> None:
        self._ended.add(hosted)
        self.reap(hosted)
