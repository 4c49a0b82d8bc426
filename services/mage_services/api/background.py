"""Run coroutines from plain functions, even while an event loop runs in the same thread, as in a
notebook.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Generic, Self, TypeVar

import uvloop

T = TypeVar("T")


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result; Ctrl-C cancels it.

    If this thread has a running event loop, another thread runs the coroutine, and that loop
    stands still meanwhile.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return uvloop.run(work)
    with Background(_Nothing) as background:
        result: T = background.run(work)
        return result


class Background(Generic[T]):
    """Run an event loop in another thread, on which an asynchronous context manager stays open,
    such as an engine. Both end with this object's own `with` block.

    Args:
        make: Called in that thread; returns the context manager.

    Attributes:
        value: What the context manager returned when it was entered.
    """

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self._make = make
        self._is_open: threading.Event = threading.Event()
        self._failure: BaseException | None = None
        self._is_abandoned = False
        """Whether `__enter__` was interrupted."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._thread = threading.Thread(target=self._main, name="mage background", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._is_open.wait()
        except BaseException:  # Ctrl-C; `__exit__` will not be called
            self._is_abandoned = True
            if self._loop is not None and self._task is not None:
                with suppress(RuntimeError):  # the loop has ended by itself
                    self._loop.call_soon_threadsafe(self._task.cancel)
            raise
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *failure: object) -> None:
        if not self._thread.is_alive():
            return  # it was closed before
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()
        if self._failure is not None:  # of the context manager's exit
            raise self._failure

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the loop, and return its result; Ctrl-C cancels it."""
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # has no effect if the coroutine has ended

    def _main(self) -> None:
        """Run the loop until `__exit__`. If the context manager fails, keep its exception, which
        `__enter__` or `__exit__` raises.
        """
        try:
            # asyncio, because the caller's code runs meanwhile, and uvloop would replace its
            # handling of SIGCHLD.
            asyncio.run(self._stay_open())
        except BaseException as error:  # raised again in the thread that waits
            self._failure = error
            self._is_open.set()

    async def _stay_open(self) -> None:
        """Enter the context manager, report that it is open, and wait until it is to be closed."""
        self._task, self._closed = asyncio.current_task(), asyncio.Event()
        # Assigned last, and before the look at `_is_abandoned`: whichever thread comes second sees
        # what the other one has set.
        self._loop = asyncio.get_running_loop()
        if self._is_abandoned:
            return
        async with self._make() as self.value:
            self._is_open.set()
            await self._closed.wait()


class _Nothing:
    """Asynchronous context manager that opens nothing: only the loop is wanted."""

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *failure: object) -> None: ...
