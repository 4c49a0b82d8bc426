"""Objects that are closed by a coroutine, although a plain call was the last to hold them."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, ClassVar

import pytest

from mage_async.environments.user_calls import Call
from mage_async.environments.user_class import ResetStep
from mage_async.errors import CallFault
from mage_async.trajectory import Task
from mage_services.environments.call_runner import CallRunner

PATIENCE_S = 60.0


class CapacityError(Exception):
    """A server's own."""


class Slow:
    """A class whose constructor takes long, and whose `close` is a coroutine function."""

    has_room: ClassVar[bool]
    began: ClassVar[threading.Event]
    may_end: ClassVar[threading.Event]
    is_closed: ClassVar[threading.Event]
    closed: ClassVar[list[object]]

    def __init__(self) -> None:
        self.began.set()
        assert self.may_end.wait(PATIENCE_S)

    def reset(self, seed: int, task: int) -> str:
        if not self.has_room:
            raise CapacityError("all rooms are taken")
        return "a room"

    def step(self, action: str) -> tuple[str, float, bool]:
        return "a room", 1.0, False

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed.append(self)
        self.is_closed.set()


def slow(*, has_room: bool) -> type[Slow]:
    """A class of its own for a test."""
    events = {name: threading.Event() for name in ("began", "may_end", "is_closed")}
    own = {"__doc__": "Rules.", "has_room": has_room, "closed": [], **events}
    return type("Slow", (Slow,), own)


def reset_of(kind: type[Slow]) -> tuple[Call, Call]:
    """The first call of an episode, and the one that ends it."""
    play = ResetStep(kind, {}).begin(Task("slow", "0", 0), 0)
    reset = play.next_call()
    closing = play.closing()
    assert reset is not None
    assert closing is not None
    return reset, closing


def patiently(main: Coroutine[Any, Any, None]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await main

    asyncio.run(whole())


def test_an_object_that_is_made_after_its_trial_was_abandoned_is_closed_once() -> None:
    async def main() -> None:
        kind = slow(has_room=True)
        reset, closing = reset_of(kind)
        async with CallRunner() as workers:
            playing = asyncio.create_task(workers.perform(reset))
            assert await asyncio.to_thread(kind.began.wait, PATIENCE_S)
            playing.cancel()
            await workers.perform(closing)  # there is nothing to be closed yet
            kind.may_end.set()
            assert await asyncio.to_thread(kind.is_closed.wait, PATIENCE_S)
            assert len(kind.closed) == 1

    patiently(main())


def test_an_object_that_found_no_room_is_closed() -> None:
    async def main() -> None:
        kind = slow(has_room=False)
        kind.may_end.set()
        reset, _ = reset_of(kind)
        async with CallRunner() as workers:
            with pytest.raises(CallFault, match="all rooms are taken"):
                await workers.perform(reset)
            assert await asyncio.to_thread(kind.is_closed.wait, PATIENCE_S)
            assert len(kind.closed) == 1

    patiently(main())


def test_an_exception_of_a_late_close_names_close(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def close(self: Slow) -> None:
        raise ConnectionError("the server is gone")

    async def main() -> None:
        kind = slow(has_room=False)
        kind.may_end.set()
        monkeypatch.setattr(kind, "close", close)
        reset, _ = reset_of(kind)
        async with CallRunner() as workers:
            with pytest.raises(CallFault, match="all rooms are taken"):
                await workers.perform(reset)

    patiently(main())
    printed = capsys.readouterr().err
    assert ": reset(), then close() raised ConnectionError: the server is gone" in printed


def test_idle_threads_end_with_their_runner() -> None:
    async def main() -> None:
        before = {*threading.enumerate()}
        kind = slow(has_room=True)
        kind.may_end.set()
        async with CallRunner() as workers:
            for call in reset_of(kind):
                await workers.perform(call)
            begun = {*threading.enumerate()} - before
        (thread,) = (each for each in begun if each.name == "environment")
        thread.join(PATIENCE_S)
        assert not thread.is_alive()

    patiently(main())
