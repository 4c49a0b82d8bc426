"""The threads in which calls into a user's class are made, and the way back to the event loop.

Handing over wakes the other side once for all that is waiting there, not once a call: hundreds of
calls often return together.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Hashable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

BATCH = 32
"""Waking another thread costs as much as a few calls; more at once would have those wait that were
first.
"""


class Made(NamedTuple):
    """What a call returned, or raised."""

    value: Any
    error: BaseException | None = None


Answer = Callable[[Made], None]


class Handover:
    """What other threads hand to an event loop; `take` is called there with each, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[..., None]) -> None:
        self._loop, self._take = loop, take
        self._waiting: deque[tuple[Any, ...]] = deque()
        self._is_woken = self._is_due = False

    def put(self, *parts: Any) -> None:
        """Hand over, from any thread. An event loop that is closed takes nothing any more.

        What another event loop hands over in one turn wakes this one once for every `BATCH`.
        """
        self._waiting.append(parts)
        if self._is_woken:
            return
        here = _running_loop()
        if here is None or len(self._waiting) >= BATCH:
            self._wake()
        elif not self._is_due:
            self._is_due = True
            here.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._is_due = False
        if self._waiting and not self._is_woken:
            self._wake()

    def _wake(self) -> None:
        self._is_woken = True
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take_all)

    def _take_all(self) -> None:
        self._is_woken = False  # first: what is put from here on wakes the event loop again
        while self._waiting:
            self._take(*self._waiting.popleft())


class Thread:
    """A thread that makes one call after another."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[tuple[Callable[[], Any], Answer]] = SimpleQueue()
        threading.Thread(target=self._run, name="environment", daemon=True).start()

    def call(self, function: Callable[[], Any], answer: Answer) -> None:
        """Call `function`, then `answer` with what came of it; both in the thread."""
        self._inbox.put((function, answer))

    def _run(self) -> None:
        while True:
            function, answer = self._inbox.get()
            try:
                made = Made(function())
            except BaseException as error:  # the border to foreign code, which may also `sys.exit`
                made = Made(None, error)
            answer(made)
            del function, answer, made


class Coroutines:
    """An event loop in a thread of its own, which awaits coroutines."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}
        self._inbox = Handover(self.loop, self._begin)
        threading.Thread(target=self.loop.run_forever, name="coroutines", daemon=True).start()

    def call(self, key: Hashable, function: Callable[[], Any], answer: Answer) -> None:
        """Await `function()`, then call `answer` with what came of it; both in the thread."""
        self._inbox.put(key, function, answer)

    def cancel(self, key: Hashable) -> None:
        """Cancel a call, where it is still under way."""
        self.loop.call_soon_threadsafe(self._cancel, key)

    def _begin(self, key: Hashable, function: Callable[[], Any], answer: Answer) -> None:
        task = self.loop.create_task(_answered(function, answer))
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def _cancel(self, key: Hashable) -> None:
        if key in self._tasks:
            self._tasks[key].cancel()


async def _answered(function: Callable[[], Coroutine[Any, Any, Any]], answer: Answer) -> None:
    """Await a coroutine; what it raises is a value, so that it cannot end the event loop."""
    try:
        made = Made(await function())
    except BaseException as error:  # the border to foreign code, which may also `sys.exit`
        made = Made(None, error)
    answer(made)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread; None where there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
