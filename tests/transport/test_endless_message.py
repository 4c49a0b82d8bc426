"""A message that does not end, by a peer that speaks ZMTP by hand: zmq would keep it back."""

import asyncio
import socket
from contextlib import suppress

import uvloop

from mage_async.protocol.messages import Heartbeat, Hello
from mage_async.protocol.rate_limits import Allowance, Rate
from mage_services.transport.connection_limits import MAX_BYTES
from mage_services.transport.learner_channel import LearnerChannel
from mage_services.transport.peer_channel import PeerChannel

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
TYPE = b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
READY = b"\x05READY" + TYPE
MORE, LONG, COMMAND = 1, 2, 4
PART = bytes([MORE | LONG]) + (2**20).to_bytes(8, "big") + bytes(2**20)
HELLO = Hello(role="actor", name="good", build="b1", config_digest="c1", credits=2)
BEAT = Heartbeat(name="good", counters={}, blocked_s={})
UNBOUNDED = Allowance(messages=Rate(1e9, 1e9))
"""What the sound peer may send: it shows that the learner still answers as fast as it can."""


def send_without_end(address: str) -> bytes:
    """One message of more than the limit, without its end; what the other side says to that: b"" is
    the end of the connection."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(GREETING + bytes([COMMAND, len(READY)]) + READY)
        for _ in range(MAX_BYTES // 2**20 + 8):
            connection.sendall(PART)
        said = b"x"
        while said:  # its greeting comes first
            said = connection.recv(4096)
    return said


def test_it_costs_its_connection_and_not_the_learner() -> None:
    async def main() -> None:
        with (
            LearnerChannel(
                "tcp://127.0.0.1:0", build="b1", config_digest="c1", allowance=UNBOUNDED
            ) as learner,
            PeerChannel(learner.address, HELLO) as good,
        ):
            assert await learner.receive() == (good.peer, HELLO)
            ended = asyncio.create_task(sending(learner.address))
            while not ended.done():
                await good.send(BEAT)
                assert await learner.receive() == (good.peer, BEAT)
            assert learner.take_notes() == [
                "1. connection turned away, from a message that did not end"
            ]

    async def sending(address: str) -> None:
        with suppress(ConnectionError):  # an end, too
            assert await asyncio.to_thread(send_without_end, address) == b""

    uvloop.run(main())
