"""A child process, run for real: how it speaks, fails and ends."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mage_services.processes import process
from mage_services.processes.child_process import CHANNEL_FD, BlockingChannel
from mage_services.processes.process import (
    EXIT_BUG,
    EXIT_DETERMINISTIC,
    EXIT_FAILED,
    EXIT_TERMINATED,
    Status,
    ticks,
    unless_a_call_hangs,
)
from tests.processes.made_up_time import MadeUpTime, run

PATIENCE_S = 60.0
"""For a loaded machine; nothing here takes a second on an idle one."""

BODY = """
import asyncio, os, signal
from mage_async.errors import PolicyError, RunError
from mage_services.processes.process import run_process

async def main(status):
    status.send("ready", pid=os.getpid())
    {body}

run_process(main)
"""


@dataclass
class Running:
    """A child under test, and our end of its channel."""

    process: subprocess.Popen[str]
    channel: BlockingChannel[dict[str, Any]]

    def event(self) -> dict[str, Any]:
        """The next status event that is no heartbeat; empty at the end."""
        for event in self.channel.messages():
            if event["event"] != "beat":
                return event
        return {}

    def end(self) -> tuple[int, str]:
        """Its exit code and what it printed."""
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Running] = []

    def begin(body: str, **environment: str) -> Running:
        file = tmp_path / f"child_{len(started)}.py"
        file.write_text(BODY.format(body=body))
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(
            [sys.executable, str(file)],
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(theirs.fileno(),),
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(sys.path), CHANNEL_FD: str(theirs.fileno())}
            | environment,
        )
        theirs.close()
        started.append(Running(process, BlockingChannel(ours, dict[str, Any])))
        return started[-1]

    yield begin
    for child in started:
        child.process.kill()
        child.process.communicate()
        child.channel.close()


def test_a_process_that_ends_well_says_so_by_an_event_and_its_exit_code(start: Start) -> None:
    child = start("pass")
    assert child.event()["event"] == "ready"
    assert child.event() == {"event": "finished"}
    assert child.event() == {}
    assert child.end() == (0, "")


def test_a_text_that_is_not_utf_8_is_sent_and_keeps_the_exit_code(start: Start) -> None:
    child = start("status.send('note', text='caf\\udce9'); raise PolicyError('no caf\\udce9')")
    assert child.event()["event"] == "ready"
    assert child.event() == {"event": "note", "text": "caf?"}
    assert child.event() == {"event": "failed", "reason": "no caf?"}
    assert child.end()[0] == EXIT_DETERMINISTIC


def test_what_is_printed_on_a_full_disk_is_lost_and_ends_nothing(start: Start) -> None:
    full = "import sys; [os.dup2(os.open('/dev/full', os.O_WRONLY), log) for log in (1, 2)]"
    child = start(
        f"{full}; print('one', flush=True); print('two', file=sys.stderr)", PYTHONUNBUFFERED="1"
    )
    assert child.event()["event"] == "ready"
    note = "its log cannot be written: No space left on device. It goes on without it"
    assert child.event() == {"event": "note", "text": note}
    assert child.event() == {"event": "finished"}
    assert child.end()[0] == 0


def test_a_thread_that_does_not_end_is_named_and_abandoned(start: Start) -> None:
    thread = "threading.Thread(target=time.sleep, args=(3600,), name='poller').start()"
    child = start(f"import threading, time; {thread}")
    assert child.event()["event"] == "ready"
    assert child.event() == {"event": "finished"}
    note = child.event()
    assert "threads do not end and are abandoned: 'poller' × 1. " in note["text"]
    assert "daemon=True" in note["text"]
    assert child.end() == (0, "")


def test_the_threads_of_executors_end_by_themselves(start: Start) -> None:
    child = start(
        "from concurrent.futures import ThreadPoolExecutor; "
        "global kept; kept = ThreadPoolExecutor(); kept.submit(os.getpid).result()"
    )
    assert [child.event()["event"], child.event()] == ["ready", {"event": "finished"}]
    assert child.event() == {}


def test_a_full_disk_is_told_with_what_to_do(start: Start) -> None:
    child = start("raise OSError(28, 'No space left on device', 'a file')")
    assert child.event()["event"] == "ready"
    reason = child.event()["reason"]
    assert reason.endswith("'a file'; make room on the disk, then go on with --resume")


def test_what_a_person_can_mend_is_one_line_and_no_traceback(start: Start) -> None:
    child = start("raise RunError('the disk is full')")
    child.event()
    assert child.event() == {"event": "failed", "reason": "the disk is full"}
    assert child.end() == (EXIT_FAILED, "the disk is full\n")


def test_a_deterministic_failure_is_told_by_its_exit_code(start: Start) -> None:
    child = start("raise PolicyError('there is no chat template')")
    child.event()
    assert child.event() == {"event": "failed", "reason": "there is no chat template"}
    assert child.end() == (EXIT_DETERMINISTIC, "there is no chat template\n")


def test_a_bug_is_one_line_on_the_pipe_and_a_traceback_in_the_log(start: Start) -> None:
    child = start("{}['spock']")
    child.event()
    assert child.event() == {"event": "failed", "reason": "KeyError: 'spock'"}
    code, log = child.end()
    assert code == EXIT_BUG
    assert "Traceback" in log
    assert log.endswith("KeyError: 'spock'\n")


def test_the_first_failure_of_nested_tasks_is_the_reason(start: Start) -> None:
    body = """
    async with asyncio.TaskGroup() as outer:
        async def inner():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(asyncio.Event().wait())
                raise RunError('the deepest')
        outer.create_task(inner())
    """
    child = start(body.strip())
    child.event()
    assert child.event()["reason"] == "the deepest"


def test_a_bug_beside_an_error_that_a_person_can_mend_leaves_the_error_as_the_reason(
    start: Start,
) -> None:
    body = """
    async def bug():
        {}['spock']
    async def refuse():
        raise PolicyError('mend the policy')
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bug())
        tasks.create_task(refuse())
    """
    child = start(body.strip())
    child.event()
    assert child.event() == {"event": "failed", "reason": "mend the policy"}
    assert child.event() == {}
    code, log = child.end()
    assert code == EXIT_DETERMINISTIC
    assert "KeyError: 'spock'" in log  # in a traceback, for whoever mends the bug
    assert "SystemExit" not in log


def test_sigterm_cancels_runs_the_clean_up_and_is_no_good_end(start: Start) -> None:
    body = """
    try:
        await asyncio.Event().wait()
    finally:
        status.send("cleaned up")
    """
    child = start(body.strip())
    child.event()
    child.process.terminate()
    assert child.event() == {"event": "cleaned up"}
    assert child.end() == (EXIT_TERMINATED, "")


def test_ctrl_c_is_left_to_the_supervisor(start: Start) -> None:
    child = start("os.kill(os.getpid(), signal.SIGINT); status.send('still here')")
    child.event()
    assert child.event() == {"event": "still here"}
    assert child.end()[0] == 0


def test_a_waiting_process_beats(start: Start) -> None:
    child = start("await asyncio.Event().wait()")
    assert child.event()["event"] == "ready"
    assert child.channel.receive() == {"event": "beat"}


def test_a_process_whose_parent_is_not_its_supervisor_ends_at_once(start: Start) -> None:
    child = start("pass", MAGE_PARENT="1")
    assert child.event() == {}
    assert child.end() == (EXIT_FAILED, "")


def test_a_process_started_by_hand_speaks_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHANNEL_FD, raising=False)
    Status().send("ready")


def test_a_supervisor_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setenv(CHANNEL_FD, str(theirs.detach()))
    status = Status()
    ours.close()
    status.send("ready")
    status.send("still no error")


def test_ticks_come_by_the_clock_and_not_after_the_work() -> None:
    loop = MadeUpTime()

    async def main() -> list[float]:
        times = []
        async for now in ticks(1.0):
            times.append(now)
            if len(times) == 1:
                loop.now += 3.5  # work in which three more are due
            if len(times) == 5:
                break
        return times

    assert run(main(), loop) == pytest.approx([1.0, 4.5, 5.5, 6.5, 7.5])


def test_a_cancelled_tick_leaves_no_timer_behind() -> None:
    async def main() -> None:
        async def wait() -> None:
            async for _ in ticks(3600.0):
                raise AssertionError

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        handles = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
        assert all(handle.cancelled() for handle in handles)

    asyncio.run(main())


def test_signals_are_numbered_as_shells_do() -> None:
    assert EXIT_TERMINATED == 128 + signal.SIGTERM == 143


def test_play_that_goes_on_says_so_also_if_a_script_never_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "LOOK_S", 0.01)
    may_end, said = threading.Event(), list[str]()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            may_end.set()

    assert unless_a_call_hangs(lambda: may_end.wait(PATIENCE_S), 60.0, say)
    assert {*said} == {"play without a model has gone on for 0 s; now: a script chooses an action"}


def test_a_signal_ends_the_work_even_if_its_report_fails() -> None:
    reported = []

    def fails() -> None:
        raise ZeroDivisionError

    async def main() -> int | None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
        loop.call_soon(os.kill, os.getpid(), signal.SIGTERM)
        waits = asyncio.sleep(PATIENCE_S)
        return await process.until_signalled(waits, signal.SIGTERM, on_signal=fails)

    assert asyncio.run(main()) == signal.SIGTERM
    assert [type(each) for each in reported] == [ZeroDivisionError]
