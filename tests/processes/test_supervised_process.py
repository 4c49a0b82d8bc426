"""A child as the supervisor sees it: real processes, each of a few lines."""

import asyncio
import os
import select
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from mage_async.errors import ConfigError
from mage_services.processes import child_process, supervised_process
from mage_services.processes.process import EXIT_BUG, EXIT_FAILED
from mage_services.processes.supervised_process import NOTICE_S, ProcessSpec, SupervisedProcess

PATIENCE_S = 60.0
"""For a loaded machine; nothing here takes a second on an idle one."""
HEALTHY_S = 20.0

IMPORTS = """
import asyncio, os, signal, subprocess, sys, time
from mage_async.errors import RunError
from mage_services.processes.process import run_process

"""


class Site:
    """Where a test's children are written and started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.children: list[SupervisedProcess] = []

    async def start(self, body: str, name: str = "actor-0") -> SupervisedProcess:
        """A child whose `main(status)` has this body."""
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        main = f"async def main(status):\n    status.send('ready', pid=os.getpid())\n{lines}"
        return await self.start_raw(f"{IMPORTS}{main}\nrun_process(main)\n", name)

    async def start_raw(
        self, program: str, name: str = "actor-0", devices: tuple[int, ...] = ()
    ) -> SupervisedProcess:
        module = f"child_{len(self.children)}"
        (self.directory / f"{module}.py").write_text(program)
        path = os.pathsep.join([str(self.directory), *sys.path])
        log, variables = self.directory / f"{name}.log", {"PYTHONPATH": path}
        arguments = ("an argument",)
        spec = ProcessSpec(name, module, arguments, log, 1, devices, variables=variables)
        child = await SupervisedProcess.start(spec)
        self.children.append(child)
        return child


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[Site], Awaitable[None]]], None]:
    """Run a test as the supervisor's main is run, and end whatever it started."""

    def begin(main: Callable[[Site], Awaitable[None]]) -> None:
        async def whole() -> None:
            site = Site(tmp_path)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await main(site)
            finally:
                for child in site.children:
                    child.kill()
                    await child.wait()

        uvloop.run(whole())

    return begin


Run = Callable[[Callable[[Site], Awaitable[None]]], None]


async def life(
    child: SupervisedProcess, silence_s: float = HEALTHY_S
) -> tuple[list[dict[str, Any]], int]:
    """All that a child says but its heartbeats and its end, and its exit code."""
    events = [event async for event in child.events(silence_s)]
    heard = [event for event in events if event["event"] not in ("beat", "finished")]
    return heard, await child.wait()


async def first_word(child: SupervisedProcess) -> dict[str, Any]:
    return await anext(child.events(HEALTHY_S))


def ends(pid: int) -> Callable[[], bool]:
    """A check, made while a process lives, that waits until it has ended."""
    descriptor = os.pidfd_open(pid)

    def wait() -> bool:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        ended = bool(poll.poll(PATIENCE_S * 1000))
        os.close(descriptor)
        return ended

    return wait


def test_a_child_is_heard_until_it_ends(run: Run) -> None:
    async def main(site: Site) -> None:
        child = await site.start("status.send('said', argument=sys.argv[1])")
        events, code = await life(child)
        assert [event["event"] for event in events] == ["ready", "said"]
        assert events[1]["argument"] == "an argument"
        assert code == 0

    run(main)


def test_each_status_line_says_when_it_came(run: Run) -> None:
    async def main(site: Site) -> None:
        began = asyncio.get_running_loop().time()
        events, _ = await life(await site.start("pass"))
        assert began <= events[0]["at"] <= asyncio.get_running_loop().time()

    run(main)


def test_the_failure_line_is_one_line_with_the_reason(run: Run) -> None:
    async def main(site: Site) -> None:
        child = await site.start("raise RunError('the disk is full')", "learner")
        _, code = await life(child)
        assert code == EXIT_FAILED
        assert child.failure_line(code) == "learner ended with exit code 2: the disk is full"

    run(main)


def test_the_failure_line_of_one_that_gave_no_reason_is_its_logs_last_line(run: Run) -> None:
    async def main(site: Site) -> None:
        child = await site.start_raw("print('first')\nraise SystemExit('no such module')\n")
        _, code = await life(child)
        assert child.failure_line(code) == "actor-0 ended with exit code 1: no such module"

    run(main)


def test_the_failure_line_of_one_that_said_nothing_points_to_its_log(run: Run) -> None:
    async def main(site: Site) -> None:
        child = await site.start_raw("import os; os._exit(7)")
        _, code = await life(child)
        assert child.failure_line(code) == f"actor-0 ended with exit code 7; see {child.spec.log}"

    run(main)


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_failure_line_of_one_that_left_is_not_its_logs_last_line(run: Run, code: int) -> None:
    async def main(site: Site) -> None:
        child = await site.start(f"print('a move')\nos._exit({code})")
        assert (await life(child))[1] == code
        line = child.failure_line(code)
        reason = "without an exception, and the run did not end it"
        assert line.startswith(f"actor-0 ended with exit code {code} {reason}")

    run(main)


def test_a_killed_childs_failure_line_names_the_signal(run: Run) -> None:
    async def main(site: Site) -> None:
        child = await site.start("os.kill(os.getpid(), signal.SIGKILL)")
        _, code = await life(child)
        assert child.failure_line(code).startswith("actor-0 was killed by SIGKILL")

    run(main)


def test_the_failure_line_of_a_crash_names_the_place_in_foreign_code(run: Run) -> None:
    async def main(site: Site) -> None:
        child = await site.start("import ctypes\nctypes.string_at(0)")
        _, code = await life(child)
        failure_line = child.failure_line(code)
        assert failure_line.startswith("actor-0 was killed by SIGSEGV: it was at ")
        assert failure_line.endswith("child_0.py, line 9, in main")

    run(main)


def test_a_child_that_closes_its_channel_is_killed_and_says_so(run: Run) -> None:
    async def main(site: Site) -> None:
        # The channel keeps the number that it has here, where many descriptors may be open.
        child = await site.start("os.closerange(3, 65536)\nwhile True: time.sleep(1)")
        _, code = await life(child, silence_s=0.2)
        assert "may close descriptors that it did not open" in child.failure_line(code)

    run(main)


def test_what_a_killed_child_left_of_a_message_is_not_an_event(run: Run) -> None:
    async def main(site: Site) -> None:
        body = "status.channel._socket.send(b'\\x09\\0\\0\\0\\x81\\xa5')\nos._exit(9)"
        events, code = await life(await site.start(body))
        assert [event["event"] for event in events] == ["ready"]
        assert code == 9

    run(main)


def test_a_silent_child_is_killed_and_says_so_in_its_failure_line(run: Run) -> None:
    async def main(site: Site) -> None:
        child = await site.start("time.sleep(3600)")  # blocks its loop, and so its heartbeat
        events, code = await life(child, silence_s=0.2)
        assert [event["event"] for event in events] == ["ready"]
        failure_line = child.failure_line(code)
        assert failure_line.startswith(
            "actor-0 sent no heartbeat for too long and was killed: it was at "
        )
        assert failure_line.endswith("child_0.py, line 8, in main")

    run(main)


def test_a_silent_child_is_noted_long_before_it_is_killed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert NOTICE_S < HEALTHY_S / 2
    # More than the second between two heartbeats, so that one is due once the child goes on.
    monkeypatch.setattr(supervised_process, "NOTICE_S", 1.5)

    async def main(site: Site) -> None:
        child = await site.start(
            "os.kill(os.getpid(), signal.SIGSTOP)\nawait asyncio.Event().wait()"
        )
        events = child.events(HEALTHY_S)
        assert (await anext(events))["event"] == "ready"
        began = asyncio.get_running_loop().time()
        note = await anext(events)
        assert note["text"] == (
            "silent for 1.5 s; after supervision.silence_s = 20 s it is killed, and "
            "started again if supervision.max_restarts allows it"
        )
        assert note["at"] - began < HEALTHY_S  # 1.5 s where a machine does nothing else
        os.kill(child.pid, signal.SIGCONT)
        assert (await anext(events))["event"] == "beat"
        assert not child.was_silent

    run(main)


def test_a_child_that_stays_silent_in_foreign_code_is_said_where_it_is(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised_process, "NOTICE_S", 0.5)

    async def main(site: Site) -> None:
        child = await site.start("time.sleep(3600)")
        events = child.events(HEALTHY_S)
        texts = [(await anext(events)).get("text", "") for _ in range(3)]
        assert texts[1].startswith("silent for 0.5 s; ")
        assert texts[2].startswith("still silent: it is at ")
        assert "child_0.py, line 8, in main" in texts[2]
        child.kill()

    run(main)


def test_a_silent_child_whose_log_was_deleted_is_noted_and_killed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised_process, "NOTICE_S", 0.2)

    async def main(site: Site) -> None:
        child = await site.start("time.sleep(3600)")
        child.spec.log.unlink()
        events, code = await life(child, silence_s=1.0)
        assert events[1]["text"].startswith("silent for 0.2 s; ")
        assert child.failure_line(code) == (
            f"actor-0 sent no heartbeat for too long and was killed; see {child.spec.log}"
        )

    run(main)


def test_a_child_is_not_silent_while_it_is_the_supervisor_that_does_not_run(run: Run) -> None:
    async def main(site: Site) -> None:
        child = await site.start("await asyncio.Event().wait()")
        events = child.events(2.0)
        assert (await anext(events))["event"] == "ready"
        stopped = f"grep -q '^State:.T' /proc/{os.getpid()}/status"
        wake = await asyncio.create_subprocess_shell(
            f"until {stopped}; do sleep 0.1; done; sleep 4; kill -CONT {os.getpid()}"
        )
        os.kill(os.getpid(), signal.SIGSTOP)
        assert (await anext(events))["event"] == "beat"
        assert not child.was_silent
        assert await wake.wait() == 0

    run(main)


def test_a_child_without_a_processor_is_not_silent(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with nothing else to do cannot starve a child, so the system's figure is made up:
    of the second in which the child says nothing, it was ready to run in all but a twentieth.
    """

    async def main(site: Site) -> None:
        child = await site.start("time.sleep(1)\nawait asyncio.Event().wait()")
        clock = asyncio.get_running_loop().time
        monkeypatch.setattr(SupervisedProcess, "starved_s", lambda child: 0.95 * clock())
        events = child.events(0.25)
        assert (await anext(events))["event"] == "ready"
        assert (await anext(events))["event"] == "beat"
        assert not child.was_silent

    run(main)


def test_no_note_is_given_on_a_child_that_waits_for_a_processor(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised_process, "NOTICE_S", 0.25)

    async def main(site: Site) -> None:
        child = await site.start("time.sleep(1)\nawait asyncio.Event().wait()")
        clock = asyncio.get_running_loop().time
        monkeypatch.setattr(SupervisedProcess, "starved_s", lambda child: 0.99 * clock())
        events = child.events(HEALTHY_S)
        assert [(await anext(events))["event"] for _ in range(2)] == ["ready", "beat"]

    run(main)


def test_a_child_is_not_silent_for_the_time_that_it_had_waited_before_its_figure_was_gone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised_process, "NOTICE_S", 0.25)

    async def main(site: Site) -> None:
        child = await site.start("time.sleep(1)\nawait asyncio.Event().wait()")
        clock, events = asyncio.get_running_loop().time, child.events(HEALTHY_S)
        assert (await anext(events))["event"] == "ready"
        gone = clock() + 0.5
        monkeypatch.setattr(
            SupervisedProcess, "starved_s", lambda child: 1000.0 if clock() < gone else 0.0
        )
        heard = ""
        while heard != "beat":
            heard = (await anext(events))["event"]
        assert not child.was_silent

    run(main)


def test_no_note_is_given_before_the_first_event_whatever_silence_is_allowed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised_process, "NOTICE_S", 0.2)
    monkeypatch.setattr(supervised_process, "FIRST_EVENT_S", HEALTHY_S)

    async def main(site: Site) -> None:
        program = f"{IMPORTS}time.sleep(1)\nasync def main(status): status.send('ready')\n"
        child = await site.start_raw(program + "run_process(main)\n")
        assert (await first_word(child))["event"] == "ready"

    run(main)


def test_how_long_a_child_waited_for_a_processor_is_read_from_the_system(run: Run) -> None:
    async def main(site: Site) -> None:
        body = (
            "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
            "subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
            "end = time.process_time() + 0.3\n"
            "while time.process_time() < end: pass\n"
            "status.send('ran')\nawait asyncio.Event().wait()"
        )
        child = await site.start(body)
        events = child.events(HEALTHY_S)
        before = 0.0
        async for event in events:
            before = child.starved_s() if event["event"] == "ready" else before
            if event["event"] == "ran":
                break
        assert child.starved_s() - before > 0.05

    run(main)


def test_a_child_that_only_beats_is_not_silent(run: Run) -> None:
    async def main(site: Site) -> None:
        child = await site.start("await asyncio.Event().wait()")
        said = [event["event"] async for event in _first(child.events(5.0), 2)]
        assert said == ["ready", "beat"]
        assert not child.was_silent

    run(main)


async def _first(events: Any, count: int) -> Any:
    for _ in range(count):
        yield await anext(events)


def test_what_a_child_started_is_killed_with_it(run: Run) -> None:
    async def main(site: Site) -> None:
        body = """
grandchild = subprocess.Popen(["sleep", "3600"])
status.send("started", pid=grandchild.pid)
await asyncio.Event().wait()
"""
        child = await site.start(body)
        events = child.events(HEALTHY_S)
        await anext(events)
        grandchild_ends = ends((await anext(events))["pid"])
        child.kill()
        await child.wait()
        assert grandchild_ends()

    run(main)


def test_what_a_child_started_is_killed_though_the_child_has_ended(run: Run) -> None:
    async def main(site: Site) -> None:
        body = """
grandchild = subprocess.Popen(["sleep", "3600"])
status.send("started", pid=grandchild.pid)
"""
        child = await site.start(body)
        events = child.events(HEALTHY_S)
        await anext(events)
        grandchild_ends = ends((await anext(events))["pid"])
        assert await child.wait() == 0
        child.kill()
        assert grandchild_ends()

    run(main)


def test_a_forked_child_in_a_session_of_its_own_does_not_delay_the_end(run: Run) -> None:
    async def main(site: Site) -> None:
        body = """
if (pid := os.fork()) == 0:
    os.setsid()
    time.sleep(3600)
status.send("forked", pid=pid)
"""
        child = await site.start(body)
        heard, code = await life(child, silence_s=PATIENCE_S)
        os.kill(heard[-1]["pid"], signal.SIGKILL)
        assert (code, child.was_silent) == (0, False)

    run(main)


def test_a_child_lives_in_a_process_group_of_its_own(run: Run) -> None:
    async def main(site: Site) -> None:
        child = await site.start("await asyncio.Event().wait()")
        pid = (await first_word(child))["pid"]
        assert os.getpgid(pid) == pid != os.getpgrp()
        assert os.getsid(pid) == pid

    run(main)


def test_signalling_a_child_that_has_ended_is_no_error(run: Run) -> None:
    async def main(site: Site) -> None:
        child = await site.start("pass")
        await life(child)
        child.terminate()
        child.kill()

    run(main)


def test_the_log_keeps_what_every_life_printed(run: Run) -> None:
    async def main(site: Site) -> None:
        for word in ("first", "second"):
            child = await site.start(f"print({word!r})")
            await life(child)
        assert child.spec.log.read_text() == "first\nsecond\n"

    run(main)


@pytest.mark.parametrize("kind", ["asyncio.CancelledError", "PanicException"])
def test_what_is_raised_beside_exceptions_is_named_in_the_failure_line(run: Run, kind: str) -> None:
    async def main(site: Site) -> None:
        panic = "PanicException = type('PanicException', (BaseException,), {})"
        child = await site.start(f"{panic}\nstatus.send('said')\nraise {kind}('no such index')")
        assert (await life(child))[1] == EXIT_BUG
        named = f"{kind.rpartition('.')[2]}: no such index"
        assert child.failure_line(EXIT_BUG) == f"actor-0 ended with exit code 1: {named}"

    run(main)


def test_a_log_that_is_too_long_is_cut_and_says_so_and_one_note_does_too(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "MAX_LOG_BYTES", 60_000)
    monkeypatch.setattr(child_process, "LOG_BYTES", 1000)
    flood = """for word in ("first", "second"):
    print("x" * 70_000 + word, flush=True)
    status.send("said")
    while os.stat(1).st_size > 60_000:
        await asyncio.sleep(0.01)
print("last")"""

    async def main(site: Site) -> None:
        child = await site.start(flood)
        events, code = await life(child)
        assert (code, [event["event"] for event in events].count("note")) == (0, 1)
        notice, kept, last = child.spec.log.read_text().splitlines()
        assert "longer than" in notice
        assert (len(kept), kept[-7:], last) == (999, "xsecond", "last")

    run(main)


@pytest.mark.parametrize(
    ("visible", "devices", "seen"),
    [
        (None, (), None),
        (None, (2, 0), "2,0"),
        ("4,5, 6,7", (), "4,5, 6,7"),
        ("4,5, 6,7", (2, 0), "6,4"),
        ("GPU-8f, MIG-1", (1,), "MIG-1"),
    ],
)
def test_a_child_sees_its_gpus_among_those_that_its_parent_sees(
    run: Run, monkeypatch: pytest.MonkeyPatch, visible: str | None, devices, seen: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    async def main(site: Site) -> None:
        program = "import os\nprint(os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
        child = await site.start_raw(program, devices=devices)
        await life(child)
        assert child.spec.log.read_text() == f"{seen}\n"

    run(main)


@pytest.mark.parametrize("visible", ["", "4", "4,5"])
def test_a_gpu_that_the_parent_does_not_see_is_refused_by_the_name_of_the_key(
    run: Run, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    async def main(site: Site) -> None:
        with pytest.raises(ConfigError, match=r"engine\.devices names GPU 2, and CUDA_VISIBLE"):
            await site.start_raw("", devices=(0, 2))

    run(main)
