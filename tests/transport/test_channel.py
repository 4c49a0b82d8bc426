"""Messages go both ways, over real sockets and over their twins in memory."""

import asyncio

import numpy as np

from mage_async.protocol.limits import DEFAULT_LIMITS
from mage_async.protocol.messages import (
    Acknowledge,
    Goodbye,
    Hello,
    Message,
    TrialResult,
    Welcome,
)
from mage_services.transport.channels import PeerChannel
from mage_services.transport.sockets import ipc_address
from tests.helpers.channel_site import Site, heartbeat, hello, run, trial


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


def test_the_longest_trial_arrives_whole(site: Site) -> None:
    async def main() -> None:
        learner = site.learner()
        peer = site.peer(learner)
        await learner.receive()
        longest = trial(DEFAULT_LIMITS.max_tokens)
        await peer.send(longest)
        _, message = await learner.receive()
        assert isinstance(message, TrialResult)
        (sent,), (got,) = longest.trial.segments, message.trial.segments
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
            async with asyncio.timeout(60):
                assert await waiting == (peer.peer, heartbeat(number))

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

    run(main)
