"""The protocol between a process and its children: frames, their bounds, and how children end."""

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop

from mage_async.errors import RunError, WireError
from mage_services.processes import child_process
from mage_services.processes.child_process import (
    BlockingChannel,
    BlockingChild,
    Channel,
    ChildProcess,
    dying_with_parent,
    end_in_words,
    ending_descendants,
    frame,
    last_line,
    members,
    waiting_notice,
)
from tests.helpers.supervised_runs import descriptors, living_after

PATIENCE_S = 60.0
STARTS = """
import subprocess, sys
from mage_services.processes.child_process import dying_with_parent
tells = "import os; print(os.getpid(), flush=True); os.read(0, 1)"
starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {tells!r}]); {tells}"
subprocess.run(dying_with_parent([sys.executable, "-c", starts]))
"""

ECHO = """
import os
from mage_services.processes.child_process import *
die_with_parent()
server = BlockingChannel(inherited_socket(), dict[str, int])
for message in server.messages():
    print("a user's class prints ± \\udcff", flush=True)
    os.system("echo so does what it starts")
    server.send(message | {"answer": 42})
"""


def command(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_child_answers_and_what_it_prints_goes_to_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")  # as a locale without UTF-8
    log = tmp_path / "log"

    async def main() -> None:
        child: ChildProcess[dict[str, int]] = await ChildProcess.start(
            command(ECHO), dict[str, int], log=log
        )
        child.send({"ask": 1})
        assert await child.receive() == {"ask": 1, "answer": 42}
        child.channel.close()
        assert await child.wait() == 0
        assert child.last_line() == "so does what it starts"

    uvloop.run(main())
    printed = "a user's class prints ± \\udcff\nso does what it starts\n"
    assert log.read_text(encoding="utf-8") == printed


def test_a_child_is_heard_by_a_thread() -> None:
    child = BlockingChild[dict[str, int]](command(ECHO), dict[str, int])
    child.channel.send({"ask": 2})
    assert child.channel.receive() == {"ask": 2, "answer": 42}
    child.kill()
    assert child.process.returncode == -9


def test_a_child_of_a_thread_is_killed_with_what_it_started() -> None:
    program = """
import subprocess
from mage_services.processes.child_process import *
began = subprocess.Popen(["sleep", "1000"], start_new_session=True)
BlockingChannel(inherited_socket(), dict[str, int]).send({"began": began.pid})
began.wait()
"""
    child = BlockingChild[dict[str, int]](command(program), dict[str, int])
    message = child.channel.receive()
    assert message is not None
    assert members(message["began"])
    child.kill()
    end = time.monotonic() + PATIENCE_S
    while members(message["began"]):
        assert time.monotonic() < end


def test_a_process_without_a_command_line_is_ended_too(capsys: pytest.CaptureFixture[str]) -> None:
    # A process that has just been started has none yet.
    with ending_descendants():
        nameless = subprocess.Popen(["", "1000"], executable=shutil.which("sleep"))
    assert nameless.wait() == -signal.SIGKILL
    assert f"killed: sleep ({nameless.pid})" in capsys.readouterr().err


def test_a_process_of_another_user_keeps_no_other_one_from_being_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = list[int]()

    def kill(pid: int, number: int) -> None:
        if pid == 1:
            raise PermissionError
        killed.append(pid)

    monkeypatch.setattr(child_process.os, "kill", kill)
    child_process._kill([1, 2])
    assert killed == [2]


def test_what_a_killed_child_has_started_in_groups_of_their_own_is_killed_with_it() -> None:
    program = """
import os, subprocess, sys
from mage_services.processes.child_process import *
began = subprocess.Popen(["sleep", "1000"], process_group=0)
BlockingChannel(inherited_socket(), dict[str, int]).send({"began": began.pid})
os.kill(os.getpid(), 9)
"""

    async def main() -> None:
        child = await ChildProcess[dict[str, int]].start(command(program), dict[str, int])
        message = await child.receive()
        await child.wait()
        assert members(child.pid) == {message["began"]: "sleep"}
        child.kill()
        end = time.monotonic() + PATIENCE_S
        while members(child.pid):
            assert time.monotonic() < end

    uvloop.run(main())


def test_another_thread_may_end_what_is_left_running() -> None:
    def end() -> None:
        with ending_descendants():
            pass

    with ThreadPoolExecutor(1) as threads:
        threads.submit(end).result()


def test_a_child_that_ends_badly_is_an_error_with_its_name() -> None:
    async def main() -> None:
        child: ChildProcess[int] = await ChildProcess.start(command("raise SystemExit(7)"), int)
        with pytest.raises(RunError, match=r"^the index ended with exit code 7$"):
            async for _ in child.messages("the index"):
                pass

    uvloop.run(main())


def test_a_program_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match=f"denied: '{tmp_path}'"):
        uvloop.run(ChildProcess.start([str(tmp_path)], int))


def test_a_message_that_comes_in_pieces_survives_timeouts() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        channel: Channel[dict[str, str]] = await Channel.over(ours, dict[str, str])
        data = frame({"text": "hello"})
        for piece in (data[:2], data[2:4], data[4:6]):
            theirs.send(piece)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await channel.receive()
        theirs.send(data[6:] + data)
        assert [await channel.receive(), await channel.receive()] == [{"text": "hello"}] * 2
        theirs.send(data[:6])
        theirs.close()
        assert await channel.receive() is None
        channel.close()

    uvloop.run(main())


def test_a_thread_takes_messages_that_are_there_and_waits_on_a_loop_for_others() -> None:
    ours, theirs = socket.socketpair()
    ends: list[BlockingChannel[int]] = [BlockingChannel(end, int) for end in (ours, theirs)]
    assert ends[0].receive(waits=False) is None
    assert not ends[0].has_ended
    ends[1].send(1)
    ends[1].send(2)
    assert [ends[0].receive(waits=False), ends[0].receive()] == [1, 2]

    async def main() -> int | None:
        asyncio.get_running_loop().call_later(0.02, ends[1].send, 3)
        return await ends[0].receive_async()

    assert uvloop.run(main()) == 3
    ends[0].send(4)  # an event loop that watched the socket made it non-blocking
    assert ends[1].receive() == 4
    ends[1].close()
    assert ends[0].receive() is None
    assert ends[0].has_ended
    ends[0].close()


def test_frames_are_bounded_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WireError, match="a message of 103 bytes is too long: at most 100"):
        frame("x" * 101, max_bytes=100)
    ours, theirs = socket.socketpair()
    receiver: BlockingChannel[str] = BlockingChannel(ours, str, 100)
    theirs.send(frame("x" * 200))
    with pytest.raises(WireError, match="a frame of 202 bytes is too long: at most 100"):
        receiver.receive()
    ours.close()
    theirs.close()


def test_what_is_no_message_of_the_type_is_refused() -> None:
    ours, theirs = socket.socketpair()
    theirs.send(frame({"a": "text"}))
    with pytest.raises(WireError, match="Expected `int`, got `object`"):
        BlockingChannel[int](ours, int).receive()
    ours.close()
    theirs.close()


def test_numpys_float64_is_a_float_and_not_a_number_stays_one() -> None:
    decoded: Any = msgspec.msgpack.decode(frame([np.float64(0.5), float("nan")])[4:])
    assert decoded[0] == 0.5
    assert decoded[1] != decoded[1]


def test_the_last_line_of_a_log_is_none_of_a_printed_stack(tmp_path: Path) -> None:
    log = tmp_path / "log"
    stack = "Current thread 0x1 (most recent call first):\n  Garbage-collecting\n"
    log.write_text(f'why\n{stack}  File "a.py", line 1 in f\n')
    assert last_line(log) == "why"


def test_the_last_line_of_a_log_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("first\n" + "x" * 600 + "\n\n")
    assert last_line(log) == "x" * 500


def test_the_last_line_of_a_log_has_text(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("RuntimeError: boom\n   \n")
    assert last_line(log) == "RuntimeError: boom"


def test_the_end_of_a_process_is_in_words() -> None:
    assert end_in_words(3) == "ended with exit code 3"
    assert end_in_words(-signal.SIGKILL) == "was killed by SIGKILL"
    assert end_in_words(-40) == "was killed by signal 40"  # a real-time signal, without a name


def test_a_name_that_is_cut_in_a_letter_hides_no_process_of_a_group() -> None:
    name = "import sys; open('/proc/self/comm', 'wb').write(b'cut \\xc3'); print(flush=True)"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command(f"{name}; sys.stdin.read()"), stdin=pipe, stdout=pipe, start_new_session=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert members(child.pid) == {child.pid: "cut �"}
        child.communicate()


def test_whoever_waits_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child_process, "WAIT_NOTICE_S", 0.01)

    async def main() -> None:
        with waiting_notice("the model"):
            await asyncio.sleep(0.05)
        before = capsys.readouterr().err
        assert before.startswith("waiting for the model: 0 s\nwaiting")
        await asyncio.sleep(0.03)
        assert capsys.readouterr().err == ""

    asyncio.run(main())


def test_a_program_that_is_not_ours_is_killed_with_its_parent_and_what_it_started_too() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        lines = [int(parent.stdout.readline()) for _ in range(2)]
        watched = descriptors(dict(zip(("program", "what it started"), lines, strict=True)))
        parent.kill()
        assert living_after(watched, PATIENCE_S) == set()
    assert subprocess.run(dying_with_parent(["sh", "-c", "exit 7"])).returncode == 7
    assert subprocess.run(dying_with_parent(["sh", "-c", "kill -9 $$"])).returncode == 128 + 9
    ends_its_group = 'trap "exit 3" TERM; kill -TERM 0; exit 4'
    assert subprocess.run(dying_with_parent(["sh", "-c", ends_its_group])).returncode == 3
    cuts_a_pipe = ["bash", "-c", "yes | head -1; exit ${PIPESTATUS[0]}"]
    assert subprocess.run(dying_with_parent(cuts_a_pipe)).returncode == 128 + signal.SIGPIPE
