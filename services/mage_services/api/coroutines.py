"""Run coroutines from plain functions, even while an event loop runs in the same thread, as in a
notebook.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Generic, Self, TypeVar

import uvloop

T = TypeVar("T")


def run_coroutine_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result; Ctrl-C cancels it.

    If this thread has a running event loop, another thread runs the coroutine, and the running loop
    is blocked until then.
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
        self._has_raised = False
        """Whether the failure was raised already; `__exit__` does not raise it again."""
        self._ended: Future[None] = Future()
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
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop has ended: it was closed before, or has failed
            self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()
        if self._failure is not None and not self._has_raised:
            self._has_raised = True
            raise self._failure

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the loop, and return its result; Ctrl-C cancels it.

        Raises:
            RuntimeError: this object's `with` block has ended.
            BaseException: the coroutine's own exception, or, if the context manager has failed
                before the coroutine had ended, that of the context manager.
        """
        assert self._loop is not None
        assert self._task is not None
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:  # the loop is closed
            work.close()
            self._raise_failure()
            raise RuntimeError(
                "this object is closed: `close` was called, or its `with` block has ended"
            ) from error
        try:
            wait((future, self._ended), return_when=FIRST_COMPLETED)
            # The end of the context manager cancels the coroutine, or the loop never began it.
            if self._task.done() and (not future.done() or future.cancelled()):
                self._raise_failure()
            return future.result(timeout=0)  # no need to wait: the coroutine or the loop has ended
        finally:
            future.cancel()  # has no effect if the coroutine has ended

    def _raise_failure(self) -> None:
        """Wait for the end of the thread, and raise the failure of the context manager, if any."""
        self._thread.join()
        if self._failure is not None:
            self._has_raised = True
            raise self._failure

    def _main(self) -> None:
        """Run the loop until `__exit__`. If the context manager fails, keep its exception, which
        `__enter__`, `run` or `__exit__` raises.
        """
        try:
            # asyncio and not uvloop, because the caller's code runs meanwhile, and uvloop would
            # replace the caller's handling of SIGCHLD.
            asyncio.run(self._stay_open())
        except BaseException as error:  # raised again in the thread that waits
            self._failure = error
            self._is_open.set()
        finally:
            self._ended.set_result(None)

    async def _stay_open(self) -> None:
        """Enter the context manager, report that it is open, and wait until it is to be closed."""
        self._task, self._closed = asyncio.current_task(), asyncio.Event()
        # `_loop` is assigned after `_task`, and before `_is_abandoned` is read: whichever thread
        # comes second sees the attribute that the other one has set.
        self._loop = asyncio.get_running_loop()
        if self._is_abandoned:
            return
        async with self._make() as self.value:
            self._is_open.set()
            await self._closed.wait()


class _Nothing:
    """Open nothing, as an asynchronous context manager: only the loop is needed."""

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *failure: object) -> None: ...
