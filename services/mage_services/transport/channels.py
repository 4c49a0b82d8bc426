"""Exchange messages between the learner and its peers, which are actors and evaluators.

The learner's end is a ROUTER (`LearnerChannel`), a peer's end a DEALER (`PeerChannel`). A peer
introduces itself with a Hello; the learner's end delivers the messages of introduced peers only.

Flow control is by group quotas: a peer holds at most as many groups as its quota. So a healthy peer
never reaches the high-water marks of the sockets; they bound the memory that a stopped peer costs.

    queue                filled by          emptied by        when it is full
    peer to learner      PeerChannel.send   zmq's thread      send waits: the learner is away
    learner to one peer  LearnerChannel     zmq's thread      PeerGone: the peer has stopped reading
    learner's incoming   zmq's thread       receive           the peers' outgoing queues fill

No channel ends because its peer is silent. Silence is handled in three other places: the
coordinator grants a silent actor's groups to others (`learner/coordinator.py`), the supervisor
kills silent processes (`processes/supervised_process.py`), and zmq renews a TCP connection that
brings no answers (`CONNECTION_SILENCE_MS`).
"""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from mage_async.errors import MageError, PeerRefused, RunError
from mage_async.protocol.codec import LastEncoded, decode, encode
from mage_async.protocol.messages import Hello, Message, Refusal, WhoAreYou
from mage_async.protocol.trial_arrays import Frame
from mage_services.transport.access_control import AccessControl, Gate, LearnerKeys, Peer, PeerKeys
from mage_services.transport.sockets import (
    HIGH_WATER_MESSAGES,
    PolledSocket,
    bind,
    check_address,
    content_of,
    open_socket,
    send_now,
    take_now,
)

MAX_FAILED_HANDSHAKES = 20
"""Number of failed handshakes in a row after which a peer gives up. A restarting learner causes
none.
"""
_RETRY_WAIT_S, _NUM_RETRY_WAITS = 0.25, 4
"""Seconds of one wait for zmq to announce a new attempt to connect, and number of such waits. It
announces one within a millisecond of the end of a connection.
"""
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""Events of zmq's monitor that report a failed handshake."""


class PeerGone(MageError):
    """Report that a message could not be sent: the peer has ended, or has stopped reading."""


class LearnerChannel(AbstractContextManager["LearnerChannel"]):
    """Receive every peer's messages at the learner, and send each answer to one peer."""

    def __init__(
        self,
        address: str,
        *,
        build: str,
        config_digest: str,
        keys: LearnerKeys | None = None,
    ) -> None:
        """Bind `address`: `ipc://PATH`, or `tcp://HOST:PORT` (port 0 takes a free one).

        Raises:
            ConfigError: the address is malformed, or other machines can reach it without keys.
            RunError: the address is in use, or cannot be written.
        """
        check_address(address, has_keys=keys is not None)
        self.access = AccessControl(build, config_digest)
        self._context = zmq.asyncio.Context()
        self._socket = open_socket(self._context, zmq.ROUTER, address)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Without it zmq ignores a peer's new connection as long as the old one seems alive, for
        # example after a reset of the peer's side alone.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._gate: Gate | None = None
        if keys is not None:
            self._gate = Gate(self._context, keys.known, self.access.turn_away)
            self._gate.start()
            keys.apply(self._socket)
        try:
            bind(self._socket, address)
        except RunError:
            self._end(0.0)
            raise
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where peers connect."""
        self._encoder = LastEncoded()
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    async def receive(self) -> tuple[Peer, Message]:
        """Return the next message of a peer that was let in, and the peer.

        The peer's Hello is delivered too; the caller answers it with a Welcome. Messages of unknown
        peers and malformed messages are handled by `AccessControl`.

        Cancellation loses no message: taking one off the socket cannot be interrupted.
        """
        while True:
            await asyncio.sleep(0)  # a flood of messages must not starve the other tasks
            frames = take_now(self._socket)
            if frames is None:
                await self._poller.poll()
                continue
            identity, *parts = frames
            peer = identity.bytes.decode("latin-1")  # any bytes, one character each
            message, answer = self.access.receive(peer, [content_of(part) for part in parts])
            if answer is not None:
                # The peer may have ended already; none of its messages was delivered, so the caller
                # need not know.
                with suppress(PeerGone):
                    self.send(peer, answer)
            if message is not None:
                return peer, message

    def send(self, peer: Peer, message: Message) -> None:
        """Hand a message to zmq without waiting.

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
            self.access.forget(peer)
            raise PeerGone(f"{peer} is gone: its connection ended") from fault
        self.access.sent(peer, message)

    def forget(self, peer: Peer) -> None:
        """Forget a peer: it must say hello before its next message is delivered."""
        self.access.forget(peer)

    def take_notes(self) -> list[str]:
        """Return the sentences for the screen that were added since the last call, at most 20."""
        return self.access.take_notes()

    def close(self, linger_s: float = 0.0) -> None:
        """Close; block at most `linger_s` until the sent messages have left this process."""
        if self.address.startswith("ipc://") and not self._socket.closed:
            # zmq does not remove the file of the socket.
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)
        self._end(linger_s)

    def _end(self, linger_s: float) -> None:
        """Close the socket and its context."""
        self._socket.close(linger=round(linger_s * 1000))
        if self._gate is not None:
            self._gate.stop()
            self._gate = None
        self._context.term()

    def __exit__(self, *_: object) -> None:
        self.close()


class PeerChannel(AbstractContextManager["PeerChannel"]):
    """Exchange messages with the learner, from an actor or evaluator. A Hello is sent when the
    channel is created, and to a restarted learner.
    """

    def __init__(self, address: str, hello: Hello, *, keys: PeerKeys | None = None) -> None:
        """Connect to the learner's address; the learner may bind it later.

        Raises:
            ConfigError: the address is malformed, or on another machine and there are no keys.
        """
        check_address(address, has_keys=keys is not None)
        self._hello = hello
        self._owes_hello = True
        """Whether a Hello must still be sent; sending is delayed while zmq has no connection."""
        self._context = zmq.asyncio.Context()
        self._socket = open_socket(self._context, zmq.DEALER, address)
        identity = f"{hello.name}/{secrets.token_hex(4)}".encode()[-255:]  # zmq's largest length
        self._socket.setsockopt(zmq.ROUTING_ID, identity)
        self.peer = identity.decode("latin-1")
        """The learner's name for this channel."""
        if keys is not None:
            keys.apply(self._socket)
        self._connection, self._address = _PeerConnection(self._socket, address), address
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._connection.monitor, zmq.POLLIN)
        self._socket.connect(address)
        self._send_hello()

    async def receive(self) -> Message:
        """Return the learner's next message.

        Cancellation loses no message: taking one off the socket cannot be interrupted.

        Raises:
            PeerRefused: the learner has another build or configuration, or does not know this
                peer's key; the sentence says which.
            WireError: the learner sent a malformed message: it has another build, or is broken.
        """
        while True:
            await asyncio.sleep(0)  # a flood of messages must not starve the other tasks
            # Messages on the way when a connection broke are lost, perhaps the Hello among them.
            self._owes_hello |= self._connection.is_renewed()
            if self._owes_hello:
                self._send_hello()
            frames = take_now(self._socket)
            if frames is None:
                has_event = await self._poller.poll(self._connection.timeout_ms())
                if not has_event and self._connection.is_given_up():
                    # zmq ignores a second `connect` to an address, so the first is undone.
                    self._socket.disconnect(self._address)
                    self._socket.connect(self._address)
                continue
            message = decode([content_of(frame) for frame in frames])
            if isinstance(message, Refusal):
                raise PeerRefused(message.reason)
            if not isinstance(message, WhoAreYou):
                return message
            self._owes_hello = True

    def _send_hello(self) -> None:
        """Send a Hello, or leave it owed if zmq takes no message now.

        zmq takes none after it has ended the connection, and while 1,024 messages are unsent. The
        next event of the connection, or the learner's request for a Hello, wakes `receive`, which
        tries again.
        """
        try:
            send_now(self._socket, encode(self._hello))
        except zmq.Again:
            self._owes_hello = True
        else:
            self._owes_hello = False

    async def send(self, message: Message) -> None:
        """Hand a message to zmq; wait only while 1,024 are unsent because the learner is away.

        Cancellation while waiting leaves the message unsent.

        Raises:
            WireError: the message is out of bounds.
        """
        await self.send_frames(encode(message))

    async def send_frames(self, frames: Sequence[Frame]) -> None:
        """Hand an encoded message to zmq, as `send` does."""
        await self._socket.send_multipart(frames)

    def close(self, linger_s: float = 0.0) -> None:
        """Close; block at most `linger_s` until the sent messages have left this process."""
        self._connection.close()
        self._socket.close(linger=round(linger_s * 1000))
        self._context.term()

    def __exit__(self, *_: object) -> None:
        self.close()


class _PeerConnection:
    """Follow the state of a peer's one connection, by the events of zmq's monitor of its socket.

    zmq renews a broken connection by itself and announces the attempt at once. But it gives up
    after bytes that are no ZeroMQ message and after a frame over the limit: the socket would stay
    unconnected, and no event reports it. So if zmq announces no attempt for a while, `is_given_up`
    returns true and the caller connects again.
    """

    def __init__(self, socket: PolledSocket, address: str) -> None:
        self._socket, self._address = socket, address
        self._num_made = self._num_failed = 0
        """Numbers of handshakes that succeeded, and that failed since the last success."""
        self._num_waits: int | None = None
        """Number of waits in which no attempt was announced; None unless the connection is broken.
        """
        self._is_renewed_by_caller = False
        """Whether `is_given_up` has told the caller to connect again, and no handshake has
        succeeded since."""
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        # The monitor stays registered with the event loop while it lives; a blocking one would have
        # to be registered again for every wait.
        monitor_address = f"inproc://monitor.{id(socket)}"
        socket.monitor(monitor_address, events | _HANDSHAKE_FAILED)
        self.monitor = socket.context.socket(zmq.PAIR, PolledSocket)
        self.monitor.setsockopt(zmq.LINGER, 0)
        # 0 means no limit. With a limit, zmq's own thread would wait for ever once the queue of
        # events is full, and `close` would wait for that thread. The queue does fill: an evaluator
        # that plays the final sets reads no events for minutes, while zmq tries ten times a second
        # to reach the learner, which has ended.
        self.monitor.setsockopt(zmq.RCVHWM, 0)
        self.monitor.connect(monitor_address)

    def is_renewed(self) -> bool:
        """Handle all events that have come; return whether a broken connection was renewed.

        Always false for a unix socket that zmq renewed: it breaks only with the learner's process,
        and a new learner requests a Hello.

        Raises:
            PeerRefused: the learner does not accept this key, or this is not its address.
        """
        is_renewed = False
        while (frames := take_now(self.monitor)) is not None:
            event = parse_monitor_message([frame.bytes for frame in frames])
            is_renewed |= self._take_event(int(event["event"]))
        return is_renewed

    def timeout_ms(self) -> float | None:
        """Return how long to wait for the next event; `None` for no limit."""
        return None if self._num_waits is None else 1000 * _RETRY_WAIT_S

    def is_given_up(self) -> bool:
        """Count one timeout without an event; return whether zmq has given the connection up."""
        # Count timeouts, and not seconds: while this process is stopped, seconds go by without
        # events.
        if self._num_waits is None:
            return False
        self._num_waits += 1
        if self._num_waits < _NUM_RETRY_WAITS:
            return False
        self._num_waits, self._is_renewed_by_caller = None, True
        return True

    def close(self) -> None:
        """End the monitor; call before the socket is closed."""
        if not self.monitor.closed:
            self._socket.disable_monitor()
            self.monitor.close()

    def _take_event(self, event: int) -> bool:
        """Take an event of the monitor; return whether a broken connection was renewed."""
        if event in (zmq.EVENT_CONNECT_RETRIED, zmq.EVENT_DISCONNECTED):
            self._num_waits = 0 if event == zmq.EVENT_DISCONNECTED else None
            return False
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_failed, self._num_waits = 0, None
            self._num_made += 1
            is_renewed, self._is_renewed_by_caller = self._is_renewed_by_caller, False
            return is_renewed or (self._num_made > 1 and self._address.startswith("tcp://"))
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise PeerRefused(
                f"the learner at {self._address} refuses this actor's key: it has another "
                "`actor.key`"
            )
        self._num_failed += 1
        # A process that does not speak ZeroMQ listens at the address: trying again is of no use.
        is_no_learner = event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        if is_no_learner or self._num_failed >= MAX_FAILED_HANDSHAKES:
            raise PeerRefused(
                f"{self._address} ends every connection in the handshake: no mage learner listens "
                "there, it has another `learner.key`, or only one side has keys"
            )
        return False
