"""Where calls into a class of the user's are made, so that the caller's event loop never waits.

call                 made in
plain method         a thread; one that hangs is left behind and replaced
whole protocol       the same; where the engine needs it, one call after another
coroutine            one event loop in a thread of its own, shared by all coroutines: what blocks
                     there delays other coroutines of the class, and nothing else; one that stays
                     blocked is left behind and replaced

All threads are daemons: a process ends although a user's code hangs. With `environment.workers` all
of this happens in worker processes, which may die without the actor (`pool.py`); but for the whole
protocol, whose plays stay where scripts and filters can look at them.
"""

import asyncio
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, Self

from mage_async.config.sections.trials import Environment
from mage_async.environments.calls import Call, Callee
from mage_async.environments.hosted.user_object import Answered, Hosted, Request
from mage_async.errors import CallFault, CapacityFault
from mage_services.environments.callers import Answer, Coroutines, Handover, Made, Thread
from mage_services.environments.leases import Leases
from mage_services.environments.pool import Pool

CLOSING_S = 5.0
"""As long the end of a process waits for environments to be closed."""
TRY_AGAIN_S = 1.0
"""A `reset` that found no room is made again after so long, or when an object was closed here."""
STUCK_S = 1.0
"""An event loop that does not answer for so long is blocked by a coroutine."""


class Workers:
    """Makes calls, each within a deadline; without calls there are no threads.

    Args:
        deadline_s: of one call.
        num_processes: 0: calls are made in threads and an event loop of this process.
        most_open: objects at once, where it is not 0; others wait before their `reset`.
        idle_s: an object that is not called for so long is closed, where it is not 0.
        wait_for_room_s: as long a `reset` that finds no room is made again.
    """

    def __init__(
        self,
        deadline_s: float = math.inf,
        num_processes: int = 0,
        *,
        most_open: int = 0,
        idle_s: float = 0.0,
        wait_for_room_s: float = 0.0,
    ) -> None:
        self._deadline_s, self._wait_for_room_s = deadline_s, wait_for_room_s
        self._leases = Leases(most_open, idle_s, self._reap)
        self._pool = Pool(num_processes) if num_processes else None
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._idle: list[Thread] = []
        self._coroutines: Coroutines | None = None
        self._returns: Handover | None = None
        self._background: set[asyncio.Task[None]] = set()

    @classmethod
    def of(cls, rules: Environment) -> Self:
        """As a configuration has them."""
        return cls(
            rules.step_deadline_s,
            rules.workers,
            most_open=rules.most_open,
            idle_s=rules.idle_s,
            wait_for_room_s=rules.wait_for_room_s,
        )

    async def perform(self, call: Call) -> Answered:
        """What a call returned. Cancellation abandons the call: a coroutine is cancelled, and a
        thread goes on alone until it returns.

        Raises:
            CallFault: the call raised, or took longer than the deadline.
        """
        await self._leases.begin(call)
        try:
            return await self._patiently(call)
        finally:
            await self._leases.end(call)

    async def _patiently(self, call: Call) -> Answered:
        """Make a call, and again where it found no room, as long as that may take."""
        began = time.monotonic()
        for number in count():
            try:
                return await self._within_deadline(call)
            except CapacityFault as fault:
                left_s = self._wait_for_room_s - (time.monotonic() - began)
                if left_s <= 0:
                    raise
                if not number:
                    print(f"{fault}; waiting for room", file=sys.stderr, flush=True)
                await self._leases.room(min(left_s, TRY_AGAIN_S))
        raise AssertionError("unreachable")

    async def _within_deadline(self, call: Call) -> Answered:
        """Make a call; where it has to wait for others of its engine, that time does not count."""
        if self._pool is not None and isinstance(call.hosted, Hosted):
            await self._pool.admit(call.hosted, call.request)
        async with self._turns[call.hosted.turn_of] if call.hosted.turn_of else nullcontext():
            return await self._at_once(call)

    async def _at_once(self, call: Call) -> Answered:
        try:
            async with asyncio.timeout(None if math.isinf(self._deadline_s) else self._deadline_s):
                return await self._answer(call)
        except TimeoutError:  # of ours: what the call raised is a `CallFault`
            if self._pool is not None and isinstance(call.hosted, Hosted):
                self._in_background(self._pool.look_after(call.hosted), "looking after a process")
            elif call.is_async:
                self._in_background(self._leave_if_stuck(), "looking after coroutines")
            raise call.overdue(self._deadline_s) from None

    async def _answer(self, call: Call) -> Answered:
        if self._pool is not None and isinstance(call.hosted, Hosted):
            return await self._pool.perform(call.hosted, call.request)
        made = await (self._in_loop(call.function) if call.is_async else self._in_thread(call))
        if made.error is not None:
            raise call.fault(made.error) from made.error
        return made.value

    def _reap(self, hosted: Callee) -> None:
        """Close an object whose lease has ended."""
        place = f"an object that was not called for {self._leases.idle_s:g} s: close()"
        call = Call(hosted, Request("close", place), lambda answered: None)
        self._in_background(self._give_back(call), "reaping")

    async def _give_back(self, call: Call) -> None:
        """Close an object; its trial, which may still come, hears that its lease has ended."""
        try:
            await self._within_deadline(call)
        except CallFault as fault:
            print(fault, file=sys.stderr, flush=True)
        await self._leases.give_back(call.hosted)

    def close_behind(self, calls: Iterable[Call]) -> None:
        """Make closing calls while other things go on; what goes wrong is said in the log."""
        for call in calls:
            self._in_background(self._close(call), "closing")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """As `close`."""
        await self.close()

    async def close(self) -> None:
        """Wait a little for what is being closed, and end the worker processes. Cancellation leaves
        them to end with this process.
        """
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSING_S)
        if self._pool is not None:
            await self._pool.close()

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _leave_if_stuck(self) -> None:
        """Give up an event loop that a coroutine blocks; later calls get a new one."""
        coroutines = self._coroutines
        if coroutines is None:
            return
        answer = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), coroutines.loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(answer), STUCK_S)
        except TimeoutError:
            if self._coroutines is coroutines:
                self._coroutines = None

    async def _close(self, call: Call) -> None:
        try:
            await self.perform(call)
        except CallFault as fault:
            print(fault, file=sys.stderr, flush=True)

    async def _in_thread(self, call: Call) -> Made:
        """Call in a thread that is idle, or in a new one."""
        thread = self._idle.pop() if self._idle else Thread()
        made, answer = self._awaited(partial(self._returned, thread, call))
        thread.call(call.function, answer)
        return await made

    async def _in_loop(self, function: Callable[[], Any]) -> Made:
        """Await in the event loop of all coroutines."""
        if self._coroutines is None:
            self._coroutines = Coroutines()
        coroutines = self._coroutines
        made, answer = self._awaited()
        coroutines.call(made, function, answer)
        try:
            return await made
        except asyncio.CancelledError:
            coroutines.cancel(made)
            raise

    def _awaited(
        self, after: Callable[[], None] = lambda: None
    ) -> "tuple[asyncio.Future[Made], Answer]":
        """What a call will have made, and the function that says so in whichever thread.

        Args:
            after: is called here when it was said, though nobody may wait for it any more.
        """
        loop = asyncio.get_running_loop()
        if self._returns is None:
            self._returns = Handover(loop, self._take)
        made: asyncio.Future[Made] = loop.create_future()
        return made, partial(self._returns.put, made, after)

    def _take(self, made: "asyncio.Future[Made]", after: Callable[[], None], value: Made) -> None:
        after()
        if not made.done():
            made.set_result(value)

    def _returned(self, thread: Thread, call: Call) -> None:
        """A thread is idle again; what its call left open is closed."""
        self._idle.append(thread)
        if (close := call.hosted.owed()) is not None:
            self._in_background(self._close_late(call, close), "closing late")

    async def _close_late(self, call: Call, close: Callable[[], Any]) -> None:
        made = await self._in_loop(close)
        if made.error is not None:
            print(call.fault(made.error), file=sys.stderr, flush=True)
