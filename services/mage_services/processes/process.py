"""What every child process has in common: its start, its status lines, its end.

A child speaks to the supervisor in lines of JSON on a pipe it inherits; the pipe also carries its
heartbeat. It ignores Ctrl-C (the supervisor decides), dies with its parent, and turns every failure
into one line.
"""

import asyncio
import json
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

from mage_async.errors import MageError
from mage_services.processes.parent_death_signal import die_with_parent

E = TypeVar("E", bound=BaseException)

STATUS_FD = "MAGE_STATUS_FD"
BEAT_S = 1.0
EXIT_FAILED, EXIT_BUG = 2, 1
EXIT_DETERMINISTIC = 3
"""The process failed of what would fail again; the supervisor does not start the process again."""
EXIT_TOLD = 128 + signal.SIGTERM
"""Not 0: a process that was ended from outside has not done its work, and is started again."""


class Status:
    """The way to the supervisor: lines of JSON, or nowhere when the process was started by hand."""

    def __init__(self) -> None:
        number = os.environ.get(STATUS_FD)
        self._file = None if number is None else os.fdopen(int(number), "w", buffering=1)

    def send(self, event: str, **fields: Any) -> None:
        """Say something; a supervisor that is gone is no error, for its end is ours."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"event": event, **fields}) + "\n")
        except BrokenPipeError:
            with suppress(BrokenPipeError):  # closing writes what is left, and closes all the same
                self._file.close()
            self._file = None


def run_process(main: Callable[[Status], Awaitable[None]]) -> None:
    """Run a child to its end; its failures become one status line, an exit code and a log."""
    _die_with_parent()
    status = Status()
    is_told = False
    try:
        is_told = uvloop.run(_until_told(main, status))
    except* MageError as group:
        error = first_failure(group)
        _fail(status, EXIT_DETERMINISTIC if error.is_deterministic else EXIT_FAILED, error)
    except* (
        Exception
    ) as group:  # the outermost main: a bug becomes a line and a traceback in the log
        traceback.print_exception(group)
        _fail(status, EXIT_BUG, first_failure(group))
    if is_told:
        sys.exit(EXIT_TOLD)


async def ticks(seconds: float) -> AsyncIterator[float]:
    """Yield the loop's time every `seconds`, by the clock and not by waiting after the work; what
    was missed, as by a stopped process, is not made up for.

    Cancellation leaves nothing behind.
    """
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due = max(due + seconds, loop.time())
        waiter = loop.create_future()
        handle = loop.call_at(due, _wake, waiter)
        try:
            yield await waiter
        finally:
            handle.cancel()


def _wake(waiter: asyncio.Future[float]) -> None:
    if not waiter.done():
        waiter.set_result(asyncio.get_running_loop().time())


async def _until_told(main: Callable[[Status], Awaitable[None]], status: Status) -> bool:
    """Run `main` beside the heartbeat; SIGTERM cancels both. Whether it did."""
    task = asyncio.current_task()
    assert task is not None
    is_told = asyncio.Event()

    def tell() -> None:
        is_told.set()
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, tell)
    try:
        async with asyncio.TaskGroup() as tasks:
            beat = tasks.create_task(_beat(status), name="heartbeat")
            await main(status)
            beat.cancel()
    except asyncio.CancelledError:
        if not is_told.is_set():
            raise
    return is_told.is_set()


async def _beat(status: Status) -> None:
    async for _ in ticks(BEAT_S):
        status.send("beat")


def _die_with_parent() -> None:
    """End with the supervisor, and leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.environ.get("MAGE_PARENT")
    if parent is not None:
        die_with_parent(int(parent))


def first_failure(group: BaseExceptionGroup[E]) -> E:
    """The first failure of a tree of them."""
    error: E | BaseExceptionGroup[E] = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _fail(status: Status, code: int, error: BaseException) -> None:
    reason = str(error) if isinstance(error, MageError) else f"{type(error).__name__}: {error}"
    status.send("failed", reason=reason)
    print(reason, file=sys.stderr, flush=True)
    sys.exit(code)
