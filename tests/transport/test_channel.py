"""The channels over real sockets, and their twins in memory by the same sentences.

Longer than most: each sentence is asked of both, so they stay together.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import uvloop

from mage_async.errors import PeerRefused, WireError
from mage_async.policy_version import VersionRun
from mage_async.protocol.codec import encode
from mage_async.protocol.messages import (
    Acknowledge,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    TrialResult,
    Welcome,
)
from mage_async.protocol.trial_frames import Limits
from mage_async.trajectory import Segment, Task, Trial
from mage_services.transport.channel import LearnerChannel, PeerChannel, PeerGone
from mage_services.transport.sockets import HIGH_WATER_MESSAGES, ipc_address
from tests.helpers.memory_channels import MemoryLearnerChannel, MemoryPeerChannel

Learner = LearnerChannel | MemoryLearnerChannel
PeerEnd = PeerChannel | MemoryPeerChannel


def hello(name: str = "actor-0", build: str = "b1", config_digest: str = "c1") -> Hello:
    return Hello(role="actor", name=name, build=build, config_digest=config_digest, credits=2)


def heartbeat(number: int = 0) -> Heartbeat:
    return Heartbeat(name="actor-0", counters={"number": number}, blocked_s={})


def trial(num_tokens: int) -> TrialResult:
    source = np.random.default_rng(0)
    segment = Segment(
        source.integers(0, 1000, num_tokens, dtype=np.int32),
        np.ones(num_tokens, bool),
        -source.random(num_tokens, dtype=np.float32),
        (VersionRun(0, 0, 0),),
    )
    return TrialResult(3, 0, Trial(Task("rps", "cycle-1", 5), 1, 3, (segment,), ()))


def run(main: Callable[[], Awaitable[None]]) -> None:
    """As every process of ours runs its main."""

    async def begin() -> None:
        await main()

    uvloop.run(begin())


class Site:
    """Where channels of one kind are opened, and closed when the test ends."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.address = "tcp://127.0.0.1:0" if kind == "tcp" else ""
        self.directory = directory
        self.kind = kind
        self.open = ExitStack()

    def learner(self, address: str | None = None) -> Learner:
        if self.kind == "memory":
            return MemoryLearnerChannel(build="b1", config_digest="c1")
        address = address or self.address or ipc_address(self.directory)
        return self.open.enter_context(LearnerChannel(address, build="b1", config_digest="c1"))

    def peer(self, learner: Learner, says: Hello | None = None) -> PeerEnd:
        if isinstance(learner, MemoryLearnerChannel):
            return learner.connect(says or hello())
        return self.open.enter_context(PeerChannel(learner.address, says or hello()))

    def send_raw(self, peer: PeerEnd, frames: list[bytes]) -> None:
        if isinstance(peer, MemoryPeerChannel):
            peer.put_raw(list(frames))
        else:
            peer._socket.send_multipart(frames)


@pytest.fixture(params=["ipc", "tcp", "memory"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    made = Site(request.param, tmp_path)
    with made.open:
        yield made


@pytest.fixture
def ipc(tmp_path: Path) -> Iterator[Site]:
    made = Site("ipc", tmp_path)
    with made.open:
        yield made


def test_messages_go_both_ways_and_keep_their_order(site: Site) -> None:
    async def main() -> None:
        learner = site.learner()
        peer = site.peer(learner)
        assert await learner.receive() == (peer.peer, hello())
        learner.send(peer.peer, Welcome(version=3, weights_path="w"))
        assert await peer.receive() == Welcome(version=3, weights_path="w")
        for number in range(100):
            await peer.send(heartbeat(number))
        for number in range(100):
            assert await learner.receive() == (peer.peer, heartbeat(number))

    run(main)


def test_a_long_trial_arrives_whole(site: Site) -> None:
    async def main() -> None:
        learner = site.learner()
        peer = site.peer(learner)
        await learner.receive()
        await peer.send(trial(200_000))
        _, message = await learner.receive()
        assert isinstance(message, TrialResult)
        (sent,), (got,) = trial(200_000).trial.segments, message.trial.segments
        assert np.array_equal(got.tokens, sent.tokens)
        assert np.array_equal(got.logprobs, sent.logprobs)

    run(main)


def test_an_answer_goes_to_the_peer_that_asked(site: Site) -> None:
    async def main() -> None:
        learner = site.learner()
        peers = [site.peer(learner, hello(f"actor-{number}")) for number in range(4)]
        for _ in peers:
            name, said = await learner.receive()
            assert isinstance(said, Hello)
            learner.send(name, Goodbye(reason=said.name))
        for number, peer in enumerate(peers):
            assert await peer.receive() == Goodbye(reason=f"actor-{number}")

    run(main)


@pytest.mark.parametrize(
    ("stranger", "sentence"),
    [
        (hello(build="b2"), "actor-0 is build b2, the learner b1: run both from one install"),
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
        assert learner.statistics().num_refused == 1
        assert set(learner.statistics().peers) == {friend.peer}

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
        statistics = learner.statistics()
        assert set(statistics.faults) == {peer.peer}
        assert statistics.faults[peer.peer].count == statistics.num_malformed() == 4
        assert "peer speaks" in statistics.faults[peer.peer].last
        await other.send(heartbeat(8))
        assert (await learner.receive())[0] == other.peer

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
        assert set(learner.statistics().peers) == {last.peer}

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


def test_cancelling_receive_loses_no_message(site: Site) -> None:
    """Cancel again and again while messages come in; every one is received once, in order."""

    async def main() -> None:
        learner = site.learner()
        peer = site.peer(learner)
        await learner.receive()
        got: list[Message] = []

        async def collect() -> None:
            while not isinstance(message := (await learner.receive())[1], Goodbye):
                got.append(message)

        async def interrupt() -> None:
            for number in range(2000):
                collecting = asyncio.create_task(collect())
                await peer.send(heartbeat(number))
                for _ in range(number % 4):
                    await asyncio.sleep(0)
                collecting.cancel()
                await asyncio.wait([collecting])

        await interrupt()
        await peer.send(Goodbye(reason="done"))
        await collect()
        assert got == [heartbeat(number) for number in range(2000)]

    run(main)


def test_a_flood_of_messages_does_not_starve_other_tasks(site: Site) -> None:
    async def main() -> None:
        learner = site.learner()
        peer = site.peer(learner)
        await learner.receive()
        for number in range(500):
            await peer.send(heartbeat(number))
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        for _ in range(500):
            await learner.receive()
        beside.cancel()
        assert turns >= 400

    run(main)


def test_sending_does_not_hide_what_comes_in_meanwhile_from_who_waits_for_it(site: Site) -> None:
    """zmq says once that something has come, to whichever call is the next one."""

    async def main() -> None:
        learner = site.learner()
        peer = site.peer(learner)
        await learner.receive()
        for number in range(40):
            waiting = asyncio.create_task(learner.receive())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await peer.send(heartbeat(number))
            for _ in range(20):  # it comes in during one of these
                learner.send(peer.peer, Welcome(version=number))
            async with asyncio.timeout(5):
                assert await waiting == (peer.peer, heartbeat(number))

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
        assert second.statistics().num_sent == 1
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


def test_peers_may_connect_before_the_learner_is_there(ipc: Site) -> None:
    async def main() -> None:
        address = ipc_address(ipc.directory)
        peer = ipc.open.enter_context(PeerChannel(address, hello()))
        await peer.send(heartbeat())
        learner = ipc.learner(address)
        assert await learner.receive() == (peer.peer, hello())
        assert await learner.receive() == (peer.peer, heartbeat())

    run(main)


def test_a_restarted_peer_is_another_peer(ipc: Site) -> None:
    async def main() -> None:
        learner = ipc.learner()
        names = {(await learner.receive())[0] for _ in range(3) if ipc.peer(learner)}
        assert len(names) == 3
        assert all(name.startswith("actor-0/") for name in names)

    run(main)


def test_a_frame_over_the_limit_ends_the_connection_and_not_the_learner(ipc: Site) -> None:
    async def main() -> None:
        small = Limits(max_header_bytes=1000, max_tokens=1000)
        address = ipc_address(ipc.directory)
        learner = ipc.open.enter_context(
            LearnerChannel(address, build="b1", config_digest="c1", limits=small)
        )
        peer = ipc.peer(learner)
        await learner.receive()
        ipc.send_raw(peer, [bytes(5000)])
        other = ipc.peer(learner, hello("actor-1"))
        assert (await learner.receive())[0] == other.peer

    run(main)


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_peer_whose_connection_zmq_has_given_up_makes_it_anew_and_says_hello(
    kind: str, tmp_path: Path
) -> None:
    async def main() -> None:
        site, small = Site(kind, tmp_path), Limits(max_header_bytes=1000, max_tokens=1000)
        with site.open:
            learner = site.learner()
            assert isinstance(learner, LearnerChannel)
            peer = site.open.enter_context(PeerChannel(learner.address, hello(), limits=small))
            assert await learner.receive() == (peer.peer, hello())
            hearing = asyncio.create_task(peer.receive())
            over = bytes(small.max_peer_frame_bytes() + 1)
            learner._socket.send_multipart([peer.peer.encode(), over])
            assert await learner.receive() == (peer.peer, hello())
            learner.send(peer.peer, Welcome(version=3, weights_path="w"))
            assert await hearing == Welcome(version=3, weights_path="w")
            await peer.send(heartbeat(7))
            assert await learner.receive() == (peer.peer, heartbeat(7))

    run(main)


def test_a_thousand_questions_get_a_thousand_answers(site: Site) -> None:
    async def main() -> None:
        learner = site.learner()
        peer = site.peer(learner)
        await learner.receive()
        answer = Acknowledge(grant=1, epoch=0, trial=0, is_duplicate=False)
        for _ in range(1000):
            await peer.send(heartbeat())
            name, _ = await learner.receive()
            learner.send(name, answer)
            assert await peer.receive() == answer
        assert learner.statistics().num_sent == 1000

    run(main)
