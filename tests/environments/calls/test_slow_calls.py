"""Calls that do not return, or harm the process that makes them: each is named soon."""

import asyncio
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest

from mage_async.config.schema import Environment as EnvironmentConfig
from mage_async.environments.user_class import ResetStep
from mage_async.trajectory import Task
from mage_services.environments import call_runner
from mage_services.environments.call_runner import CallRunner
from mage_services.processes.process import EXIT_DETERMINISTIC


class Hangs:
    """Rules."""

    may_end: ClassVar[threading.Event]

    def reset(self, seed: int, task: int) -> str:
        assert self.may_end.wait(60.0)
        return "closed"

    def step(self, action: str) -> tuple[str, float, bool]:
        return "closed", 1.0, False


@pytest.mark.parametrize("load", [0.0, 1000.0])
def test_a_call_that_does_not_return_is_named_once_long_before_its_deadline(
    load: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(call_runner, "SLOW_S", 0.2)
    monkeypatch.setattr(Hangs, "may_end", threading.Event(), raising=False)
    notes: list[str] = []

    async def main() -> None:
        environment = ResetStep(Hangs, {})
        is_said = asyncio.Event()

        def say(text: str) -> None:
            notes.append(text)
            is_said.set()

        async with (
            CallRunner(EnvironmentConfig(step_deadline_s=600.0), say=say) as workers,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(3):
                call = environment.begin(Task("hangs", str(number), 0), 0).next_call()
                assert call is not None
                tasks.create_task(workers.perform(call))
            await is_said.wait()
            Hangs.may_end.set()
        async with CallRunner(EnvironmentConfig(step_deadline_s=600.0), say=say) as workers:
            call = environment.begin(Task("hangs", "0", 0), 0).next_call()
            assert call is not None
            await workers.perform(call)
            await asyncio.sleep(0.4)

    asyncio.run(main())
    (note,) = notes
    assert note.startswith("hangs, task 0, seed 0, episode 1: reset() has not returned for 0.2 s")
    assert "; 2 other calls wait too. " in note
    assert "environment.step_deadline_s = 600 s" in note
    assert "raise engine.max_contexts" in note
    assert ("This machine is busy: its load is 1000, with " in note) == (load == 1000.0)


class Blocks:
    """Rules."""

    async def reset(self, seed: int, task: int) -> str:
        time.sleep(0.5)  # noqa: ASYNC251, as a client that is not asynchronous
        return "closed"

    step = Hangs.step


def test_a_coroutine_that_blocks_the_event_loop_of_all_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_runner, "SLOW_S", 0.3)
    monkeypatch.setattr(call_runner, "STUCK_S", 0.2)
    notes: list[str] = []

    async def main() -> None:
        environment = ResetStep(Blocks, {})
        async with CallRunner(say=notes.append) as workers, asyncio.TaskGroup() as tasks:
            for number in range(2):
                call = environment.begin(Task("blocks", str(number), 0), 0).next_call()
                assert call is not None
                tasks.create_task(workers.perform(call))

    asyncio.run(main())
    (note,) = notes
    assert "if they are slow, await what takes long, or write plain functions" in note
    assert " s for the event loop of all coroutines, so one of them blocks it" in note


def test_a_call_that_closes_descriptors_of_its_process_is_named() -> None:
    program = """
import asyncio, os
from mage_async.environments.user_class import ResetStep
from mage_async.trajectory import Task
from mage_services.environments.call_runner import CallRunner

class Closes:
    "Rules."
    def reset(self, seed, task):
        os.closerange(3, 64)
        return ""
    def step(self, action):
        return "", 0.0, True

async def main():
    async with CallRunner() as workers:
        await workers.perform(ResetStep(Closes, {}).begin(Task("own", "3", 0), 0).next_call())

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == EXIT_DETERMINISTIC
    assert ended.stderr == (
        "closes, task 3, seed 0, episode 1: reset() closed descriptors that it did not open "
        "(os.close or os.closerange): close only your own\n"
    )
