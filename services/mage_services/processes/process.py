"""Do what all processes of a run share: start and end, status events, and appending to
files of JSON lines.

`mage train` resolves the configuration once. A process receives the result as its first message and
decodes it by type: it reads no file, adds no default and applies no preset.

A process sends status events to its supervisor, among them a heartbeat each second. It ignores
Ctrl-C, which the supervisor handles, and dies with its parent. Every failure becomes one event, one
line of the process's log and an exit code.
"""

import argparse
import asyncio
import errno
import faulthandler
import fcntl
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NoReturn, TypeVar

import msgspec
import uvloop

import mage_async
from mage_async.environments.user_calls import made_now, run_coroutine
from mage_async.errors import MAKE_ROOM, DiskFull, MageError, RunError, error_text, in_utf8
from mage_async.results.run_directory import RunDirectory
from mage_async.user_modules import source_digest
from mage_services.processes.child_process import (
    SHOW_STACKS,
    BlockingChannel,
    die_with_parent,
    inherited_socket,
    settle,
)
from mage_services.terminal import LastingOutput

if TYPE_CHECKING:
    from mage_async.config.schema import Config
    from mage_async.protocol.messages import Hello

T = TypeVar("T")

Runner = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end and returns its result, as `asyncio.run` does."""

BEAT_S = 1.0
"""Seconds between two heartbeats."""
EXIT_FAILED, EXIT_BUG = 2, 1
"""Exit codes: 2 for a `MageError`, 1 for any other exception."""
EXIT_DETERMINISTIC = 103
"""Exit code of a process that would fail again in the same way, so the supervisor does not restart
it. It is none with which programs usually end themselves (`os._exit`).
"""
EXIT_TERMINATED = 128 + signal.SIGTERM
"""Exit code of a process that was terminated. It is not 0, because such a process has not done its
work, and is restarted.
"""
RETRY_S = 2.0
"""Seconds between two attempts to write on a full disk."""
THREADS_END_S = 1.0
"""Seconds that the threads of a process have to end after it has done its work."""
NUM_WAITS = 10
"""Number of waits into which `in_time` divides the time of an item."""
LOOK_S = 10.0
"""Seconds between two checks of the calls that are made without an event loop: does one hang?"""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Carry the configuration: the first message to a process of a run."""

    tables: dict[str, Any]
    """The resolved configuration, as `config_file.as_tables` returns it."""


class CopiedFile(msgspec.Struct, frozen=True, tag=True):
    """Answer a process on another machine that requested a file of its run."""

    path: str
    """The requested path."""
    local: str = ""
    """Path of the copy on the machine of the process."""
    reason: str = ""
    """Why the file could not be copied; empty if it was."""


ToProcess = Begin | CopiedFile
"""The messages to a process of a run."""


class Status:
    """Send status events to the supervisor. A process that was started by hand has no supervisor,
    and its events are discarded.
    """

    def __init__(self) -> None:
        end = inherited_socket()
        self.channel = BlockingChannel[ToProcess](end, ToProcess) if end else None

    def send(self, event: str, **fields: Any) -> None:
        """Send a status event. If the supervisor has ended, discard it: this process ends too."""
        if self.channel is None:
            return
        try:
            try:
                self.channel.send({"event": event, **fields})
            except UnicodeEncodeError:  # such as a path of the file system that is not UTF-8
                clean = {
                    name: in_utf8(value) if isinstance(value, str) else value
                    for name, value in fields.items()
                }
                self.channel.send({"event": event, **clean})
        except OSError:
            self.channel.close()
            self.channel = None

    def note(self, text: str) -> None:
        """Send the supervisor a note, which is shown at once and not only in this log."""
        self.send("note", text=text)


# The code below starts a process: it receives its arguments and the resolved configuration.


@dataclass(frozen=True, slots=True)
class Startup:
    """Hold the arguments and the configuration of a process of a run."""

    run: RunDirectory
    config: "Config"
    config_digest: str
    """Digest of the configuration, which peers compare."""
    build: str
    """Version and digest of the program's sources, which peers compare."""
    name: str
    """Name of the process, such as "actor-0"."""
    address: str
    """Address at which the learner listens."""
    keys: str = ""
    """Directory of the keys on this machine; "" for none."""
    is_remote: bool = False
    """Whether the run's directory is on another machine, so that its files have to be copied."""

    def hello(self, role: Literal["actor", "evaluator"], group_quota: int = 0) -> "Hello":
        """Return the first message of this process to the learner.

        Args:
            group_quota: Largest number of groups that an actor plays at a time.
        """
        from mage_async.protocol.messages import Hello

        return Hello(
            role=role,
            name=self.name,
            build=self.build,
            config_digest=self.config_digest,
            group_quota=group_quota,
        )


def read_startup(description: str, status: Status) -> Startup:
    """Parse the command line of a process, and receive its configuration.

    The process exits if no supervisor sends one.
    """
    # Imported here, because a process without a configuration does not need them, and they import
    # NumPy, which takes long.
    from mage_async.config import config_file
    from mage_async.config.schema import digest

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--address", default="")
    parser.add_argument("--keys", default="")
    parser.add_argument("--remote", action="store_true")
    given = parser.parse_args()
    begin = status.channel.receive() if status.channel is not None else None
    if not isinstance(begin, Begin):
        parser.error("a supervisor has to start this process: use `mage train`")
    config = config_file.from_tables(begin.tables)
    return Startup(
        RunDirectory(given.run_dir),
        config,
        digest(config),
        build_digest(),
        given.name,
        given.address,
        given.keys or config.transport.keys,
        given.remote,
    )


def build_digest() -> str:
    """Return the version and the digest of the program's sources, which peers compare."""
    return f"{mage_async.__version__}+{source_digest()}"


class RunFiles:
    """Find files of a run, for a process that may be on another machine than the run's directory.

    On the machine of the run's directory every file is used where it lies. A process on another
    machine requests a file by a status event; its keeper, the Ray actor that started the process
    (`mage_services/cluster/keeper.py`), copies the file to that machine and answers.

    Args:
        is_remote: Whether the run's directory is on another machine.
    """

    def __init__(self, status: Status, is_remote: bool = False) -> None:
        self._status, self._is_remote = status, is_remote
        self._requesting = asyncio.Lock()

    async def bring(self, path: Path) -> Path:
        """Return the path of a file or folder of the run on this machine; wait until it is copied.

        After a cancellation the answer still comes. A later call uses that answer if it is for the
        same path, and ignores it otherwise.

        Raises:
            RunError: the run has no such file any more, or this process's keeper has ended.
        """
        if not self._is_remote:
            return path
        async with self._requesting:
            self._status.send("wants", path=str(path))
            while (channel := self._status.channel) is not None:
                answer = await channel.receive_async()
                if answer is None:
                    break
                if not isinstance(answer, CopiedFile) or answer.path != str(path):
                    continue
                if answer.reason:
                    raise RunError(f"{path} cannot be brought to this machine: {answer.reason}")
                return Path(answer.local)
        raise RunError(f"{path} was not brought: the keeper of this process has ended")


# The code below runs a process, reports that it is alive, and ends it.


def run_process(main: Callable[[Status], Awaitable[None]]) -> None:
    """Run `main` as a process of a run; a failure becomes a status event and an exit code.

    The event "finished" is sent only if `main` has returned: foreign code may also end a process
    with exit code 0.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides what Ctrl-C means
    die_with_parent()
    status = Status()
    go_on_without_log(status.note)
    # If foreign code crashes or blocks the interpreter, the stacks in the log show which.
    faulthandler.enable()
    faulthandler.register(SHOW_STACKS)
    received = None
    try:
        received = uvloop.run(until_signalled(_with_heartbeat(main, status), signal.SIGTERM))
    except SystemExit:
        raise
    # Not `Exception`, of which neither a panic of a library in Rust is one, nor the cancellation of
    # a task by foreign code. The supervisor would say that there was no exception.
    except BaseException as error:
        failures = list(_failures_in(error))
        bugs = [each for each in failures if not isinstance(each, MageError)]
        if bugs:  # the traceback goes into the process's log
            traceback.print_exception(error)
        # If there are bugs and errors that a person can mend, the bugs are often consequences, so
        # the first of these errors is reported.
        first = next((each for each in failures if isinstance(each, MageError)), None)
        if first is None:
            _fail(status, EXIT_BUG, bugs[0])
        else:
            _fail(status, EXIT_DETERMINISTIC if first.is_deterministic else EXIT_FAILED, first)
    code = EXIT_TERMINATED if received else 0
    if not received:
        status.send("finished")
    end_despite_threads(code, status.note)
    sys.exit(code)


def go_on_without_log(say: Callable[[str], None] = lambda text: None) -> None:
    """From now on, discard printed text that cannot be written to the log, as on a full disk.

    Otherwise `print` would raise: in a user's class, whose trials would then be dropped, or in an
    actor, which would end.

    Args:
        say: Called with a sentence about the failure, once for each cause.
    """
    on_failure = cache(lambda why: say(f"its log cannot be written: {why}. It goes on without it"))
    for name in ("stdout", "stderr"):
        setattr(sys, name, LastingOutput(getattr(sys, name), on_failure))


def end_despite_threads(code: int, say: Callable[[str], None]) -> None:
    """Start a timer that ends this process with an exit code after `THREADS_END_S`, if it has
    threads for which the interpreter would wait for ever. A process without such threads ends by
    itself.

    Args:
        say: Called with a sentence that names the threads, just before the process ends.
    """

    def waited_for() -> str:
        """Return the names of the threads that the interpreter would wait for; "" for none."""
        main = threading.main_thread()
        left = [each for each in threading.enumerate() if each is not main and not each.daemon]
        names = Counter(each.name for each in left)
        return ", ".join(f"{name!r} × {count}" for name, count in names.items())

    def end() -> None:
        say(
            f"threads do not end and are abandoned: {waited_for()}. If the environment started "
            "them, end them in its `close()`, or start them with daemon=True"
        )
        os._exit(code)

    # Idle threads of executors count here too, but they end when the interpreter does; a process
    # that has only those ends before the timer, whose thread is a daemon.
    if not waited_for():
        return
    timer = threading.Timer(THREADS_END_S, end)
    timer.daemon = True
    timer.start()


async def ticks(seconds: float) -> AsyncIterator[float]:
    """Yield the event loop's time every `seconds`, however long the work in between takes. Ticks
    that were missed, for example because the process was stopped, are skipped.
    """
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due = max(due + seconds, loop.time())
        await asyncio.sleep(due - loop.time())
        yield loop.time()


async def until_there_is_space(write: Callable[[], Awaitable[T]], note: Callable[[str], None]) -> T:
    """Return the result of `write`; while the disk is full, call it again every `RETRY_S` seconds.

    Args:
        note: Called, once, with a sentence that says what waits for space.
    """
    try:
        return await write()
    except DiskFull as full:
        note(f"{full.problem}. {MAKE_ROOM}")
    async for _ in ticks(RETRY_S):
        with suppress(DiskFull):
            return await write()
    raise AssertionError("`ticks` never ends")


async def until_signalled(
    work: Awaitable[None], *signals: int, on_signal: Callable[[], None] = lambda: None
) -> int | None:
    """Await `work` until its end, or until the first of some signals cancels this task; return the
    signal's number, or None. A SIGHUP that is ignored stays so: `nohup` asks for that.

    Args:
        on_signal: Called at the first signal; further ones do nothing.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def end(number: int) -> None:
        if not received:
            received.append(number)
            # First: an exception of `on_signal` goes to the event loop, which logs it.
            task.cancel()
            on_signal()

    handled = [
        number
        for number in signals
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    for number in handled:
        loop.add_signal_handler(number, end, number)
    try:
        await work
    except asyncio.CancelledError:
        if not received:
            raise
    finally:
        # The handlers stay when uvloop is closed, and Ctrl-C would do nothing from then on.
        for number in handled:
            loop.remove_signal_handler(number)
    return received[0] if received else None


async def _with_heartbeat(main: Callable[[Status], Awaitable[None]], status: Status) -> None:
    """Run `main` while a heartbeat is sent."""
    async with asyncio.TaskGroup() as tasks:
        beat = tasks.create_task(_beat(status), name="heartbeat")
        await main(status)
        beat.cancel()


async def _beat(status: Status) -> None:
    async for _ in ticks(BEAT_S):
        status.send("beat")


def first_failure(error: BaseException) -> BaseException:
    """Return the first exception in a tree of exception groups, or the exception if it is no
    group.
    """
    return next(_failures_in(error))


def _failures_in(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions in a tree of exception groups, or the exception if it is no group."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _failures_in(each)
    else:
        yield error


def _fail(status: Status, code: int, error: BaseException) -> NoReturn:
    """Report a failure, and end this process with an exit code."""
    reason = error_text(error)
    if not isinstance(error, MageError):
        reason = f"{type(error).__name__}: {reason}"
    # The text is searched, because libraries raise other types than OSError.
    is_disk_full = os.strerror(errno.ENOSPC) in reason
    if is_disk_full and "make room" not in reason:  # the error may give the advice already
        reason += "; make room on the disk, then go on with --resume"
    status.send("failed", reason=reason)
    print(reason, file=sys.stderr, flush=True)
    # People read the reason above; the threads that remain are not reported too.
    end_despite_threads(code, lambda text: None)
    sys.exit(code)


def append_lines(file: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append each record as a JSON line to a file of the run. Waits while another process appends.

    An unfinished last line, which a full disk or a kill leaves, is cut off first. Otherwise the
    next line would be appended to it, and could not be read.
    """
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    with file.open("ab+") as out:
        fcntl.flock(out, fcntl.LOCK_EX)  # held until the file is closed
        out.truncate(_end_of_lines(out))
        out.write(data)


def _end_of_lines(file: BinaryIO) -> int:
    """Return the number of bytes up to the end of the last finished line."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if file.read() in (b"", b"\n"):
        return size
    file.seek(0)
    return file.read().rfind(b"\n") + 1


@cache
def coroutine_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop in which all coroutines of users' classes in this process run, in a
    thread of its own. There is one loop, because the objects of a class may share something that
    belongs to a loop, such as an HTTP client.

    `coroutine_loop.cache_clear()` abandons a loop that a coroutine blocks; the next call starts
    another.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="coroutines", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=coroutine_loop.cache_clear)  # the child lacks the thread


def _run_coroutine(work: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """Run a coroutine of `Call.now` to its end, and return its result or its exception."""

    async def caught() -> tuple[Any, BaseException | None]:
        """Return the result of `work`, or its exception: one such as `SystemExit`, if raised here,
        would end the event loop.
        """
        # The garbage collector may close an abandoned play while this code runs. Its call of
        # `close` must not wait for this loop, which would then wait for itself.
        run_coroutine.set(None)
        try:
            return await work, None
        except BaseException as error:  # foreign code, which may also call sys.exit
            return None, error

    return asyncio.run_coroutine_threadsafe(caught(), coroutine_loop()).result()


def in_time(items: Iterator[T], seconds: float) -> Iterator[tuple[T, float]]:
    """Yield each item of an iterator and the seconds that it took; end at an item that takes longer
    than the given seconds.

    The iterator runs in a daemon thread, because it may play a user's class that hangs. After a
    late item the thread ends as soon as it has that item; if it hangs, it ends with the process.
    Time in which this process is stopped does not make an item late.
    """
    found, is_abandoned = SimpleQueue[tuple[T, float] | Exception | None](), threading.Event()

    def run() -> None:
        run_coroutine.set(_run_coroutine)
        began = time.monotonic()
        try:
            for item in items:
                if is_abandoned.is_set():
                    return
                found.put((item, time.monotonic() - began))
                began = time.monotonic()
            found.put(None)
        except Exception as error:  # raised again below
            found.put(error)

    threading.Thread(target=run, daemon=True, name="scripted play").start()
    try:
        while True:
            for _ in range(NUM_WAITS):
                # If the process is stopped, only one of these waits expires, however long the stop
                # is.
                with suppress(Empty):
                    item = found.get(timeout=seconds / NUM_WAITS)
                    break
            else:
                coroutine_loop.cache_clear()  # the late item may block that loop
                return
            if isinstance(item, Exception):
                raise item
            if item is None:
                return
            yield item
    finally:
        is_abandoned.set()


def unless_a_call_hangs(
    function: Callable[[], T],
    deadline_s: float,
    say: Callable[[str], None],
    wait: Runner = asyncio.run,
) -> T:
    """Call a function that makes calls by `Call.now`, and return its result.

    It runs in a daemon thread, which is abandoned if a call hangs, or `wait` is cancelled.

    Args:
        deadline_s: Seconds after which a call counts as hanging.
        say: Called with a line about a call that has not returned, every `LOOK_S` seconds; and,
            ever more rarely, about play that goes on.
        wait: Runs a coroutine to its end, as `asyncio.run` does, and may cancel it.

    Raises:
        CallFault: a call took longer than the deadline.
    """
    result: T = wait(watched(function, deadline_s, say))
    return result


async def watched(function: Callable[[], T], deadline_s: float, say: Callable[[str], None]) -> T:
    """Run a function in a daemon thread, and await its result, as `unless_a_call_hangs` does.
    Cancellation abandons the thread.
    """
    loop, num_looks = asyncio.get_running_loop(), Counter[int]()
    # A future cannot hold every exception.
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    hung = list(made_now.values())  # of functions that were abandoned before

    def run() -> None:
        """Run the function, and hand over its result or exception."""
        value, error = None, None
        run_coroutine.set(_run_coroutine)
        try:
            value = function()
        except BaseException as caught:  # raised again below
            error = caught
        with suppress(RuntimeError):  # the loop is closed: the function was abandoned
            loop.call_soon_threadsafe(settle, ended, None, (value, error))

    threading.Thread(target=run, daemon=True, name="play").start()
    look_s = min(LOOK_S, deadline_s)
    played_s, say_at_s = 0.0, LOOK_S
    while True:
        await asyncio.wait([ended], timeout=look_s)
        if ended.done():
            value, error = ended.result()
            if error is not None:
                raise error
            returned: T = value
            return returned
        # `calls` of the last look kept its objects alive until here, so no new call has an `id` of
        # one of them.
        calls = {id(each): each for each in list(made_now.values()) if each not in hung}
        num_looks = Counter({key: num_looks[key] + 1 for key in calls})
        for key, call in calls.items():
            # At the first look a call may just have begun.
            waited_s = (num_looks[key] - 1) * look_s
            if waited_s >= deadline_s:
                coroutine_loop.cache_clear()  # the call may block that loop
                raise call.overdue(deadline_s)
            if waited_s:
                say(
                    f"{call.place} has not returned for {waited_s:.0f} s, of "
                    f"environment.step_deadline_s = {deadline_s:g} s"
                )
        played_s += look_s
        if played_s >= say_at_s and max(num_looks.values(), default=1) == 1:
            say_at_s = 2 * played_s
            # A script may compute for ever without a call.
            place = next((call.place for call in calls.values()), "a script chooses an action")
            say(f"play without a model has gone on for {played_s:.0f} s; now: {place}")
