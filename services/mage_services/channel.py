"""The sockets between the learner and its peers; the only file that imports zmq.

A ROUTER at the learner, a DEALER at each peer. Flow control is by credits (a peer holds at most as
many groups as it has credits), so the high-water marks below are never reached by a healthy peer:
they bound the memory that a stopped one can cost. Each socket has one receive task, owned by
whoever made the channel.

    queue              filled by          emptied by        when it is full
    peer's outgoing    PeerChannel.send   zmq's thread      send waits: the learner is away
    learner's to peer  LearnerChannel     zmq's thread      PeerGone: the peer has stopped reading
    learner's incoming zmq's thread       receive           peers' outgoing queues fill
"""

import asyncio
import logging
import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from mage_async.errors import ConfigError, MageError, PeerRefused, RunError
from mage_async.wire import (
    DEFAULT_LIMITS,
    Hello,
    Limits,
    Message,
    Refusal,
    WhoAreYou,
    decode,
    encode,
)
from mage_services.door import ChannelStatistics, Door, Peer

MAX_SOCKET_PATH_BYTES = 107
"""Of a unix socket, by the kernel's `sockaddr_un`."""
HIGH_WATER_MESSAGES = 1024
_LOOPBACK = ("127.0.0.1", "localhost")
_LOG = logging.getLogger(__name__)


class PeerGone(MageError):
    """A message could not be sent: the peer has ended, or has stopped reading."""


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


class LearnerChannel:
    """The learner's end: every peer's messages come in here, and each answer goes to one peer."""

    def __init__(
        self, address: str, *, build: str, config_digest: str, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        """Bind `address`: `ipc://PATH`, or `tcp://127.0.0.1:PORT` (port 0 takes a free one).

        Raises:
            ConfigError: the address is none, or is reachable from other machines.
            RunError: it is in use, or cannot be written.
        """
        _check_address(address)
        self._door = Door(build, config_digest, limits)
        self._context = zmq.asyncio.Context()
        self._socket = _open(self._context, zmq.ROUTER, limits)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            _bind(self._socket, address)
        except RunError:
            _close(self._context, self._socket, 0.0)
            raise
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where peers connect."""

    async def receive(self) -> tuple[Peer, Message]:
        """The next message of a peer that was let in.

        A fitting Hello is one too, and is the caller's to answer with Welcome. Strangers, peers of
        another build and malformed frames are answered or counted here; see `statistics`.
        Cancellation leaves every message where it was: taking one off the socket is not
        interrupted.
        """
        while True:
            identity, *frames = await _take(self._socket)
            peer = bytes(identity).decode("latin-1")
            message, answer = self._door.receive(peer, frames)
            if answer is not None:
                self._answer_stranger(peer, answer)
            if message is not None:
                return peer, message

    def send(self, peer: Peer, message: Message) -> None:
        """Hand a message to zmq, at once and without waiting.

        Raises:
            PeerGone: the peer has ended, or 1,024 messages to it wait unread.
            WireError: the message is out of bounds.
        """
        frames = encode(message, self._door.limits)
        try:
            _send_now(self._socket, [peer.encode("latin-1"), *frames])
        except zmq.Again as fault:
            raise PeerGone(
                f"{peer} has stopped reading: {HIGH_WATER_MESSAGES} messages wait"
            ) from fault
        except zmq.ZMQError as fault:
            if fault.errno != zmq.EHOSTUNREACH:
                raise
            self._door.forget(peer)
            raise PeerGone(f"{peer} is gone: its connection ended") from fault
        self._door.num_sent += 1

    def statistics(self) -> ChannelStatistics:
        """Who is connected, and what went wrong with whom."""
        return self._door.statistics()

    def close(self, linger_s: float = 0.0) -> None:
        """Close; blocks at most `linger_s` until what was sent has left this process."""
        if self.address.startswith("ipc://") and not self._socket.closed:
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)  # zmq leaves it
        _close(self._context, self._socket, linger_s)

    def _answer_stranger(self, peer: Peer, answer: Message) -> None:
        try:
            self.send(peer, answer)
        except PeerGone:
            return  # it left before it was answered, and nothing of it was taken

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class PeerChannel:
    """An actor's or evaluator's end; says hello when it is made, and again to a restarted
    learner."""

    def __init__(self, address: str, hello: Hello, *, limits: Limits = DEFAULT_LIMITS) -> None:
        """Connect to the learner's address; the learner may bind it later.

        Raises:
            ConfigError: the address is none, or is on another machine.
        """
        _check_address(address)
        self._hello = hello
        self._limits = limits
        self._context = zmq.asyncio.Context()
        self._socket = _open(self._context, zmq.DEALER, limits)
        identity = f"{hello.name}/{secrets.token_hex(4)}".encode()[-255:]
        self._socket.setsockopt(zmq.ROUTING_ID, identity)
        self.peer: Peer = identity.decode("latin-1")
        """How the learner knows this channel."""
        self._socket.connect(address)
        _send_now(self._socket, encode(hello, limits))

    async def receive(self) -> Message:
        """The learner's next message.

        Cancellation leaves every message where it was: taking one off the socket is not
        interrupted.

        Raises:
            PeerRefused: the learner is of another build or configuration; the sentence is its own.
            WireError: the learner sent what is no message: it is of another build, or broken.
        """
        while True:
            message = decode(await _take(self._socket), self._limits)
            if isinstance(message, Refusal):
                raise PeerRefused(message.reason)
            if not isinstance(message, WhoAreYou):
                return message
            await self.send(self._hello)

    async def send(self, message: Message) -> None:
        """Hand a message to zmq; waits only while 1,024 are unsent because the learner is away.

        Cancellation while waiting leaves the message unsent.

        Raises:
            WireError: the message is out of bounds.
        """
        await self._socket.send_multipart(encode(message, self._limits))

    def close(self, linger_s: float = 0.0) -> None:
        """Close; blocks at most `linger_s` until what was sent has left this process."""
        _close(self._context, self._socket, linger_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _open(context: zmq.asyncio.Context, kind: int, limits: Limits) -> zmq.asyncio.Socket:
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
    made.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
    made.setsockopt(zmq.MAXMSGSIZE, limits.max_frame_bytes())
    return made


async def _take(made: zmq.asyncio.Socket) -> list[bytes]:
    """The next message's frames. It is taken only when it is returned in the same breath.

    A plain `await recv()` takes a message before the awaiting task runs, so a cancellation in
    between loses it. Here the wait is for readability; cancellation leaves every message in the
    socket.
    """
    await asyncio.sleep(0)  # a flood of messages must not starve the other tasks
    while True:
        taken = made.recv_multipart(
            zmq.DONTWAIT
        )  # with DONTWAIT the future is done when it is made
        if taken.exception() is None:
            return taken.result()
        if not isinstance(taken.exception(), zmq.Again):
            return taken.result()
        await made.poll(flags=zmq.POLLIN)


def _send_now(made: zmq.asyncio.Socket, frames: list) -> None:
    """Send without waiting; raises `zmq.Again` where that would wait."""
    made.send_multipart(frames, zmq.DONTWAIT).result()


def _close(context: zmq.asyncio.Context, made: zmq.asyncio.Socket, linger_s: float) -> None:
    made.close(linger=round(linger_s * 1000))
    context.term()


def _check_address(address: str) -> None:
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not 0 < len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"`{address}`: the path of a unix socket has 1 to {MAX_SOCKET_PATH_BYTES} bytes, "
                f"got {len(os.fsencode(path))}: choose a shorter run directory"
            )
        return
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not (address.startswith("tcp://") and port.isdigit() and int(port) < 2**16):
        raise ConfigError(f"`{address}` is no address: write ipc://PATH or tcp://127.0.0.1:PORT")
    if host not in _LOOPBACK:
        raise ConfigError(
            f"`{address}` can be reached from other machines, which needs CURVE keys; they come "
            "with a later version: write ipc://PATH or tcp://127.0.0.1:PORT"
        )


def _bind(made: zmq.asyncio.Socket, address: str) -> None:
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
