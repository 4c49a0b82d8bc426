"""Addresses and options of our sockets, and how a message is taken from one.

option            why
LINGER 0          a process that ends decides itself how long it waits
SNDHWM, RCVHWM    the memory that a stopped peer can cost
MAXMSGSIZE        no frame over it is read: zmq ends the connection before it allocates
HANDSHAKE_IVL     a connection that does not say what it is ends
BACKLOG           connections that the kernel holds for us
HEARTBEAT_*       a peer on another machine that has vanished is noticed, and the link made anew
"""

import asyncio
import logging
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from mage_async.errors import ConfigError, RunError
from mage_async.protocol.trial_header import Frame

MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a unix socket, by the kernel's `sockaddr_un`."""
HIGH_WATER_MESSAGES = 1024
HANDSHAKE_MS = 5_000
BACKLOG = 64
HEARTBEAT_MS, SILENCE_MS = 5_000, 15_000
COPIED_BYTES = 4096
"""A frame up to this size is copied: cheaper than keeping zmq's message for it."""
_TCP_INFO_BYTES, _RECEIVED_AT = 136, 128
"""`tcpi_bytes_received` in Linux's `struct tcp_info`."""
_AT_ONCE, _AT_ONCE_WITH_MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
_LOOPBACK = ("127.0.0.1", "localhost")
_LOG = logging.getLogger(__name__)


def ipc_address(run_dir: Path) -> str:
    """An `ipc://` address in a 0700 directory of its own, for the learner and all its peers.

    The directory is `run_dir/sockets`; where that path is too long for a unix socket it is a new
    one in the directory for temporary files, a warning says so, and removing it is the caller's.

    Raises:
        RunError: neither place can be written.
    """
    directory = run_dir.resolve() / "sockets"
    try:
        if len(os.fsencode(directory / "work")) > MAX_SOCKET_PATH_BYTES:
            directory = Path(tempfile.mkdtemp(prefix="mage-"))
            _LOG.warning(
                "sockets are in %s: the path of %s is too long for one", directory, run_dir
            )
        directory.mkdir(mode=0o700, exist_ok=True)
        directory.chmod(0o700)
    except OSError as fault:
        raise RunError(f"no place for a socket in {directory}: {fault.strerror}") from fault
    return f"ipc://{directory / 'work'}"


def check_address(address: str, *, has_keys: bool) -> None:
    """Whether an address can be used: another machine only with keys.

    Raises:
        ConfigError: it is none, or can be reached from other machines and there are no keys.
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


class Line(zmq.asyncio.Socket):
    """A socket that the event loop waits for, and that is read and written at once.

    zmq's asyncio makes a future and asks for an option for every frame, which costs more than the
    frame itself; so what is there is taken from the socket beneath, and what can be sent goes there
    (`take_now`, `send_now`).
    """

    beneath: zmq.Socket[bytes]

    def __init__(self, context: zmq.asyncio.Context, kind: int, **options: Any) -> None:
        super().__init__(context, kind, **options)
        self.beneath = zmq.Socket.shadow(self.underlying)


def open_socket(
    context: zmq.asyncio.Context, kind: int, address: str, max_frame_bytes: int
) -> Line:
    """A socket with every limit set, neither bound nor connected."""
    made = context.socket(kind, Line)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
    made.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
    made.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    made.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    made.setsockopt(zmq.BACKLOG, BACKLOG)
    if address.startswith("tcp://"):
        made.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        made.setsockopt(zmq.HEARTBEAT_TTL, SILENCE_MS)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    return made


def take_now(made: Line) -> list[zmq.Frame] | None:
    """The next message, if one is there; it is taken only when it is returned.

    For the task that waits for the socket, which looks for more before it waits again.
    """
    take = made.beneath.recv
    try:
        frames = [take(_AT_ONCE, copy=False)]
    except zmq.Again:
        return None
    while frames[-1].more:
        frames.append(take(_AT_ONCE, copy=False))
    return frames


def send_now(made: Line, frames: Sequence[Frame]) -> None:
    """Send without waiting; raises `zmq.Again` where that would wait.

    Any call may use up the one signal that something has come, for which another task waits: so
    the loop is told to look for itself.
    """
    *first, last = frames
    try:
        for frame in first:
            made.beneath.send(frame, _AT_ONCE_WITH_MORE)
        made.beneath.send(last, _AT_ONCE)
    finally:
        made.get(zmq.EVENTS)


def content_of(frame: zmq.Frame) -> Frame:
    """What a frame holds: a copy, or a view that keeps zmq's message."""
    return frame.bytes if len(frame) <= COPIED_BYTES else frame.buffer


async def readable(poller: zmq.asyncio.Poller, timeout_s: float | None = None) -> bool:
    """Wait until one of the sockets has something; False where none has after `timeout_s`.

    Nothing is taken here: cancellation leaves everything where it is.
    """
    return bool(await poller.poll(None if timeout_s is None else round(1000 * timeout_s)))


async def let_others_run() -> None:
    """A flood of messages must not starve the other tasks."""
    await asyncio.sleep(0)


def bind(made: zmq.asyncio.Socket, address: str) -> None:
    """Bind; an address that is used stays with its user.

    Raises:
        RunError: it is in use, or cannot be bound.
    """
    if address.startswith("ipc://"):
        _check_socket_path(Path(address.removeprefix("ipc://")))
    try:
        made.bind(address)
    except zmq.ZMQError as fault:
        if fault.errno == zmq.EADDRINUSE:
            raise RunError(
                f"{address} is in use: end the other run, or choose another port"
            ) from fault
        raise RunError(f"{address} cannot be bound: {fault.strerror}") from fault


def cut(descriptor: int) -> None:
    """End the connection behind a descriptor of zmq's, which then closes it.

    One that has ended meanwhile is no error, nor is one that has become something else: only a
    connection can be shut down.
    """
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def bytes_brought(descriptor: int) -> int:
    """Bytes that a TCP connection of zmq has brought; 0 where it has ended or has no counter."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except (OSError, AttributeError):  # TCP_INFO is Linux's
        return 0
    return int.from_bytes(facts[_RECEIVED_AT : _RECEIVED_AT + 8], sys.byteorder)


def _check_socket_path(path: Path) -> None:
    """Refuse a path that is used: zmq itself would unlink whatever is there, and bind anew."""
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
