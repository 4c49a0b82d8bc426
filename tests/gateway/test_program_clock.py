"""The deadline of a program counts its own time, not the time in which it waits for the policy."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from mage_async.config.schema import Environment as EnvironmentConfig
from mage_async.errors import CallFault
from mage_async.trajectory import Task, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_services.actor.rollout import play_trial
from mage_services.environments import call_runner
from mage_services.environments.call_runner import CallRunner
from tests.helpers.agent_site import asked, said, scripted, small_chat, stage_of, tasks_of

DEADLINE_S, SLOW_S = 0.9, 0.6
FAILED = "took longer than environment.step_deadline_s = 0.9"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return small_chat(tmp_path_factory.mktemp("policy"))


@dataclass
class Result:
    """What became of a trial."""

    trial: Trial | CallFault | None = None
    notes: list[str] = field(default_factory=list)
    calling_s: float = 0.0
    seconds: float = 0.0


@pytest.fixture
def play(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plays a trial of two episodes on an engine whose n-th completion takes `pauses[n]`, those
    after the last none.
    """
    monkeypatch.setattr(call_runner, "SLOW_S", SLOW_S)

    def play(run: Any, pauses: Sequence[float]) -> Result:
        result, left = Result(), list(pauses)
        engine: Any = scripted(chat, " rock")
        complete = engine.complete

        async def slow(prompt: Any) -> Any:
            await asyncio.sleep(left.pop(0) if left else 0.0)
            return await complete(prompt)

        engine.complete = slow

        async def main() -> None:
            began = time.monotonic()
            async with CallRunner(
                EnvironmentConfig(step_deadline_s=DEADLINE_S), say=result.notes.append
            ) as workers:
                trial = stage_of(tasks_of(run), chat, engine).begin(Task("own", "3", 7), 0, "3.0")
                try:
                    result.trial = await play_trial(trial, engine, workers)
                except CallFault as fault:
                    result.trial = fault
                result.seconds = time.monotonic() - began
                result.calling_s = workers.calling_s()
                await asyncio.sleep(0.2)
                assert workers.calling_s() - result.calling_s < 0.1, "no clock goes on"

        asyncio.run(main())
        return result

    return play


def test_the_policys_time_is_neither_the_programs_nor_the_environments(play: Any) -> None:
    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        for _ in range(1 if episode else 3):
            await asked(url, said("a"))
            await asyncio.sleep(0.05)
        return 1.0

    result = play(run, [0.7, 0.7, 0.7])
    assert isinstance(result.trial, Trial), result.trial
    assert len(result.trial.turns) == 4
    assert not result.notes
    assert result.seconds > 2.3
    assert 0.2 <= result.calling_s < 1.2, "four pauses of the program"


def test_a_program_fails_by_its_own_pauses_between_calls(play: Any) -> None:
    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        for _ in range(4):
            await asked(url, said("a"))
            await asyncio.sleep(0.35)
        return 1.0

    result = play(run, [0.2] * 4)
    assert FAILED in str(result.trial)
    assert 0.6 + DEADLINE_S <= result.seconds < 5.0, "three calls, and its own time"
    assert DEADLINE_S - 0.01 <= result.calling_s < DEADLINE_S + 0.3
    (note,) = result.notes
    assert note.startswith(
        "own, task 3, seed 7, episode 1: run() has taken 0.6 s, its waits for the policy not "
        "counted. After environment.step_deadline_s = 0.9 s a call has failed"
    )
    assert "lower environment.most_open" in note


@pytest.mark.parametrize("pause_s", [0.1, 60.0])
def test_the_clock_stands_still_while_any_of_several_calls_waits(play: Any, pause_s: float) -> None:
    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        await asyncio.gather(*(asked(url, said(str(number))) for number in range(3)))
        await asyncio.sleep(pause_s)
        return 1.0

    result = play(run, [0.1, 0.4, 1.7])
    assert result.seconds > 1.7
    if pause_s < DEADLINE_S:
        assert isinstance(result.trial, Trial), result.trial
        assert not result.notes
        assert result.calling_s < 1.0
    else:
        assert FAILED in str(result.trial)
        assert len(result.notes) == 1
        assert result.seconds < 6.0


def test_a_call_whose_client_has_gone_does_not_stop_the_clock(play: Any) -> None:
    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asked(url, said("a")), 0.3)
        await asyncio.Event().wait()
        return 1.0

    result = play(run, [60.0])
    assert FAILED in str(result.trial)
    assert result.seconds < 5.0


def test_a_call_that_outlives_its_episode_does_not_stop_the_clock_of_the_next(play: Any) -> None:
    late: list[Any] = []

    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        if episode:
            await asyncio.Event().wait()
        await asked(url, said("a"))
        late.append(asyncio.create_task(asked(url, said("b"))))
        await asyncio.sleep(0.2)
        return 1.0

    result = play(run, [0.0, 60.0])
    assert FAILED in str(result.trial)
    assert "episode 2" in str(result.trial)
    assert result.seconds < 5.0
    assert result.calling_s < DEADLINE_S + 1.0
