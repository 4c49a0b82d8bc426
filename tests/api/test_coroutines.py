"""A loop in a thread hides no failure of the context manager that is open on it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import pytest

from mage_services.api.coroutines import Background


@asynccontextmanager
async def failing(*, early: bool) -> AsyncIterator[int]:
    """Fail when it is entered, or when it is left."""
    if early:
        raise OSError("no room")
    yield 7
    raise OSError("not flushed")


async def doubled(number: int) -> int:
    """Return twice a number."""
    return 2 * number


def test_a_failure_at_the_beginning_is_raised_where_it_is_entered() -> None:
    with pytest.raises(OSError, match="no room"), Background(lambda: failing(early=True)):
        pytest.fail("entered")


def test_a_failure_at_the_end_is_raised_where_it_is_left() -> None:
    with (
        pytest.raises(OSError, match="not flushed"),
        Background(lambda: failing(early=False)) as background,
    ):
        assert background.run(doubled(background.value)) == 14
    background.__exit__()  # what was left is not left again, and nothing is raised


@asynccontextmanager
async def failing_alone(fail: asyncio.Event) -> AsyncIterator[None]:
    """Fail by a task of its own, as an engine does, once `fail` is set."""

    async def task() -> None:
        await fail.wait()
        raise OSError("the engine ended")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(task())
        yield


async def set_and_wait(event: asyncio.Event) -> None:
    """Set an event, and never return."""
    event.set()
    await asyncio.Event().wait()


async def set_alone(event: asyncio.Event) -> None:
    """Set an event."""
    event.set()


def test_a_failure_meanwhile_is_raised_where_work_waits_and_only_there() -> None:
    fail = asyncio.Event()
    with Background(lambda: failing_alone(fail)) as background:
        for _ in range(2):  # the loop has ended at the second time
            with pytest.raises(ExceptionGroup) as raised:
                background.run(set_and_wait(fail))
            assert str(raised.value.exceptions[0]) == "the engine ended"


def test_a_failure_meanwhile_that_no_work_met_is_raised_where_it_is_left() -> None:
    fail = asyncio.Event()
    background = Background(lambda: failing_alone(fail)).__enter__()
    background.run(set_alone(fail))
    background._thread.join(60)
    assert not background._thread.is_alive()
    with pytest.raises(ExceptionGroup) as raised:
        background.__exit__()
    assert str(raised.value.exceptions[0]) == "the engine ended"


def test_work_after_the_end_is_refused() -> None:
    with Background(lambda: nullcontext(7)) as background:
        assert background.run(doubled(background.value)) == 14
    with pytest.raises(RuntimeError, match=r"^this object is closed: `close` was called"):
        background.run(doubled(1))


def test_what_is_being_opened_when_the_caller_is_interrupted_is_given_up() -> None:
    is_opening, is_given_up = threading.Event(), threading.Event()

    @asynccontextmanager
    async def slow() -> AsyncIterator[None]:
        is_opening.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_given_up.set()
        yield

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert is_opening.wait(60)
            raise KeyboardInterrupt

    background = Background(slow)
    background._is_open = Interrupted()
    with pytest.raises(KeyboardInterrupt), background:
        pytest.fail("entered")
    assert is_given_up.wait(10)
