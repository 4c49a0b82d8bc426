"""Where calls into a class of the user's are made, so that the caller's event loop never waits.

call                 made in
plain method         a thread; one that hangs is left behind and replaced
coroutine            one event loop in a thread of its own, shared by all coroutines: what blocks
                     there delays other coroutines of the class, and nothing else; one that stays
                     blocked is left behind and replaced

All threads are daemons: a process ends although a user's code hangs.
"""

import asyncio
import math
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self

from mage_async.environments.calls import Call
from mage_async.errors import CallFault

CLOSING_S = 5.0
"""As long the end of a process waits for environments to be closed."""
STUCK_S = 1.0
"""An event loop that does not answer for so long is blocked by a coroutine."""


class _Made(NamedTuple):
    """What a call returned, or raised."""

    value: Any
    error: BaseException | None = None


class Workers:
    """Makes calls, each within a deadline; without calls there are no threads.

    Args:
        deadline_s: of one call.
    """

    def __init__(self, deadline_s: float = math.inf) -> None:
        self._deadline_s = deadline_s
        self._idle: list[_Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def perform(self, call: Call) -> Any:
        """What a call returned. Cancellation abandons the call: a coroutine is cancelled, and a
        thread goes on alone until it returns.

        Raises:
            CallFault: the call raised, or took longer than the deadline.
        """
        make = self._in_loop if call.is_async else self._in_thread
        try:
            async with asyncio.timeout(None if math.isinf(self._deadline_s) else self._deadline_s):
                made = await make(call.function)
        except TimeoutError:  # of ours: what the call raised is in `made`
            if call.is_async:
                self._in_background(self._leave_if_stuck(), "looking after coroutines")
            raise call.overdue(self._deadline_s) from None
        if made.error is not None:
            raise call.fault(made.error) from made.error
        return made.value

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
        """Wait a little for what is being closed."""
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSING_S)

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _leave_if_stuck(self) -> None:
        """Give up an event loop that a coroutine blocks; later calls get a new one."""
        loop = self._loop
        if loop is None:
            return
        answer = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(answer), STUCK_S)
        except TimeoutError:
            if self._loop is loop:
                self._loop = None

    async def _close(self, call: Call) -> None:
        try:
            await self.perform(call)
        except CallFault as fault:
            print(fault, file=sys.stderr, flush=True)

    async def _in_thread(self, function: Callable[[], Any]) -> _Made:
        """Call in a thread that is idle, or in a new one."""
        made: asyncio.Future[_Made] = asyncio.get_running_loop().create_future()
        thread = self._idle.pop() if self._idle else _Thread()
        thread.call(function, partial(self._returned, asyncio.get_running_loop(), thread, made))
        return await made

    def _returned(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: "_Thread",
        made: "asyncio.Future[_Made]",
        value: _Made,
    ) -> None:
        """In the thread: hand a value over. An event loop that is closed no longer wants it."""
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._take, thread, made, value)

    def _take(self, thread: "_Thread", made: "asyncio.Future[_Made]", value: _Made) -> None:
        self._idle.append(thread)
        if not made.done():
            made.set_result(value)

    async def _in_loop(self, function: Callable[[], Any]) -> _Made:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True)
            thread.start()
        future = asyncio.run_coroutine_threadsafe(_guarded(function), self._loop)
        return await asyncio.wrap_future(future)


class _Thread:
    """A thread that makes one call after another."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[tuple[Callable[[], Any], Callable[[_Made], None]]] = SimpleQueue()
        threading.Thread(target=self._run, name="environment", daemon=True).start()

    def call(self, function: Callable[[], Any], answer: Callable[[_Made], None]) -> None:
        """Call `function`, then `answer` with what came of it; both in the thread."""
        self._inbox.put((function, answer))

    def _run(self) -> None:
        while True:
            function, answer = self._inbox.get()
            try:
                made = _Made(function())
            except BaseException as error:  # the border to foreign code, which may also `sys.exit`
                made = _Made(None, error)
            answer(made)
            del function, answer, made


async def _guarded(function: Callable[[], Coroutine[Any, Any, Any]]) -> _Made:
    """Await a coroutine; what it raises is a value, so that it cannot end the event loop."""
    try:
        return _Made(await function())
    except BaseException as error:  # the border to foreign code, which may also `sys.exit`
        return _Made(None, error)
