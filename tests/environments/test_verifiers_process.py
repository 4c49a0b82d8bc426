"""The process of verifiers, and what it sends."""

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from mage_async.errors import EnvironmentFault, WireError
from mage_services.verifiers.process import Report, VerifiersProcess


class Garbled:
    """Stands for a child process, and for its channel, whose first message cannot be read."""

    is_running = True
    is_closing = False

    def __init__(self) -> None:
        self.channel, self.begun = self, asyncio.Event()

    def send(self, message: Any) -> None:
        self.begun.set()

    async def messages(self) -> AsyncIterator[Report]:
        await self.begun.wait()
        raise WireError("no JSON")
        yield Report()

    def close(self) -> None:
        self.is_closing = True

    async def wait(self) -> int:
        return 0


def test_a_garbled_message_ends_the_rollouts_and_the_process() -> None:
    async def run() -> bool:
        process = VerifiersProcess(Garbled())  # type: ignore[arg-type]
        with pytest.raises(EnvironmentFault, match="sent a message that cannot be read: no JSON"):
            async with asyncio.timeout(5):
                await process.play(0, "http://127.0.0.1/")
        return process.is_alive

    assert not asyncio.run(run())


@pytest.fixture
def rollout_worker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program of the child, which runs where verifiers is installed."""
    for name in ("", ".configs.agent", ".utils.loaders"):
        monkeypatch.setitem(sys.modules, f"verifiers.v1{name}", MagicMock())
    monkeypatch.setitem(sys.modules, "verifiers", MagicMock(v1=sys.modules["verifiers.v1"]))
    name = "mage_services.verifiers.child.rollout_worker"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return module


@pytest.mark.parametrize(
    ("reward", "report"),
    [
        (0.5, Report(reward=0.5)),
        (float("nan"), Report(failed="the reward of the taskset is nan")),
        (float("-inf"), Report(failed="the reward of the taskset is -inf")),
    ],
)
def test_a_reward_that_is_no_number_fails_its_rollout_alone(
    rollout_worker: ModuleType, reward: float, report: Report
) -> None:
    class Environment:
        async def run_episode(self, task: object, context: object) -> SimpleNamespace:
            trace = SimpleNamespace(reward=reward, errors=[])
            return SimpleNamespace(ok=True, errors=[], traces=[trace])

    result = asyncio.run(rollout_worker.result_of(Environment(), None, "http://127.0.0.1/"))
    sent = rollout_worker.frame(result)[rollout_worker.LENGTH.size :]
    assert msgspec.json.decode(sent, type=Report) == report
