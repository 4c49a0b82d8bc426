"""Rollouts of verifiers itself, in a process of its own: its loop asks, and we answer."""

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from mage_async.environments import catalogue
from mage_async.errors import CallFault, ConfigError
from mage_services.environments.call_runner import CallRunner
from mage_services.verifiers import process
from tests.environments.loaders.playing import Played, play_waiting, rehearsed
from tests.other_libraries.make_envs import VERIFIERS

HERE, PYTHON = Path(__file__).parent, VERIFIERS / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PYTHON.exists(), reason="run tests/other_libraries/make_envs.py first"),
]
GUESSES = ("10", "5", "15", "3", "8", "13", "18")
T = TypeVar("T")


@pytest.fixture(autouse=True)
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The taskset lies in the current folder."""
    monkeypatch.chdir(HERE)


def playing(act: Callable[[Callable[..., Awaitable[Played]]], Awaitable[T]], **options: Any) -> T:
    """Let a test play episodes in one event loop, and so by one process of verifiers."""
    given = {"python": str(PYTHON), "size": 20} | options
    environment = catalogue.load("verifiers:number_taskset", **given)

    async def run() -> T:
        async with CallRunner(120.0) as workers:

            def play(member: str, *actions: str) -> Awaitable[Played]:
                return play_waiting(environment, member, actions, workers)

            return await act(play)

    return asyncio.run(run())


def test_returns_are_those_of_the_packages_own_loop_however_many_play_at_once() -> None:
    tasks = [1, 3, 4, 7]
    given = json.dumps({"tasks": tasks, "guesses": GUESSES})
    command = [str(PYTHON), str(HERE / "verifiers_own_loop.py"), given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    own = json.loads(done.stdout)

    async def act(play: Callable[..., Awaitable[Played]]) -> list[Played]:
        return await asyncio.gather(*(play(str(task), *GUESSES) for task in tasks))

    ours = playing(act)
    assert [sum(each.rewards) for each in ours] == [each["reward"] for each in own]
    assert any(each["reward"] for each in own)
    assert all(each.is_done for each in ours)
    for mine, theirs in zip(ours, own, strict=True):
        assert mine.said[0] == f"Be brief.\n\n{theirs['said'][0]}"
        assert mine.said[1:-1] == theirs["said"][1:]


def test_a_failing_rollout_costs_itself_and_a_dead_process_is_started_again() -> None:
    async def act(play: Callable[..., Awaitable[Played]]) -> list[Any]:
        failed = await asyncio.gather(play("3", "raise"), return_exceptions=True)
        left = await play("3", "10")
        died = await asyncio.gather(play("3", "exit"), return_exceptions=True)
        return [*failed, left, *died, await play("3", *GUESSES)]

    failed, left, died, again = playing(act)
    assert isinstance(failed, CallFault)
    assert "turn 1: step('raise') raised EnvironmentFault: EnvError" in str(failed)
    assert "no number" in str(failed)
    assert (left.rewards, left.is_done) == ([0.0], False)
    assert "EnvironmentFault: the process of verifiers has ended" in str(died)
    assert again.is_done


def test_an_idle_process_is_ended_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE_S", 0.1)
    environment = catalogue.load("verifiers:number_taskset", python=str(PYTHON), size=20)

    async def run() -> tuple[Any, ...]:
        async with CallRunner(120.0) as workers:
            one = await play_waiting(environment, "3", GUESSES, workers)
            (task,) = environment.kind.processes._started.values()
            await asyncio.sleep(1.0)
            assert not task.result().is_alive
            return one, await play_waiting(environment, "3", GUESSES, workers)

    first, again = asyncio.run(run())
    assert first == again


def test_a_taskset_is_configured_and_rehearsed() -> None:
    async def act(play: Callable[..., Awaitable[Played]]) -> Played:
        return await play("3")

    said = playing(act, environment={"taskset": {"highest": 4}}).said
    assert said == ["Be brief.\n\nGuess a number from 1 to 4."]
    options = (f"python={PYTHON}", "size=20")
    lines = rehearsed(
        "verifiers:number_taskset", *(f"environment.options.{each}" for each in options)
    )
    assert any("4 × reset took" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("number_taskset", 21, "number_taskset has 20 tasks: lower `size`"),
        ("no_taskset", 20, "no_taskset: ModuleNotFoundError: taskset 'no_taskset' not found"),
    ],
)
def test_a_taskset_that_cannot_be_played_is_refused(name: str, size: int, message: str) -> None:
    given = (f"environment.options.python={PYTHON}", f"environment.options.size={size}")
    with pytest.raises(ConfigError, match=message):
        rehearsed(f"verifiers:{name}", *given)
