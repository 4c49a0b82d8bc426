"""How many objects are open at once, what waits for room, and what is closed for being idle."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mage_async.config.schema import Environment as EnvironmentConfig
from mage_async.environments.user_calls import Call
from mage_async.environments.user_class import ResetStep, ResetStepPlay
from mage_async.errors import CallFault
from mage_async.trajectory import Task
from mage_services.environments import call_runner as module
from mage_services.environments.call_runner import CallRunner

LOCK = threading.Lock()


class CapacityError(Exception):
    """A server's own."""


class Rooms:
    """Rules."""

    num_open = most = num_made = 0
    room = 10**9
    met: threading.Event
    meet_at = 1
    """Number of objects that have to be open at once before any `reset` returns."""

    def reset(self, seed: int, task: int) -> str:
        kind = type(self)
        with LOCK:
            kind.num_made += 1
            if kind.num_open >= kind.room:
                raise CapacityError("all rooms are taken")
            self.has_room = True
            kind.num_open += 1
            kind.most = max(kind.most, kind.num_open)
            if kind.num_open >= kind.meet_at:
                kind.met.set()
        kind.met.wait(30)
        return "a room"

    def step(self, action: str) -> tuple[str, float, bool]:
        return "a room", 1.0, False

    def close(self) -> None:
        with LOCK:
            type(self).num_open -= getattr(self, "has_room", False)


def run(main: Callable[[type[Rooms], ResetStep], Awaitable[None]], **given: int) -> None:
    async def limited() -> None:
        kind = type("Rooms", (Rooms,), {"__doc__": "Rules.", "met": threading.Event(), **given})
        async with asyncio.timeout(60):
            await main(kind, ResetStep(kind, {}))

    asyncio.run(limited())


def begun(environment: ResetStep, number: int) -> tuple[ResetStepPlay, Call]:
    play = environment.begin(Task("rooms", str(number), 0), 0)
    call = play.next_call()
    assert call is not None
    return play, call


async def played(environment: ResetStep, workers: CallRunner, number: int) -> None:
    """An episode of one step."""
    play, call = begun(environment, number)
    call.take(await workers.perform(call))
    play.act("on")
    for following in (play.next_call(), play.closing()):
        assert following is not None
        following.take(await workers.perform(following))


def test_no_more_objects_are_open_than_may_be_and_all_are_played() -> None:
    async def main(kind: type[Rooms], environment: ResetStep) -> None:
        async with CallRunner(EnvironmentConfig(most_open=3)) as workers:
            await asyncio.gather(*(played(environment, workers, n) for n in range(20)))
        assert (kind.num_made, kind.most, kind.num_open) == (20, 3, 0)

    run(main, meet_at=3)


def test_a_place_that_was_waited_for_in_vain_is_nobodys() -> None:
    async def main(kind: type[Rooms], environment: ResetStep) -> None:
        async with CallRunner(EnvironmentConfig(most_open=1)) as workers:
            play, call = begun(environment, 0)
            await workers.perform(call)
            waiting = asyncio.ensure_future(workers.perform(begun(environment, 1)[1]))
            await asyncio.sleep(0.01)
            waiting.cancel()
            closing = play.closing()
            assert closing is not None
            await workers.perform(closing)
            await played(environment, workers, 2)

    run(main)


def test_a_reset_that_finds_no_room_is_made_again_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main(kind: type[Rooms], environment: ResetStep) -> None:
        async with CallRunner(EnvironmentConfig(wait_for_room_s=15.0)) as workers:
            await asyncio.gather(*(played(environment, workers, n) for n in range(8)))
        assert (kind.most, kind.num_open) == (2, 0)

    monkeypatch.setattr(module, "TRY_AGAIN_S", 0.05)
    run(main, room=2)
    assert "reset() raised CapacityError: all rooms are taken; waiting for room" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("wait_for_room_s", [0.0, 0.2])
def test_a_reset_that_finds_no_room_in_time_costs_its_group(wait_for_room_s: float) -> None:
    async def main(kind: type[Rooms], environment: ResetStep) -> None:
        async with CallRunner(EnvironmentConfig(wait_for_room_s=wait_for_room_s)) as workers:
            _, call = begun(environment, 0)
            with pytest.raises(CallFault, match=r"raised CapacityError: all rooms are taken"):
                await workers.perform(call)

    run(main, room=0)


def test_an_object_that_nobody_calls_is_closed_and_makes_room() -> None:
    async def main(kind: type[Rooms], environment: ResetStep) -> None:
        async with CallRunner(EnvironmentConfig(idle_s=1.0, most_open=1)) as workers:
            play, call = begun(environment, 0)
            call.take(await workers.perform(call))
            await played(environment, workers, 1)  # waits until the first is closed
            play.act("on")
            late: Any = play.next_call()
            with pytest.raises(CallFault, match=r"turn 1: step\('on'\): .*idle_s = 1, and was"):
                await workers.perform(late)
            closing = play.closing()
            assert closing is not None
            await workers.perform(closing)
        assert kind.num_open == 0

    run(main)
