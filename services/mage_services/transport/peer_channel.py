"""The channels between the learner and its peers: an actor's or evaluator's end, a DEALER."""

import secrets
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from mage_async.errors import PeerRefused
from mage_async.protocol.codec import decode, encode
from mage_async.protocol.messages import (
    Hello,
    Message,
    Refusal,
    WhoAreYou,
)
from mage_async.protocol.trial_header import DEFAULT_LIMITS, Limits
from mage_services.transport.authentication import PeerKeys
from mage_services.transport.connections import PeerLink
from mage_services.transport.sockets import (
    check_address,
    content_of,
    let_others_run,
    open_socket,
    readable,
    send_now,
    take_now,
)


class PeerChannel:
    """An actor's or evaluator's end; says hello when it is made, and again to a restarted
    learner."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        limits: Limits = DEFAULT_LIMITS,
        keys: PeerKeys | None = None,
    ) -> None:
        """Connect to the learner's address; the learner may bind it later.

        Raises:
            ConfigError: the address is none, or is on another machine and there are no keys.
        """
        check_address(address, has_keys=keys is not None)
        self._hello = hello
        self._owes_hello = False
        """The learner asked, which it does once, or the link is new: `receive` may be cancelled."""
        self._limits = limits
        self._context = zmq.asyncio.Context()
        self._socket = open_socket(self._context, zmq.DEALER, address, limits.max_frame_bytes())
        identity = f"{hello.name}/{secrets.token_hex(4)}".encode()[-255:]
        self._socket.setsockopt(zmq.ROUTING_ID, identity)
        self.peer = identity.decode("latin-1")
        """How the learner knows this channel."""
        if keys is not None:
            keys.apply(self._socket)
        self._link, self._address = PeerLink(self._socket, address), address
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._link.monitor, zmq.POLLIN)
        self._socket.connect(address)
        send_now(self._socket, encode(hello, limits))

    async def receive(self) -> Message:
        """The learner's next message.

        Cancellation leaves every message where it was: taking one off the socket is not
        interrupted.

        Raises:
            PeerRefused: the learner is of another build or configuration, knows no such key, or
                was sent too much; the sentence says which.
            WireError: the learner sent what is no message: it is of another build, or broken.
        """
        while True:
            await let_others_run()
            self._owes_hello |= self._link.look()  # what was under way on the broken one is lost
            if self._owes_hello:
                await self.say_hello()
            taken = take_now(self._socket)
            if taken is None:
                is_news = await readable(self._poller, self._link.patience_s())
                if not is_news and self._link.has_ended():
                    self._socket.disconnect(self._address)  # zmq connects a peer once an address
                    self._socket.connect(self._address)
                continue
            message = decode([content_of(frame) for frame in taken], self._limits)
            if isinstance(message, Refusal):
                raise PeerRefused(message.reason)
            if not isinstance(message, WhoAreYou):
                return message
            self._owes_hello = True

    async def send(self, message: Message) -> None:
        """Hand a message to zmq; waits only while 1,024 are unsent because the learner is away.

        Cancellation while waiting leaves the message unsent.

        Raises:
            WireError: the message is out of bounds.
        """
        await self._socket.send_multipart(encode(message, self._limits))

    async def say_hello(self) -> None:
        """Say it again. Cancellation leaves it unsaid."""
        await self.send(self._hello)
        self._owes_hello = False

    def close(self, linger_s: float = 0.0) -> None:
        """Close; blocks at most `linger_s` until what was sent has left this process."""
        self._link.close()
        self._socket.close(linger=round(linger_s * 1000))
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
