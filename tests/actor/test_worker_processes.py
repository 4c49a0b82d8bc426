"""A user's class in worker processes: what fails there, and what dies there, costs its group alone.

`begin` is as in `test_slow_environment.py`: a bad task makes trouble in its second turn.
"""

import asyncio
import math
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mage_async.config.schema import Environment as EnvironmentConfig
from mage_async.environments.catalogue import load
from mage_async.environments.user_calls import Request
from mage_async.environments.user_class import ResetStep
from mage_async.errors import CallFault
from mage_async.protocol.messages import GroupDrop, Message, TrialResult
from mage_async.trajectory import Task
from mage_services.environments import worker_pool
from mage_services.environments.call_runner import CallRunner
from mage_services.environments.worker_pool import MODULE, Make, Ready
from mage_services.processes.child_process import ChildProcess, end_in_words, module_command
from tests.helpers.actor_site import Run, Site, grant

OWN = '''
import asyncio, ctypes, itertools, math, os, pathlib, signal, threading, time

pathlib.Path(__file__).with_name(f"pid-{{os.getpid()}}").touch()


COUNT, BARRIER = itertools.count(), threading.Barrier(4)


class Own:
    """Rules."""

    def members(self, split):
        return ("good", "bad") if split == "train" else ("first", "second")

    def reset(self, seed, task):
        self.is_bad, self.turns = task == "bad", 0
        return "rock"

    {define} step(self, action):
        self.turns += 1
        if self.is_bad and self.turns == 2:
            {trouble}
        return "paper", 1.0, self.turns == 4, False, {{"turns": self.turns, "of": object()}}

    {define} close(self):
        if getattr(self, "is_closed", False):
            pathlib.Path(__file__).with_name("closed-twice").touch()
        self.is_closed = True
'''
Begin = Callable[..., None]


@pytest.fixture
def begin(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Run a test beside an actor with worker processes."""

    def begun(main: Callable[[Site], object], trouble: str, kind: str = "", **given: float) -> None:
        source = OWN.format(trouble=trouble, define=f"{kind} def".strip())
        monkeypatch.delitem(sys.modules, "perilous", raising=False)
        (tmp_path / "perilous.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
        run(main, environment="perilous:Own", **{"num_processes": 1} | given)
        assert not (tmp_path / "closed-twice").exists()

    return begun


def sorted_out(heard: list[Message]) -> tuple[list[str], set[int]]:
    """The reasons of what was dropped, and the grants whose trials came."""
    reasons = [message.reason for message in heard if isinstance(message, GroupDrop)]
    return reasons, {message.grant for message in heard if isinstance(message, TrialResult)}


@pytest.mark.parametrize(
    ("trouble", "kind", "sentence"),
    [
        ("1 / 0", "", "raised ZeroDivisionError: division by zero"),
        ("return 'on', math.nan, False", "async", "must return a finite reward, got nan"),
        ("return 'x' * 10_000_000, 0.0, False", "", "of text: at most 100,000 fit"),
        ("threading.Event().wait()", "", "longer than environment.step_deadline_s = 1"),
        ("await asyncio.Event().wait()", "async", "longer than environment.step_deadline_s = 1"),
    ],
)
def test_a_call_that_fails_in_a_process_costs_its_group_and_names_the_turn(
    begin: Begin, trouble: str, kind: str, sentence: str
) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, member="bad", environment="own"), grant(1, member="good"))
        reasons, played = sorted_out([await site.hear() for _ in range(3)])
        (reason,) = reasons
        assert reason.startswith("own, task bad, seed 5, episode 1, turn 2: step('")
        said, frame, _ = reason.partition(" (/")
        assert said.endswith(sentence)
        assert bool(frame) == ("deadline" not in sentence)
        assert played == {1}

    begin(main, trouble, kind, step_deadline_s=1.0 if "deadline" in sentence else math.inf)


@pytest.mark.parametrize(
    ("trouble", "end"),
    [
        ("os._exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("ctypes.string_at(0)", "was killed by SIGSEGV"),
        (
            "[os.write(fd, b'\\xff\\xff\\xff\\xff') for fd in range(3, 99)"
            " if 'socket:' in os.path.realpath(f'/proc/self/fd/{fd}')]",
            "sent a message that cannot be read, and was killed: a frame of 4294967295 bytes is "
            "too long: at most 67108864",
        ),
    ],
)
def test_an_environment_that_dies_with_its_process_costs_its_group_and_not_the_actor(
    begin: Begin, tmp_path: Path, trouble: str, end: str
) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, member="good"))
        await site.results(2)
        site.say(grant(1, member="bad", num_trials=1))
        (reason,), _ = sorted_out([await site.hear()])
        assert reason.startswith("own, task bad, seed 5, episode 1, turn 2: step('")
        assert reason.endswith(f": the worker process of the episode {end}")
        site.say(grant(2, member="good"))  # a new process plays it
        assert {result.grant for result in await site.results(2)} == {2}

    begin(main, trouble)
    assert len(list(tmp_path.glob("pid-*"))) == 3  # this process, and two worker processes


def test_a_class_that_prints_on_a_full_disk_is_played_to_the_end(begin: Begin) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, member="bad", num_trials=1))
        (result,) = await site.results(1)
        assert (result.trial.num_played(), result.trial.num_retries) == (3, 0)

    begin(main, "os.dup2(os.open('/dev/full', os.O_WRONLY), 1); print('lost', flush=True)")


def test_a_process_that_dies_takes_no_other_process_along(begin: Begin) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, member="bad", num_trials=1), grant(1, member="good", num_trials=1))
        reasons, played = sorted_out([await site.hear() for _ in range(2)])
        assert len(reasons) == 1
        assert played == {1}

    begin(main, "os._exit(3)", num_processes=2)


def test_a_process_that_lets_nothing_else_run_is_killed_and_replaced(begin: Begin) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, member="bad", num_trials=1))
        (reason,), _ = sorted_out([await site.hear()])
        assert reason.endswith("took longer than environment.step_deadline_s = 0.5")
        message, number = None, 0
        while not isinstance(message, TrialResult):  # until the process is known to be stuck
            number += 1
            site.say(grant(number, member="good", num_trials=1))
            message = await site.hear()
        assert message.grant == number

    begin(main, "ctypes.PyDLL(None).sleep(60)", step_deadline_s=0.5)  # holds the interpreter


def test_what_a_class_says_crosses_as_plain_data(begin: Begin) -> None:
    async def main(site: Site) -> None:
        site.say(grant(0, member="good"))
        for result in await site.results(2):
            first, second, *_ = result.trial.turns
            assert first.info == '{"turns":1,"of":"<object>"}'
            assert second.reward == 1.0

    begin(main, "pass")


def test_steps_that_wait_in_one_process_wait_together(begin: Begin) -> None:
    async def main(site: Site) -> None:
        site.say(*(grant(number, member="bad") for number in range(8)))
        assert len(await site.results(16)) == 16

    begin(main, "next(COUNT) < 4 and BARRIER.wait(60)")  # four are there at once, or it raises


def test_a_call_after_one_cancelled_during_the_start_waits_until_the_process_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        f"import runpy, time\ntime.sleep(1)\nrunpy.run_module({MODULE!r}, run_name='__main__')"
    )
    (tmp_path / "slow_to_start.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(worker_pool, "MODULE", "slow_to_start")

    async def main() -> None:
        slot = worker_pool._Slot()
        first = asyncio.create_task(slot.running("the first call"))
        while slot.process is None:  # noqa: ASYNC110 - the start has no event of its own
            await asyncio.sleep(0.01)
        first.cancel()
        process = await slot.running("the next call")
        assert process is slot.process
        assert process.is_ready.is_set()
        assert not process.end
        await process.close()

    asyncio.run(main())


def test_a_process_that_meets_an_error_no_call_may_raise_ends(capfd) -> None:
    """Here the environment is none of a user's: its actor would never ask for it."""

    async def main() -> str:
        process: ChildProcess[worker_pool.Message] = await ChildProcess.start(
            module_command(MODULE), worker_pool.Message
        )
        request = Request("reset", "somewhere")
        make = Make(number=1, episode=1, name="rps", options={}, request=request)
        process.send(make)
        async for message in process.channel.messages():
            assert isinstance(message, Ready)
        return end_in_words(await process.wait())

    assert asyncio.run(main()) == "ended with exit code 1"
    assert "AssertionError" in capfd.readouterr().err


CLOSING = '''
import ctypes


class Own:
    """Rules."""

    async def reset(self, seed, task):
        self.is_bad = task == "bad"
        return "rock"

    def step(self, action):
        return "paper", 1.0, True

    def members(self, split):
        return ("good", "bad") if split == "train" else ("first", "second")

    async def close(self):
        if self.is_bad:
            {trouble}
'''


@pytest.mark.parametrize(
    "trouble",
    [
        "ctypes.PyDLL(None).sleep(60)",  # blocks the whole process: it holds the interpreter
        "ctypes.CDLL(None).sleep(60)",  # blocks the event loop of the coroutines alone
    ],
)
def test_a_close_that_blocks_does_not_block_later_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.delitem(sys.modules, "closing", raising=False)
    (tmp_path / "closing.py").write_text(CLOSING.format(trouble=trouble))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    environment = load("closing:Own")
    assert isinstance(environment, ResetStep)

    async def main() -> None:
        async with CallRunner(EnvironmentConfig(step_deadline_s=1.0, workers=1)) as calls:
            bad = environment.begin(Task("own", "bad", 0), 0)
            reset, closing = bad.next_call(), bad.closing()
            assert reset is not None
            assert closing is not None
            await calls.perform(reset)
            with pytest.raises(CallFault, match=r"took longer than environment\.step_deadline_s"):
                await calls.perform(closing)
            for _ in range(2):  # the first call may come before what is stuck is noticed
                await asyncio.wait(calls._background)
                good = environment.begin(Task("own", "good", 0), 0).next_call()
                assert good is not None
                with suppress(CallFault):
                    await calls.perform(good)
                    return
            pytest.fail("no call is answered")

    asyncio.run(main())


def test_a_class_that_was_edited_before_its_process_is_started_again_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = CLOSING.format(trouble="pass").replace('"rock"', "ctypes.string_at(0)")
    (tmp_path / "dying.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    environment, notes = load("dying:Own"), list[str]()
    assert isinstance(environment, ResetStep)

    async def main() -> None:
        async with CallRunner(EnvironmentConfig(workers=1), notes.append) as calls:
            for number in range(3):
                if number == 2:
                    (tmp_path / "dying.py").write_text(f"{source}\n")
                reset = environment.begin(Task("own", "good", 0), 0).next_call()
                assert reset is not None
                with pytest.raises(CallFault, match="was killed by SIGSEGV"):
                    await calls.perform(reset)

    asyncio.run(main())
    (note,) = notes
    assert note.startswith("dying:Own was edited since the last start of this run")


def test_a_process_that_the_system_does_not_start_is_a_fault_of_the_call() -> None:
    async def main() -> None:
        free = os.dup(0)
        os.close(free)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(CallFault) as fault:
                await worker_pool._Slot().running("own:Class")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert str(fault.value) == (
            "own:Class: a worker process could not be started: [Errno 24] Too many open files"
        )

    asyncio.run(main())
