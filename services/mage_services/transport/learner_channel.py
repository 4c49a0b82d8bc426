"""The channels between the learner and its peers: the learner's end.

A ROUTER at the learner, a DEALER at each peer (`peer_channel.py`). Flow control is by credits (a
peer holds at most as many groups as it has credits), so the high-water marks of `sockets.py` are
never reached by a healthy peer: they bound the memory that a stopped one can cost. Each socket has
one receive task, which belongs to the owner of the channel.

    queue              filled by          emptied by        when it is full
    peer's outgoing    PeerChannel.send   zmq's thread      send waits: the learner is away
    learner's to peer  LearnerChannel     zmq's thread      PeerGone: the peer has stopped reading
    learner's incoming zmq's thread       receive           peers' outgoing queues fill
"""

import time
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from mage_async.errors import MageError, RunError
from mage_async.protocol.codec import LastEncoded
from mage_async.protocol.messages import Message
from mage_async.protocol.rate_limits import DEFAULT_ALLOWANCE, Allowance
from mage_async.protocol.trial_header import DEFAULT_LIMITS, Limits
from mage_services.transport.access import AccessControl, ChannelStatistics, Peer
from mage_services.transport.authentication import Gate, LearnerKeys
from mage_services.transport.connection_limits import SilentConnections
from mage_services.transport.connections import LearnerLinks
from mage_services.transport.sockets import (
    HIGH_WATER_MESSAGES,
    bind,
    check_address,
    content_of,
    let_others_run,
    open_socket,
    readable,
    send_now,
    take_now,
)


class PeerGone(MageError):
    """A message could not be sent: the peer has ended, or has stopped reading."""


class LearnerChannel:
    """The learner's end: every peer's messages come in here, and each answer goes to one peer."""

    def __init__(
        self,
        address: str,
        *,
        build: str,
        config_digest: str,
        limits: Limits = DEFAULT_LIMITS,
        keys: LearnerKeys | None = None,
        allowance: Allowance = DEFAULT_ALLOWANCE,
    ) -> None:
        """Bind `address`: `ipc://PATH`, or `tcp://HOST:PORT` (port 0 takes a free one).

        Raises:
            ConfigError: the address is none, or is reachable from other machines without keys.
            RunError: it is in use, or cannot be written.
        """
        check_address(address, has_keys=keys is not None)
        known = frozenset() if keys is None else keys.known
        self._access = AccessControl(build, config_digest, limits, allowance, known)
        self._context = zmq.asyncio.Context()
        self._socket = open_socket(self._context, zmq.ROUTER, address, limits.max_frame_bytes())
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._gate: Gate | None = None
        if keys is not None:
            self._gate = Gate(self._context, self._may_enter)
            self._gate.start()
            keys.apply(self._socket)
        self._links = LearnerLinks(self._socket, self._access, SilentConnections())
        try:
            bind(self._socket, address)
        except RunError:
            self._end(0.0)
            raise
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where peers connect."""
        self._encoder = LastEncoded(limits)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._links.monitor, zmq.POLLIN)

    async def receive(self) -> tuple[Peer, Message]:
        """The next message of a peer that was let in.

        A fitting Hello is one too, and is the caller's to answer with Welcome. Strangers, peers of
        another build and malformed frames are answered or counted here; see `statistics`. A peer
        that is refused for its rate says Goodbye in its own name.
        Cancellation leaves every message where it was: taking one off the socket is not
        interrupted.
        """
        while True:
            await let_others_run()
            self._links.look()
            taken = take_now(self._socket)
            if taken is None:
                self._links.idle()
                await readable(self._poller)
                self._links.look_at_once()
                continue
            identity, *frames = taken
            peer = identity.bytes.decode("latin-1")
            now = time.monotonic()
            self._links.spoke(identity)
            verdict = self._access.receive(peer, [content_of(frame) for frame in frames], now=now)
            if verdict.is_over:
                self._links.cut(identity, now=now)
            if verdict.answer is not None:
                self._answer_stranger(peer, verdict.answer)
            if verdict.message is not None:
                return peer, verdict.message

    def send(self, peer: Peer, message: Message) -> None:
        """Hand a message to zmq, at once and without waiting.

        Raises:
            PeerGone: the peer has ended, or 1,024 messages to it wait unread.
            WireError: the message is out of bounds.
        """
        frames = self._encoder.encode(message)
        try:
            send_now(self._socket, [peer.encode("latin-1"), *frames])
        except zmq.Again as fault:
            raise PeerGone(
                f"{peer} has stopped reading: {HIGH_WATER_MESSAGES} messages wait"
            ) from fault
        except zmq.ZMQError as fault:
            if fault.errno != zmq.EHOSTUNREACH:
                raise
            self._access.forget(peer)
            raise PeerGone(f"{peer} is gone: its connection ended") from fault
        self._access.sent(peer, message)

    def forget(self, peer: Peer) -> None:
        """Forget a peer: when it speaks again it is asked to say hello."""
        self._access.forget(peer)

    def statistics(self) -> ChannelStatistics:
        """The peers that are connected, and the faults of each."""
        return self._access.statistics()

    def take_notes(self) -> list[str]:
        """Sentences about refused peers and connections, for the screen; each is given once."""
        return self._access.take_notes()

    def close(self, linger_s: float = 0.0) -> None:
        """Close; blocks at most `linger_s` until what was sent has left this process."""
        if self.address.startswith("ipc://") and not self._socket.closed:
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)  # zmq leaves it
        self._end(linger_s)

    def _may_enter(self, key: bytes, address: str) -> bool:
        return self._access.may_enter(key, address, now=time.monotonic())

    def _answer_stranger(self, peer: Peer, answer: Message) -> None:
        try:
            self.send(peer, answer)
        except PeerGone:
            return  # it left before it was answered, and nothing of it was taken

    def _end(self, linger_s: float) -> None:
        self._links.close()
        self._socket.close(linger=round(linger_s * 1000))
        if self._gate is not None:
            self._gate.stop()
            self._gate = None
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
