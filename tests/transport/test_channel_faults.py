"""What the channels refuse, and what they live through, by the same sentences over every kind."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from mage_async.errors import PeerRefused, WireError
from mage_async.protocol.codec import encode
from mage_async.protocol.messages import Goodbye, Hello, Message, Welcome
from mage_services.transport import sockets
from mage_services.transport.channels import LearnerChannel, PeerChannel, PeerGone
from mage_services.transport.sockets import HIGH_WATER_MESSAGES
from tests.helpers.channel_site import Learner, Site, heartbeat, hello, run


@pytest.mark.parametrize(
    ("stranger", "sentence"),
    [
        (
            hello(build="b2"),
            "build b2, the learner b1: run both from one install; if that was edited",
        ),
        (hello(config_digest="c2"), "actor-0 has configuration c2, the learner c1"),
    ],
)
def test_a_peer_of_another_build_or_configuration_is_refused_with_a_sentence(
    site: Site, stranger: Hello, sentence: str
) -> None:
    async def main() -> None:
        learner = site.learner()
        peer = site.peer(learner, stranger)
        inbox = asyncio.create_task(learner.receive())
        with pytest.raises(PeerRefused, match=sentence):
            await peer.receive()
        assert not inbox.done()
        friend = site.peer(learner)
        assert await inbox == (friend.peer, hello())
        assert set(learner.access.peers) == {friend.peer}

    run(main)


def test_malformed_frames_are_counted_under_their_peer_and_the_next_message_arrives(
    site: Site,
) -> None:
    async def main() -> None:
        learner = site.learner()
        peer, other = site.peer(learner), site.peer(learner, hello("actor-1"))
        await learner.receive()
        await learner.receive()
        damaged = [bytes(frame) for frame in encode(heartbeat())]
        damaged[1] = damaged[1][:-1] + b"\x00"
        for frames in (damaged, [b"nonsense"], [b"mage/0", b"", b""], [b""]):
            site.send_raw(peer, frames)
        await peer.send(heartbeat(7))
        assert await learner.receive() == (peer.peer, heartbeat(7))
        faults = learner.access.faults
        assert set(faults) == {peer.peer}
        assert faults[peer.peer] == 4
        await other.send(heartbeat(8))
        assert (await learner.receive())[0] == other.peer

    run(main)


def test_a_flood_of_malformed_messages_is_named_once_and_other_peers_are_served(
    site: Site,
) -> None:
    async def main() -> None:
        learner = site.learner()
        flooding, honest = site.peer(learner), site.peer(learner, hello("actor-1"))
        await learner.receive()
        await learner.receive()
        for number in range(1000):
            site.send_raw(flooding, [b"garbage" * 100])
            if number % 100 == 0:
                await honest.send(heartbeat(number))
                assert await learner.receive() == (honest.peer, heartbeat(number))
        await flooding.send(heartbeat(7))
        assert await learner.receive() == (flooding.peer, heartbeat(7))
        assert learner.access.faults[flooding.peer] == 1000
        (note,) = learner.take_notes()
        assert f"{flooding.peer} sent a malformed message, which is ignored: peer speaks" in note

    run(main)


def failure_of_send(learner: Learner, peer: str, message: Message | None = None) -> str | None:
    try:
        learner.send(peer, message or heartbeat())
    except PeerGone as fault:
        return str(fault)
    return None


def test_sending_to_a_peer_that_was_never_there_is_an_error(site: Site) -> None:
    async def main() -> None:
        with pytest.raises(PeerGone, match="actor-9 is gone"):
            site.learner().send("actor-9", heartbeat())

    run(main)


def test_sending_to_a_peer_that_ended_is_an_error(site: Site) -> None:
    async def main() -> None:
        learner = site.learner()
        peer = site.peer(learner)
        await learner.receive()
        peer.close()
        last = site.peer(learner, hello("actor-1"))  # its hello comes after the other's end
        await learner.receive()
        failure = None
        for _ in range(HIGH_WATER_MESSAGES):  # zmq notices the end by itself, a moment later
            await last.send(heartbeat())
            await learner.receive()
            failure = failure or failure_of_send(learner, peer.peer)
        assert failure == f"{peer.peer} is gone: its connection ended"
        assert set(learner.access.peers) == {last.peer}

    run(main)


def test_a_peer_that_stopped_reading_is_an_error_and_not_a_wait(site: Site) -> None:
    async def main() -> None:
        learner = site.learner()
        peer = site.peer(learner)
        await learner.receive()
        large = Goodbye(reason="x" * 2000)
        failures = (failure_of_send(learner, peer.peer, large) for _ in range(20_000))
        assert next(filter(None, failures)) == (
            f"{peer.peer} has stopped reading: 1024 messages wait"
        )

    run(main)


def test_a_message_out_of_bounds_is_refused_where_it_is_sent(site: Site) -> None:
    async def main() -> None:
        learner = site.learner()
        peer = site.peer(learner)
        await learner.receive()
        with pytest.raises(WireError):
            learner.send(peer.peer, Welcome(version=-1))
        with pytest.raises(WireError):
            await peer.send(Goodbye(reason="x" * 3000))

    run(main)


def test_a_restarted_learner_asks_who_a_peer_is_and_lets_it_in_again(ipc: Site) -> None:
    async def main() -> None:
        first = ipc.learner()
        peer = ipc.peer(first)
        await first.receive()
        first.close()
        second = ipc.learner(first.address)
        await peer.send(heartbeat(1))
        inbox = asyncio.create_task(second.receive())
        outbox = asyncio.create_task(peer.receive())
        name, said = await inbox
        assert said == hello()
        second.send(name, Welcome(version=2))
        assert await outbox == Welcome(version=2)
        await peer.send(heartbeat(2))
        assert await second.receive() == (name, heartbeat(2))

    run(main)


def test_a_learner_that_restarts_twice_asks_once_each_time_and_has_its_peer_in_the_end(
    ipc: Site,
) -> None:
    async def main() -> None:
        first = ipc.learner()
        peer = ipc.peer(first)
        await first.receive()
        first.close()
        for number in range(100):
            await peer.send(heartbeat(number))
        second = ipc.learner(first.address)
        outbox = asyncio.create_task(peer.receive())
        assert (await second.receive())[1] == hello()
        second.close()  # before it has welcomed anybody
        third = ipc.learner(first.address)
        await peer.send(heartbeat(100))
        name, said = await third.receive()
        assert said == hello()
        third.send(name, Welcome(version=2))
        assert await outbox == Welcome(version=2)
        await peer.send(heartbeat(101))
        assert await third.receive() == (name, heartbeat(101))

    run(main)


def test_a_restarted_peer_is_another_peer(ipc: Site) -> None:
    async def main() -> None:
        learner = ipc.learner()
        names = {(await learner.receive())[0] for _ in range(3) if ipc.peer(learner)}
        assert len(names) == 3
        assert all(name.startswith("actor-0/") for name in names)

    run(main)


def test_a_frame_over_the_limit_ends_the_connection_and_not_the_learner(
    ipc: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(sockets, "MAX_FRAME_BYTES", 4000)
        learner = ipc.learner()
        peer = ipc.peer(learner)
        await learner.receive()
        ipc.send_raw(peer, [bytes(5000)])
        other = ipc.peer(learner, hello("actor-1"))
        assert (await learner.receive())[0] == other.peer

    run(main)


async def check_both_ways(
    learner: LearnerChannel, peer: PeerChannel, hearing: asyncio.Task[Message]
) -> None:
    """Check that each side receives what the other sends."""
    learner.send(peer.peer, Welcome(version=3, weights_path="w"))
    assert await hearing == Welcome(version=3, weights_path="w")
    await peer.send(heartbeat(7))
    assert await learner.receive() == (peer.peer, heartbeat(7))


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_peer_whose_connection_zmq_has_given_up_makes_it_anew_and_says_hello(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        site = Site(kind, tmp_path)
        monkeypatch.setattr(sockets, "MAX_FRAME_BYTES", 4000)
        with site.open:
            learner = site.learner()
            assert isinstance(learner, LearnerChannel)
            peer = site.open.enter_context(PeerChannel(learner.address, hello()))
            assert await learner.receive() == (peer.peer, hello())
            hearing = asyncio.create_task(peer.receive())
            learner._socket.send_multipart([peer.peer.encode(), bytes(4001)])
            assert await learner.receive() == (peer.peer, hello())
            await check_both_ways(learner, peer, hearing)

    run(main)


@contextmanager
def middlebox(address: str) -> Iterator[tuple[str, list[socket.socket]]]:
    """An address that forwards to another, and the ends of its connections: peer's, learner's, …"""
    host, port = address.removeprefix("tcp://").split(":")
    ends, threads = list[socket.socket](), ExitStack()

    def forward(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    def start(work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments)
        thread.start()
        threads.callback(thread.join)

    def accept() -> None:
        with suppress(OSError):  # it is shut down
            while True:
                peer, learner = listener.accept()[0], socket.create_connection((host, int(port)))
                ends.extend((peer, learner))
                start(forward, peer, learner)
                start(forward, learner, peer)

    with socket.create_server(("127.0.0.1", 0)) as listener, threads:
        start(accept)
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", ends
        finally:
            for each in (listener, *ends):
                with suppress(OSError):  # its other end has gone
                    each.shutdown(socket.SHUT_RDWR)
    for each in ends:
        each.close()


def test_a_peer_whose_side_of_the_connection_alone_ends_is_heard_again(tmp_path: Path) -> None:
    async def main() -> None:
        site = Site("tcp", tmp_path)
        learner = site.learner()
        assert isinstance(learner, LearnerChannel)
        with middlebox(learner.address) as (address, ends), site.open:
            peer = site.open.enter_context(PeerChannel(address, hello()))
            assert await learner.receive() == (peer.peer, hello())
            hearing = asyncio.create_task(peer.receive())
            ends[0].shutdown(socket.SHUT_RDWR)
            # The learner's end seems to live until the heartbeats of zmq end it after 15 s.
            async with asyncio.timeout(10):
                assert await learner.receive() == (peer.peer, hello())
            await check_both_ways(learner, peer, hearing)

    run(main)
