"""Choose and check the learner's address, open ZeroMQ sockets with all options set, and send and
receive without waiting.

option            purpose
LINGER 0          closing a socket does not wait, unless `close` of a channel is given `linger_s`
SNDHWM, RCVHWM    bound the memory that a stopped peer costs
MAXMSGSIZE        zmq ends a connection that announces a larger frame, before it allocates memory
HANDSHAKE_IVL     ends a connection without a handshake
BACKLOG           connections that the kernel queues
HEARTBEAT_*       detect a vanished machine, and connect again
"""

import logging
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from mage_async.errors import ConfigError, RunError
from mage_async.protocol.limits import DEFAULT_LIMITS
from mage_async.protocol.trial_arrays import Frame

MAX_SOCKET_PATH_BYTES = 107
"""Largest number of bytes in the path of a unix socket, by the kernel's `sockaddr_un`."""
HIGH_WATER_MESSAGES = 1024
"""Number of messages in a queue above which sending waits or fails."""
MAX_FRAME_BYTES = DEFAULT_LIMITS.max_frame_bytes()
"""Number of bytes of a frame above which zmq ends the connection."""
HANDSHAKE_MS = 5_000
"""Milliseconds after which a connection without a handshake is ended."""
BACKLOG = 64
"""Number of connections that the kernel queues before they are accepted."""
HEARTBEAT_MS = 5_000
"""Milliseconds between two pings of zmq on a TCP connection."""
CONNECTION_SILENCE_MS = 15_000
"""Milliseconds without an answer to a ping after which zmq connects again."""
COPIED_BYTES = 4096
"""Number of bytes up to which a frame is copied: that is cheaper than keeping zmq's message."""
_DONTWAIT, _DONTWAIT_MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
"""Flags with which the last frame of a message is sent, and with which each earlier one is."""
_LOOPBACK = ("127.0.0.1", "localhost")
"""Hosts that only this machine can reach."""
_LOG = logging.getLogger(__name__)


@contextmanager
def learner_address(configured: str, run_dir: Path) -> Iterator[str]:
    """Choose the address of the learner on this machine, which its peers are given on their command
    lines.

    Args:
        configured: `transport.address`: an address, or "ipc" for an `ipc_address`, whose directory
            is removed at the end of the block.

    Raises:
        RunError: no directory for a socket can be made.
    """
    if configured != "ipc":
        yield configured
        return
    address = ipc_address(run_dir)
    try:
        yield address
    finally:
        shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)


def ipc_address(run_dir: Path) -> str:
    """Return an `ipc://` address in a directory with mode 0700, for the learner and its peers.

    The directory is `run_dir/sockets`. If that path is too long for a unix socket, it is a new
    temporary directory, which is logged as a warning and which the caller must remove.

    Raises:
        RunError: the directory cannot be written.
    """
    directory = run_dir.resolve() / "sockets"
    try:
        if len(os.fsencode(directory / "work")) > MAX_SOCKET_PATH_BYTES:
            directory = Path(tempfile.mkdtemp(prefix="mage-"))
            _LOG.warning(
                "sockets are in %s: the path of %s is too long for a socket", directory, run_dir
            )
        directory.mkdir(mode=0o700, exist_ok=True)
        directory.chmod(0o700)
    except OSError as fault:
        raise RunError(f"no place for a socket in {directory}: {fault.strerror}") from fault
    return f"ipc://{directory / 'work'}"


def check_address(address: str, *, has_keys: bool) -> None:
    """Refuse an address that is malformed, or that other machines can reach without keys.

    Raises:
        ConfigError: the message says what to write instead.
    """
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not 0 < len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"`{address}`: the path of a unix socket has 1 to {MAX_SOCKET_PATH_BYTES} bytes, "
                f"got {len(os.fsencode(path))}: choose a shorter run directory"
            )
        return
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) < 2**16
    if not (address.startswith("tcp://") and host and is_port):
        raise ConfigError(f"`{address}` is no address: write ipc://PATH or tcp://HOST:PORT")
    if host not in _LOOPBACK and not has_keys:
        raise ConfigError(
            f"`{address}` can be reached from other machines, which needs keys: make them with "
            "`mage keys new DIR` and name DIR in transport.keys, or write tcp://127.0.0.1:PORT"
        )


class PolledSocket(zmq.asyncio.Socket):
    """Wait for a socket on the event loop, but read and write it without waiting.

    pyzmq's asyncio sockets create a future and query an option for every frame, which costs more
    than the frame itself. So `take_now` and `send_now` use the plain socket beneath.
    """

    beneath: zmq.Socket[bytes]
    """The plain socket, for calls that do not wait."""

    def __init__(self, context: zmq.Context[Any], kind: int, **options: Any) -> None:
        # pyzmq types `self` of `__init__` so that no subclass fits.
        super().__init__(context, kind, **options)  # type: ignore[misc]
        self.beneath = zmq.Socket.shadow(self.underlying)


def open_socket(context: zmq.asyncio.Context, kind: int, address: str) -> PolledSocket:
    """Open a socket of a kind such as `zmq.ROUTER`, with all options set, neither bound nor
    connected.
    """
    zmq_socket = context.socket(kind, PolledSocket)
    assert isinstance(zmq_socket, PolledSocket)
    zmq_socket.setsockopt(zmq.LINGER, 0)
    zmq_socket.set_hwm(HIGH_WATER_MESSAGES)
    zmq_socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    zmq_socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    zmq_socket.setsockopt(zmq.BACKLOG, BACKLOG)
    if address.startswith("tcp://"):
        zmq_socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        zmq_socket.setsockopt(zmq.HEARTBEAT_TTL, CONNECTION_SILENCE_MS)
        zmq_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, CONNECTION_SILENCE_MS)
    return zmq_socket


def take_now(zmq_socket: PolledSocket) -> list[zmq.Frame] | None:
    """Return the frames of the next message, or None if there is none.

    A message is removed from the socket only by a call that returns it. The task that waits for the
    socket must call this until it returns None before it waits again.
    """
    take = zmq_socket.beneath.recv
    try:
        frames = [take(_DONTWAIT, copy=False)]
    except zmq.Again:
        return None
    while frames[-1].more:
        frames.append(take(_DONTWAIT, copy=False))
    return frames


def send_now(zmq_socket: PolledSocket, frames: Sequence[Frame]) -> None:
    """Send the frames of one message without waiting.

    Raises:
        zmq.Again: the socket's queue is full.
    """
    *first, last = frames
    try:
        for frame in first:
            zmq_socket.beneath.send(frame, _DONTWAIT_MORE)
        zmq_socket.beneath.send(last, _DONTWAIT)
    finally:
        # zmq signals each arrival of a message only once. Sending may consume that signal, and then
        # a task that waits for the message would not wake up. Reading EVENTS makes the event loop
        # look at the socket again.
        zmq_socket.get(zmq.EVENTS)


def content_of(frame: zmq.Frame) -> Frame:
    """Return a frame's bytes: a copy of a small frame, or a view that keeps zmq's message alive."""
    return frame.bytes if len(frame) <= COPIED_BYTES else frame.buffer


def check_free(address: str) -> None:
    """Bind an address for a moment, so that an address in use is refused before any process starts.

    Raises:
        RunError: as `bind`.
    """
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        bind(probe, address)


def bind(zmq_socket: zmq.Socket[Any], address: str) -> None:
    """Bind a socket; never take over an address in use.

    Raises:
        RunError: the address is in use, or cannot be bound.
    """
    if address.startswith("ipc://"):
        _check_socket_path(Path(address.removeprefix("ipc://")))
    try:
        zmq_socket.bind(address)
    except zmq.ZMQError as fault:
        if fault.errno == zmq.EADDRINUSE:
            raise RunError(
                f"{address} is in use: end the other run, or choose another port"
            ) from fault
        hint = "; HOST is an IPv4 address of this machine, localhost, or * for all of them"
        if address.startswith("ipc://"):  # such as some network file systems and FUSE
            hint = (
                "; where the file system of the run has no sockets, set transport.address = "
                '"tcp://127.0.0.1:PORT", with transport.keys if others use this machine'
            )
        raise RunError(
            f"{address} cannot be bound: {os.strerror(fault.errno or 0)}{hint}"
        ) from fault


def _check_socket_path(path: Path) -> None:
    """Refuse a path in use, and a directory that is missing, not writable, or open to other users.

    zmq itself would delete any file at the path and bind its socket there.
    """
    try:
        mode = path.parent.stat().st_mode
    except OSError as fault:
        raise RunError(f"no place for a socket in {path.parent}: {fault.strerror}") from fault
    if not stat.S_ISDIR(mode) or stat.S_IMODE(mode) & 0o077:
        raise RunError(f"{path.parent} must be a directory for its owner only: chmod 700 it")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise RunError(f"no place for a socket in {path.parent}: Permission denied")
    if path.exists() and not path.is_socket():
        raise RunError(f"{path} is a file, not a socket: choose another address")
    with socket.socket(socket.AF_UNIX) as probe:
        if path.exists() and probe.connect_ex(str(path)) == 0:
            raise RunError(f"{path} is in use: a learner listens there; end the other run")
