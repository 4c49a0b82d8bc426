"""The adapter and the real engine when its turns are interrupted: by weights, or by its death."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from mage_async.completion import Completion
from mage_async.config.schema import Config, Supervision
from mage_async.errors import RunError
from mage_services.engines.sglang.engine import SglangEngine
from tests.helpers.completions import policy_per_token
from tests.sglang.served import Policies, Served, prompt, rules, word_of, words

pytestmark = pytest.mark.timeout(600)
CLOSE, FAR = 1e-4, 1e-2


@pytest.fixture(scope="module")
def served(policies: Policies) -> Iterator[Served]:
    engine = Served(policies.directory, rules(in_flight="interrupt"))
    yield engine
    engine.close()


async def interrupted(served: Served, policies: Policies, *, refresh_kv: bool) -> Completion:
    """A turn of 200 tokens into which new weights come."""
    asked = prompt(f"crossing {refresh_kv}", words(11, 40), 200, refresh_kv=refresh_kv)
    turn = asyncio.ensure_future(served.engine.complete(asked))
    await served.engine.complete(prompt(f"clock {refresh_kv}", words(12, 20), 12))
    served.version += 1
    await served.engine.load(served.version, policies.file(served.version))
    return await turn


def test_an_interrupted_turn_goes_on_as_if_its_new_weights_had_read_all_of_it(
    served: Served, policies: Policies
) -> None:
    old = served.publish(policies.file)
    done = served.run(interrupted(served, policies, refresh_kv=True))
    first, second = done.versions
    assert (first.policy, first.kv, first.provenance) == (old, old, "exact")
    assert (second.policy, second.kv, second.provenance) == (old + 1, old + 1, "exact")
    assert 0 < second.start < len(done.tokens) == 200
    asked = prompt("", words(11, 40))
    assert policies.gap(old, asked, done)[: second.start].max() <= CLOSE
    assert policies.gap(old + 1, asked, done)[second.start :].max() <= CLOSE
    assert done.num_repeated == 40 + second.start - 1


def test_an_interrupted_turn_that_may_keep_its_keys_keeps_them(
    served: Served, policies: Policies
) -> None:
    old = served.publish(policies.file)
    done = served.run(interrupted(served, policies, refresh_kv=False))
    _, second = done.versions
    assert (second.policy, second.kv) == (old + 1, old)
    asked = prompt("", words(11, 40))
    assert policies.gap(old + 1, asked, done)[second.start :].max() > FAR
    assert done.num_repeated <= 1


def test_50_publications_interrupt_16_players_and_lose_nothing(
    served: Served, policies: Policies
) -> None:
    served.publish(policies.speller)
    completions: list[Completion] = []
    stalls: list[float] = []
    is_over = asyncio.Event()

    async def play(number: int) -> None:
        turn = 0
        while not is_over.is_set():
            asked = prompt(f"player {number}, {turn}", words(number, 30), 40, refresh_kv=True)
            done = await served.engine.complete(asked)
            assert len(done.tokens) == 40
            completions.append(done)
            turn += 1

    async def publish() -> None:
        for _ in range(50):
            served.version += 1
            before = served.engine.statistics().stall_s
            await served.engine.load(served.version, policies.speller(served.version))
            stalls.append(served.engine.statistics().stall_s - before)
            await served.engine.complete(prompt(f"after {served.version}", words(0, 5), 2))
        is_over.set()

    async def main() -> None:
        async with asyncio.timeout(400), asyncio.TaskGroup() as tasks:
            for number in range(16):
                tasks.create_task(play(number))
            tasks.create_task(publish())

    served.run(main())
    for done in completions:
        versions = policy_per_token(done.versions, 40)
        assert done.tokens.tolist() == [word_of(int(version)) for version in versions]
        assert all(run.kv == run.policy for run in done.versions)
    assert sorted(stalls)[25] < 0.9, "SGLang's own way to abort sleeps for a second"


@pytest.mark.parametrize("victim", ["the engine's process", "its scheduler"])
def test_turns_are_played_again_with_the_newest_weights_when_the_engine_dies(
    served: Served, policies: Policies, victim: str
) -> None:
    version = served.publish(policies.file)
    pid = served.engine.pid
    assert pid is not None
    family = psutil.Process(pid).children(recursive=True)
    asked = [prompt(f"{victim} {n}", words(n, 30), 150) for n in range(4)]

    async def main() -> list[Completion]:
        turns = [asyncio.ensure_future(served.engine.complete(each)) for each in asked]
        await served.engine.complete(prompt(f"{victim}, clock", words(12, 20), 12))
        os.kill(pid if victim == "the engine's process" else _scheduler(family).pid, signal.SIGKILL)
        return await asyncio.gather(*turns)

    completions = served.run(main())
    for one, done in zip(asked, completions, strict=True):
        assert len(done.tokens) == 150
        assert {(run.policy, run.kv) for run in done.versions} == {(version, version)}
        assert policies.gap(version, one, done).max() <= CLOSE
    assert served.engine.pid != pid
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []


def _scheduler(family: list[psutil.Process]) -> psutil.Process:
    """SGLang names its processes; where it cannot, the scheduler is the one that computed most."""
    return max(family, key=lambda one: sum(one.cpu_times()[:2]))


HOST = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from mage_async.config.schema import Config, Supervision
from tests.sglang.served import rules
from mage_services.engines.sglang.engine import SglangEngine

async def main():
    supervision = Supervision(max_restarts=0, silence_s=60.0)
    engine = SglangEngine(Path({directory!r}), Config(engine=rules(), supervision=supervision))
    async with engine:
        while engine.pid is None:
            await asyncio.sleep(0.05)
        print(engine.pid, flush=True)
        await engine.describe()

asyncio.run(main())
"""


def test_no_process_of_an_engine_outlives_the_actor(policies: Policies) -> None:
    """Killed while SGLang starts, before its processes ask to die with their parents."""
    source = HOST.format(tests=os.path.dirname(__file__), directory=str(policies.directory))
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        engine = psutil.Process(int(host.stdout.readline()))
        due = time.monotonic() + 120
        while len(family := engine.children(recursive=True)) < 2 and time.monotonic() < due:
            time.sleep(0.1)  # the engine's process imports for ten seconds and more
        assert len(family) >= 2
        host.kill()
    _, alive = psutil.wait_procs([engine, *family], timeout=60)
    assert alive == []


def test_an_engine_that_cannot_start_says_why(policies: Policies) -> None:
    async def main() -> None:
        supervision = Supervision(max_restarts=3, silence_s=60.0)
        config = Config(engine=rules(server={"page_sise": 1}), supervision=supervision)
        engine = SglangEngine(policies.directory, config)
        async with engine:
            await engine.complete(prompt("a", np.arange(5, 9)))

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert caught.group_contains(RunError, match="this SGLang has no argument `page_sise`")
