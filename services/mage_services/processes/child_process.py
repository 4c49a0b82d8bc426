"""Start child processes, and exchange messages with them, by the one protocol of this program.

A child inherits one end of a private socket pair. A message is a frame: the length of its body (4
bytes, little endian, at most `MAX_MESSAGE_BYTES`), then the body in msgpack, or in JSON for a child
without msgpack. The receiver decodes it as the type that it expects. When one end of the pair
closes, the other process knows that its partner has ended. On Linux the kernel also kills a child
with its parent, if the child has called `die_with_parent`.

              parent            child
    asyncio   `ChildProcess`    `Channel` over `inherited_socket()`
    threads   `BlockingChild`   `channel_to_parent()`
"""

import asyncio
import ctypes
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, nullcontext, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec

import mage_async
from mage_async.errors import RunError, WireError
from mage_async.user_modules import LIBRARIES

CHANNEL_FD = "MAGE_CHANNEL_FD"
"""Environment variable: descriptor of the child's end of the socket pair."""
PARENT = "MAGE_PARENT"
"""Environment variable: process id of the parent."""
MAX_MESSAGE_BYTES = 1 << 26
"""Largest number of bytes of a message: far more than a whole trial as text, or an error that
quotes whole completions.
"""
WAIT_NOTICE_S = 10.0
"""Seconds of waiting for a child after which a notice is printed, and between two notices."""
LEAVE_S = 0.5
"""Seconds that processes have to end by themselves before they are killed."""
NUM_KILLS = 10
"""Largest number of times that processes are looked for and killed at SIGTERM."""
MOST_NAMED = 5
"""Largest number of processes that are named when they are killed."""
SHOW_STACKS = signal.SIGUSR1
"""Signal at which a process of a run prints the stacks of its threads into its log."""
LOG_BYTES = 1 << 20
"""Number of bytes at the end of a log that are read, or kept of one that is too long."""
MAX_LOG_BYTES = 50_000_000
"""Number of bytes of a log above which `bound_log` cuts it."""
EXIT_ORPHANED = 2
"""Exit code of a child whose parent had ended before the child began."""
OUT_OF_MEMORY = ". Unless somebody killed it, the kernel had no memory left (see `dmesg`)"
"""Explanation of the end of a process that was killed from outside (SIGKILL)."""
_LENGTH = struct.Struct("<I")
"""Length of a body in bytes: the header of a frame."""
_READ_BYTES = 1 << 20
"""Largest number of bytes that are read from a socket at once."""
_PR_SET_PDEATHSIG = 1
"""Option of Linux's `prctl` for the signal that a process receives when its parent ends."""
_EXECUTE_UNTIL_PARENT_ENDS = f"""
import ctypes, os, signal, sys
os.setpgid(0, 0)
signal.signal(signal.SIGRTMAX, lambda *_: os.killpg(0, signal.SIGKILL))
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {signal.SIGRTMAX.value})
if os.getppid() == int(sys.argv[1]):
    # A signal that the other program sends to its own process group, as by `kill 0`, must not end
    # this one.
    others = signal.valid_signals() - {{signal.SIGRTMAX}}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, others)
    child = os.fork()
    if not child:
        # Python ignores these two signals, and `exec` would keep it so: `yes | head -1` would fail.
        for each in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(each, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.execvp(sys.argv[2], sys.argv[2:])
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(code if code >= 0 else 128 - code)
"""
"""Program that runs another one in a process group of its own, and kills the group when its parent
ends. Arguments: the id of the parent, and the other program's command."""
_FRAME = re.compile(r' +File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')
"""Line of a printed stack that names a file, a line and a function."""
_STACK_LINE = re.compile(
    r' +(File "|\.\.\.|<no |Garbage-collecting)|\s*$|(Current t|T)hread 0x|Extension modules'
)
"""Any line of printed stacks, and a line without text."""

T = TypeVar("T")


def frame(message: Any, codec: Any = msgspec.msgpack, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Encode a message as its length and its body.

    Args:
        codec: `msgspec.msgpack`, or `msgspec.json` for a child that has JSON only.

    Raises:
        WireError: the body is longer than `max_bytes`.
    """
    body: bytes = codec.encode(message, enc_hook=_plain)
    if len(body) > max_bytes:
        raise WireError(f"a message of {len(body)} bytes is too long: at most {max_bytes}")
    return _LENGTH.pack(len(body)) + body


def _plain(value: Any) -> Any:
    """Convert NumPy's float64, a subclass of float, which msgspec does not encode."""
    if isinstance(value, float):
        return float(value)
    raise NotImplementedError(f"a message cannot hold a {type(value).__name__}")


def _body_length(header: bytes, max_bytes: int) -> int:
    """Return the length of a body, in bytes.

    Raises:
        WireError: the length is above `max_bytes`. The channel is of no use any more, because the
            next frame begins only after the whole body.
    """
    length: int = _LENGTH.unpack(header)[0]
    if length > max_bytes:
        raise WireError(f"a frame of {length} bytes is too long: at most {max_bytes}")
    return length


class Channel(Generic[T]):
    """Exchange messages on an event loop, over one end of a socket pair; type T is received.

    Args:
        kind: The type T, as `msgspec` decodes it.
        codec: `msgspec.msgpack`, or `msgspec.json` for a child that has JSON only.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        kind: Any,
        codec: Any = msgspec.msgpack,
    ) -> None:
        self._reader, self._writer, self._codec = reader, writer, codec
        self._decode: Callable[[bytes], T] = codec.Decoder(kind).decode
        self._num_bytes: int | None = None
        """Length of the body that comes next; None before its header has come."""

    @classmethod
    async def over(cls, end: socket.socket, kind: Any, codec: Any = msgspec.msgpack) -> Self:
        """Return a channel over one end of a socket pair, which it closes later."""
        return cls(*await asyncio.open_connection(sock=end), kind, codec)

    def send(self, message: Any) -> None:
        """Send a message, which waits in memory while the other side does not read. A message to a
        side that has ended is lost.

        Raises:
            WireError: the message is too long.
        """
        data = frame(message, self._codec)
        if not self._writer.is_closing():
            self._writer.write(data)

    async def drain(self) -> None:
        """Wait until most bytes of the messages that were sent have left this process."""
        await self._writer.drain()

    async def receive(self) -> T | None:
        """Return the next message; None when the other side has ended, even within a message.

        Cancellation loses no message.

        Raises:
            WireError: the other side sent something else than a message.
        """
        try:
            # A timeout may cancel this call anywhere: `readexactly` removes bytes from its buffer
            # only when all of them are there, and the length is kept in an attribute.
            if self._num_bytes is None:
                header = await self._reader.readexactly(_LENGTH.size)
                self._num_bytes = _body_length(header, MAX_MESSAGE_BYTES)
            body = await self._reader.readexactly(self._num_bytes)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        self._num_bytes = None
        return _decoded(self._decode, body)

    async def messages(self) -> AsyncIterator[T]:
        """Yield messages until the other side ends. Cancellation loses no message."""
        while (message := await self.receive()) is not None:
            yield message

    def close(self) -> None:
        """Close this end, which tells the other side that this one has ended."""
        self._writer.close()

    @property
    def is_closing(self) -> bool:
        """Whether this end is closed or about to be, or the other side has ended."""
        return self._writer.is_closing() or self._reader.at_eof()


class BlockingChannel(Generic[T]):
    """Exchange messages in threads, over one end of a socket pair; type T is received.

    `send` may be called by any thread, `receive` by one at a time.
    """

    def __init__(
        self, end: socket.socket, kind: Any, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self._socket, self._max_message_bytes = end, max_message_bytes
        self._decode: Callable[[bytes], T] = msgspec.msgpack.Decoder(kind).decode
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self.has_ended = False
        """Whether the other side has ended, and all that it sent has been received."""

    def send(self, message: Any) -> None:
        """Send a message; blocks while the other side does not read.

        Raises:
            WireError: the message is too long.
            OSError: the other side has ended.
        """
        data = frame(message, max_bytes=self._max_message_bytes)
        with self._sending:
            rest = memoryview(data)
            while rest:
                try:
                    rest = rest[self._socket.send(rest) :]
                except BlockingIOError:
                    self._wait(select.POLLOUT)

    def receive(self, *, waits: bool = True) -> T | None:
        """Return the next message; None when the other side has ended.

        Args:
            waits: If False, do not wait: return None also if no whole message has come yet.

        Raises:
            WireError: the other side sent something else than a message.
        """
        while not self.has_ended:
            if (body := self._take()) is not None:
                return _decoded(self._decode, body)
            try:
                data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if not waits:
                    return None
                self._wait(select.POLLIN)
                continue
            except ConnectionError:
                data = b""
            self._buffer += data
            self.has_ended = not data
        return None

    def messages(self) -> Iterator[T]:
        """Yield messages until the other side ends."""
        while (message := self.receive()) is not None:
            yield message

    async def receive_async(self) -> T | None:
        """Receive as `receive` does, without blocking the event loop. Cancellation loses no
        message.
        """
        loop = asyncio.get_running_loop()
        while (message := self.receive(waits=False)) is None and not self.has_ended:
            is_readable = asyncio.Event()
            loop.add_reader(self._socket.fileno(), is_readable.set)
            try:
                await is_readable.wait()
            finally:
                loop.remove_reader(self._socket.fileno())
        return message

    def close(self) -> None:
        """Close this end, which tells the other side that this one has ended."""
        self._socket.close()

    def _wait(self, event: int) -> None:
        """Block until the socket can be read or written. `poll` does so even for a socket that an
        event loop has made non-blocking.
        """
        poll = select.poll()
        poll.register(self._socket, event)
        poll.poll()

    def _take(self) -> bytes | None:
        """Take the next body out of the buffer; None if the buffer has no whole body yet."""
        if len(self._buffer) < _LENGTH.size:
            return None
        header = bytes(self._buffer[: _LENGTH.size])
        end = _LENGTH.size + _body_length(header, self._max_message_bytes)
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return body


def _decoded(decode: Callable[[bytes], T], body: bytes) -> T:
    """Decode a body; raise a `WireError` if it is no message of the expected type."""
    try:
        return decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"a message between processes cannot be read: {error}") from error


class ChildProcess(Generic[T]):
    """Hold a running child and the channel to it, on an event loop; it sends messages of type T."""

    def __init__(
        self, process: asyncio.subprocess.Process, channel: Channel[T], log: Path | None
    ) -> None:
        self._process, self.channel, self._log = process, channel, log

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        kind: Any,
        *,
        variables: Mapping[str, str] | None = None,
        log: Path | None = None,
        codec: Any = msgspec.msgpack,
    ) -> Self:
        """Start a child in a session of its own, so that Ctrl-C reaches the parent alone.

        If this call is cancelled, no child is left.

        Args:
            command: Program and arguments, as `module_command` returns them.
            kind: Type of the messages that the child sends.
            variables: Environment variables in addition to those of this process.
            log: File to which the child prints; None if it prints to this process's stderr.
            codec: `msgspec.msgpack` or `msgspec.json`.

        Raises:
            OSError: there is no such program, or the log cannot be written.
        """

        async def start_once() -> Self:
            ours, theirs = socket.socketpair()
            try:
                # Descriptor 2 is stderr.
                with theirs, nullcontext(2) if log is None else log.open("ab") as out:
                    process = await asyncio.create_subprocess_exec(
                        *command, **_popen_options(theirs, out, variables or {})
                    )
            except BaseException as error:
                ours.close()
                if isinstance(error, OSError) and not error.filename:  # uvloop names no program
                    error.filename = command[0]
                raise
            return cls(process, await Channel.over(ours, kind, codec), log)

        starting: asyncio.Task[Self] = asyncio.create_task(start_once(), name="start of a process")
        try:
            await asyncio.wait([starting])
        except BaseException:
            # The start takes milliseconds, so it is not cancelled: nobody else could end the child,
            # and uvloop hangs or fails when its loop is closed just after a fork.
            await asyncio.wait([starting])
            if starting.exception() is None:
                child = starting.result()
                child.kill()
                await child.wait()
            raise
        return starting.result()

    @property
    def pid(self) -> int:
        """Process id, which is also that of the child's process group and session."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the end of the child has not been noticed yet."""
        return self._process.returncode is None

    def send(self, message: Any) -> None:
        """Send a message; as `Channel.send`."""
        self.channel.send(message)

    async def receive(self) -> T | None:
        """Return the child's next message; as `Channel.receive`."""
        return await self.channel.receive()

    async def messages(self, name: str) -> AsyncIterator[T]:
        """Yield messages until the child ends. Cancellation leaves the child running.

        Raises:
            RunError: the child ended with another exit code than 0; `name` begins the sentence.
        """
        async for message in self.channel.messages():
            yield message
        if code := await self.wait():
            raise RunError(f"{name} {end_in_words(code)}")

    async def wait(self) -> int:
        """Wait for the end of the child; return its exit code, negative for a signal.

        Cancellation leaves the child running.
        """
        code = await self._process.wait()
        self.channel.close()
        return code

    def terminate(self) -> None:
        """Ask the child and the other processes of its group to end (SIGTERM)."""
        if self.is_running:
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the child and all other processes of its session, even if the child has ended."""
        self._signal(signal.SIGKILL)
        _kill(members(self.pid))  # processes in other groups, such as the commands of an agent

    def last_line(self) -> str:
        """Return the last line of the child's log, most often its error; "" if it has no log."""
        return last_line(self._log) if self._log is not None else ""

    def _signal(self, number: int) -> None:
        """Send a signal to the process group of the child."""
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self.pid, number)


class BlockingChild(Generic[T]):
    """Hold a running child and the channel to it, for threads; it sends messages of type T.

    See `ChildProcess.start` for the arguments. The child shares this process's session, so that
    Ctrl-C reaches both.
    """

    def __init__(
        self,
        command: Sequence[str],
        kind: Any,
        *,
        variables: Mapping[str, str] | None = None,
        log: Path | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs, nullcontext(2) if log is None else log.open("ab") as out:
            options = _popen_options(theirs, out, variables or {}) | {"start_new_session": False}
            self.process = subprocess.Popen(command, **options)
        self.channel: BlockingChannel[T] = BlockingChannel(ours, kind, max_message_bytes)

    def kill(self) -> None:
        """Kill the child and its descendants, wait for its end and close the channel."""
        if self.process.poll() is None:
            _kill([self.process.pid, *descendants(self.process.pid)])
        self.process.wait()
        self.channel.close()


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this process's interpreter."""
    return [sys.executable, "-m", module, *arguments]


def _popen_options(theirs: socket.socket, out: Any, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of `Popen` that connect a child to its end of the socket pair."""
    own = {
        "PYTHONSAFEPATH": "1",  # no module of the current directory takes the place of another
        "PYTHONUNBUFFERED": "1",
        # Logs are read as UTF-8. A class that prints half of a surrogate pair must not fail.
        "PYTHONIOENCODING": "utf-8:backslashreplace",
        **variables,
        CHANNEL_FD: str(theirs.fileno()),
        PARENT: str(os.getpid()),
    }
    return {
        "stdin": subprocess.DEVNULL,
        "stdout": out,
        "stderr": out,
        "pass_fds": (theirs.fileno(),),  # no other child inherits it: that would keep it open
        "start_new_session": True,
        "env": os.environ | own,
    }


def inherited_socket() -> socket.socket | None:
    """Return this process's end of the socket pair to its parent. None at the second call, and for
    a process that was started by hand. Children of this process do not inherit the socket.
    """
    number = os.environ.pop(CHANNEL_FD, None)
    if number is None:
        return None
    end = socket.socket(fileno=int(number))
    end.set_inheritable(False)
    return end


def channel_to_parent(
    kind: Any, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> BlockingChannel[Any]:
    """Return the channel on which this process receives messages of the type `kind`.

    The process ends with its parent from now on.
    """
    die_with_parent()
    end = inherited_socket()
    assert end is not None, "another process of the program starts this one"
    return BlockingChannel(end, kind, max_message_bytes)


def die_with_parent() -> None:
    """Ask the kernel to kill this process with its parent. It has no effect in a process that was
    started by hand, or on a system other than Linux.
    """
    # Popped, because the processes that this one starts have another parent.
    parent = os.environ.pop(PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # the parent ended before the call above
        os._exit(EXIT_ORPHANED)


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command that runs a foreign program, which is killed with this process, and what it
    has started in its process group too (Linux). Its exit code is the program's, or 128 + N after
    signal N. A program of this package calls `die_with_parent` instead.
    """
    if not sys.platform.startswith("linux"):
        return [*command]
    # -I and -S: an interpreter that reads no variables and no packages starts in 15 ms.
    return [sys.executable, "-ISc", _EXECUTE_UNTIL_PARENT_ENDS, str(os.getpid()), *command]


def end_in_words(code: int) -> str:
    """Return in words how a process ended, by its exit code, negative for a signal."""
    if code < 0:
        # `Signals` lacks the real-time signals between the first and the last one.
        known = -code in signal.Signals.__members__.values()
        return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
    return f"ended with exit code {code}"


def settle(future: asyncio.Future[Any], error: BaseException | None, result: object = None) -> None:
    """Settle a future with a result or a failure, unless it is done."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def members(session: int) -> dict[int, str]:
    """Return the names of the living processes of a session, by process id (Linux)."""
    found = dict[int, str]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            name, lives, its_session = _status(file)
            if its_session == session and lives:
                found[int(file.parent.name)] = name
    return found


def _status(stat: Path) -> tuple[str, bool, int]:
    """Return the name of a process, whether it lives, and its session, from its file `stat`."""
    # Such a file begins "815 (python) S 1 815 815 …": id, name, state, parent, group, session. The
    # name may hold spaces and parentheses, so it ends at the last one, and is cut after 15 bytes,
    # perhaps in the middle of a letter.
    name, _, fields = stat.read_text(errors="replace").partition(" (")[2].rpartition(") ")
    state, _, _, session, *_ = fields.split()
    return name, state not in "ZX", int(session)  # zombie, dead


def descendants(pid: int) -> Iterator[int]:
    """Yield the ids of the children of a process, of their children, and so on (Linux)."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended since
            for child in map(int, file.read_text().split()):
                yield child
                yield from descendants(child)


@contextmanager
def ending_descendants() -> Iterator[None]:
    """Kill the processes that were started in the block and still run: at its end, where a line
    names them, or at SIGTERM. They would hold this process's stdout open, so that the reader of a
    pipe would wait for them.
    """
    before = {*descendants(os.getpid())}

    def terminate(number: int, frame: object) -> None:
        """Kill the processes that were started, and end this process as the signal would."""
        for _ in range(NUM_KILLS):  # other threads may start more processes meanwhile
            if not (left := _left_since(before)):
                break
            _kill(left)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # Only the main thread may handle signals; a notebook may call this in another one.
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGTERM, terminate) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
        if left := _left_since(before):
            time.sleep(LEAVE_S)  # some may be about to end
            left = _left_since(before)
        _kill(left)
        if left:
            names = [f"{name} ({pid})" for pid, name in left.items()]
            more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            print(
                f"processes were left running, which are killed: {', '.join(names[:MOST_NAMED])}"
                f"{more}. If the environment started them, end them in its `close()`",
                file=sys.stderr,
                flush=True,
            )


def _kill(processes: Iterable[int]) -> None:
    """Kill processes by their ids, except those of another user, as `sudo` starts them."""
    for pid in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _left_since(before: Container[int]) -> dict[int, str]:
    """Return the names of the running descendants of this process that were not there before, by
    id. Helper processes of `multiprocessing` are left out, because they end with this process.
    """
    found = dict[int, str]()
    for pid in descendants(os.getpid()):
        with suppress(OSError):  # it has ended since
            name, lives, _ = _status(Path(f"/proc/{pid}/stat"))
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            if pid not in before and lives and "multiprocessing." not in command:
                # A process that has just been started has no command yet.
                found[pid] = Path(command.partition("\0")[0]).name or name
    return found


def log_bytes(log: Path) -> int:
    """Return the number of bytes of a log; 0 if somebody has deleted it."""
    with suppress(FileNotFoundError):
        return log.stat().st_size
    return 0


def end_of_log(log: Path, num_bytes: int = LOG_BYTES) -> str:
    """Return the last bytes of a log as text; "" if somebody has deleted it."""
    with suppress(FileNotFoundError), log.open("rb") as printed:
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - num_bytes))
        return printed.read().decode(errors="replace")
    return ""


def bound_log(log: Path) -> bool:
    """Cut a log that is longer than `MAX_LOG_BYTES` to its last `LOG_BYTES`, below a line that says
    so; return whether it was that long. What is printed at the same moment may be lost.
    """
    if log_bytes(log) <= MAX_LOG_BYTES:
        return False
    kept = end_of_log(log, LOG_BYTES)
    with suppress(OSError), log.open("ab") as file:  # the folder is deleted, or the disk full
        # In place, because the process and its children go on appending to this file.
        file.truncate(0)
        file.write(
            f"(this log was longer than {MAX_LOG_BYTES / 1e6:g} MB: what was printed before is cut "
            f"off here)\n{kept}".encode()
        )
    return True


def place_in_foreign_code(log: Path) -> str:
    """Return file, line and function of a user's code that a process was executing, from the stacks
    that `faulthandler` printed at the end of its log; "" if all code in them is of this program or
    of libraries.
    """
    lines = end_of_log(log).splitlines()
    stacks = takewhile(lambda line: _STACK_LINE.match(line), reversed(lines))
    own = (*LIBRARIES, str(Path(mage_async.__file__).parent), str(Path(__file__).parents[1]))
    for line in reversed(list(stacks)):
        found = _FRAME.match(line)
        # Files such as <frozen importlib._bootstrap> are the interpreter's own.
        if found is not None and not found["file"].startswith((*own, "<")):
            return f"{found['file']}, line {found['line']}, in {found['name']}"
    return ""


def last_line(log: Path) -> str:
    """Return the last line of a log that is neither empty nor part of a stack that `faulthandler`
    printed, cut to 500 characters; "" if there is none.
    """
    lines = reversed(end_of_log(log).splitlines())
    return next((line.strip()[:500] for line in lines if not _STACK_LINE.match(line)), "")


@contextmanager
def waiting_notice(
    what: str, say: Callable[[str], None] | None = None, every_s: float | None = None
) -> Iterator[None]:
    """Print a line every `every_s` seconds within the block, which waits for `what`.

    Args:
        say: Called with each line, in a thread of its own; None: the line is printed to stderr.
        every_s: None: `WAIT_NOTICE_S`.
    """
    began, has_ended = time.monotonic(), threading.Event()

    def notices() -> None:
        while not has_ended.wait(every_s or WAIT_NOTICE_S):
            line = f"waiting for {what}: {time.monotonic() - began:.0f} s"
            say(line) if say else print(line, file=sys.stderr, flush=True)

    thread = threading.Thread(target=notices, daemon=True)  # the block may block an event loop
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
