"""Peers that fall silent, go, come back or are strangers, as the coordinator sees them."""

import asyncio

import pytest

from mage_async.protocol.codec import decode
from mage_async.protocol.messages import Goodbye, Hello, Loaded, Message, Welcome, WhoAreYou
from mage_services.learner.coordinator import FIRST_HEARTBEAT_S, LOST_INTERVALS, SILENCE_S
from tests.helpers.coordinator_site import (
    DEADLINE_S,
    Site,
    grants,
    heartbeat,
    publication,
    read,
    result,
    run,
)
from tests.helpers.memory_channels import MemoryPeerChannel


def test_a_silent_actors_groups_go_to_another_with_the_same_seed_and_the_next_epoch() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        silent = await site.connect("silent", 2)
        await site.say(silent, heartbeat("silent"))
        lost = grants(await read(silent))
        site.now += SILENCE_S + 1
        other = await site.connect("other", 2)
        await read(other)
        site.coordinator.tick()
        assert site.coordinator.faults == [f"{silent.peer}: silent for {SILENCE_S:g} s"]
        third, fourth = await site.connect("third", 2), grants(await read(other))
        again = grants(await read(third))
        assert fourth == []  # its credits went to new groups before the silence was noticed
        assert [(g.grant, g.epoch, g.seed, g.member) for g in again] == [
            (g.grant, 1, g.seed, g.member) for g in lost
        ]

    run(main)


def test_it_is_said_once_that_actors_have_room_for_more_groups_than_may_be_granted() -> None:
    async def main(site: Site) -> None:
        site.coordinator.ledger.max_concurrent_groups = 3
        for name in ("first", "second", "third"):
            await site.connect(name, 2)
        (said,) = site.coordinator.faults
        assert said.startswith("the actors could play 4 groups at a time")
        assert said.endswith(" allow 3: some actors will be idle")

    run(main)


def test_an_actor_that_speaks_again_is_granted_groups_again() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect(group_quota=4)
        await site.say(actor, heartbeat())
        lost = grants(await read(actor))
        site.pass_time(SILENCE_S + 1)
        assert await read(actor) == []
        await site.say(actor, heartbeat())
        welcome, *again = await read(actor)
        assert welcome == Welcome(version=0, weights_path="/weights/0", keeps=())
        assert [(g.grant, g.epoch) for g in grants(again)] == [(g.grant, 1) for g in lost]
        assert len(again) == 4

    run(main)


def test_an_actor_that_missed_a_deadline_is_told_what_it_may_go_on_with() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect(group_quota=1)
        await read(actor)
        for _ in range(round(DEADLINE_S) - 1):
            await site.say(actor, heartbeat())
            site.pass_time(1)
        await site.say(
            actor,
            Hello(role="actor", name="actor-0", build="test", config_digest="test", group_quota=2),
        )
        (kept,) = [g for g in grants(await read(actor)) if g.grant == 1]
        site.pass_time(1)
        assert grants(await read(actor)) == []  # its hello renewed its deadlines
        for _ in range(round(DEADLINE_S) - 1):
            await site.say(actor, heartbeat())
            site.pass_time(1)
        welcome, *again = await read(actor)
        assert isinstance(welcome, Welcome)
        assert welcome.keeps == ()
        assert {(g.grant, g.epoch) for g in grants(again)} == {(0, 1), (kept.grant, 1)}

    run(main)


def test_nobody_was_silent_or_late_while_the_learner_itself_did_not_run() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect(group_quota=1)
        await site.say(actor, heartbeat())
        (grant,) = grants(await read(actor))
        site.pass_time(1)
        site.now += 10 * DEADLINE_S  # stopped
        site.coordinator.tick()
        assert site.coordinator.faults == ["the learner itself did not run for 600.0 s"]
        assert site.coordinator.ledger.played_by(actor.peer) == ((grant.grant, 0),)
        site.pass_time(SILENCE_S + 1)
        assert site.coordinator.ledger.playing_peers() == set()

    run(main)


def test_all_are_heard_when_the_evaluator_and_every_owner_of_a_group_said_hello() -> None:
    async def main(site: Site) -> None:
        task = site.coordinator.tasks.task(0)
        peer = "actor-0/0"
        site.coordinator.ledger.grant(
            task, num_episodes=3, peer=peer, now=site.now, deadline_s=DEADLINE_S
        )
        site.coordinator.open(publication(0))
        heard = [site.coordinator.has_all_hellos()]
        for name in ("actor-0", "evaluator"):
            site.coordinator.greeted.clear()
            await site.connect(name)
            assert site.coordinator.greeted.is_set()
            heard.append(site.coordinator.has_all_hellos())
        assert heard == [False, False, True]

    run(main)


def test_an_actor_that_makes_its_engine_is_not_silent() -> None:
    async def main(site: Site) -> None:
        actor = await site.connect()
        site.pass_time(10 * FIRST_HEARTBEAT_S)  # a long warm start
        site.coordinator.open(publication(0))
        site.pass_time(SILENCE_S + 1)  # the engine is being made
        await site.say(actor, heartbeat())
        site.coordinator.tick()
        assert site.coordinator.faults == []
        assert {g.epoch for g in grants(await read(actor))} == {0}

    run(main)


def test_an_actor_that_never_beats_is_silent_in_the_end() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect()
        site.now += FIRST_HEARTBEAT_S + 1
        site.coordinator.tick()
        assert site.coordinator.faults == [f"{actor.peer}: silent for 60 s"]

    run(main)


def test_an_actor_that_is_silent_for_good_is_forgotten_and_welcomed_if_it_speaks_after_all() -> (
    None
):
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect(group_quota=1)
        await site.say(actor, heartbeat())
        await read(actor)
        site.pass_time(LOST_INTERVALS * SILENCE_S)
        assert list(site.coordinator.peers) == list(site.channel.access.peers) == [actor.peer]
        site.pass_time(1)
        assert not site.coordinator.peers
        assert not site.channel.access.peers
        assert (
            site.coordinator.faults[-1] == f"{actor.peer}: forgotten, it has been silent for 121 s"
        )
        await actor.send(heartbeat())
        hearing = asyncio.create_task(site.hear())
        assert isinstance(await actor.receive(), Welcome)
        await hearing
        assert list(site.coordinator.peers) == [actor.peer]
        assert len(grants(await read(actor))) == 1

    run(main)


def test_an_actor_that_makes_a_large_engine_is_not_forgotten() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect()
        site.pass_time(LOST_INTERVALS * FIRST_HEARTBEAT_S)
        assert list(site.coordinator.peers) == [actor.peer]
        site.pass_time(1)
        assert not site.coordinator.peers

    run(main)


@pytest.mark.parametrize("how", ["goodbye", "connection ended"])
def test_a_gone_actors_groups_are_granted_again(how: str) -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        leaving = await site.connect("leaving", 1)
        (lost,) = grants(await read(leaving))
        if how == "goodbye":
            await site.say(leaving, Goodbye(reason="told to end"))
        else:
            await site.say(leaving, Loaded(version=0))
            leaving.close()
            site.coordinator.publish(publication(1))  # the next thing sent to it finds out
        (again,) = grants(await read(await site.connect("other", 1)))
        assert (again.grant, again.epoch, again.seed) == (lost.grant, 1, lost.seed)
        assert leaving.peer not in site.coordinator.peers

    run(main)


def test_an_evaluator_may_be_silent_and_is_granted_nothing() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        evaluator = await site.connect("evaluator", 4)
        site.now += 10 * FIRST_HEARTBEAT_S
        site.coordinator.tick()
        assert await read(evaluator) == [Welcome(version=0, weights_path="/weights/0")]
        assert site.coordinator.faults == []

    run(main)


def test_a_restarted_process_of_the_same_name_replaces_the_old_one() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        before = await site.connect("actor-3", 1)
        (lost,) = grants(await read(before))
        after = await site.connect("actor-3", 1)
        (again,) = grants(await read(after))
        assert (again.grant, again.epoch) == (lost.grant, 1)
        assert list(site.coordinator.peers) == [after.peer]

    run(main)


def test_a_stranger_is_asked_who_it_is_and_its_result_is_taken_all_the_same() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        before = await site.connect("actor-3", 1)
        (grant,) = grants(await read(before))
        await site.connect("actor-3", 0)
        await site.say(before, result(grant, 0))
        assert isinstance(decoded(before), WhoAreYou)
        assert site.coordinator.ledger.counts().acknowledged == 1
        await site.say(before, heartbeat("actor-3"))  # and is no fault
        assert site.coordinator.blocked_s() == {}

    run(main)


def test_whoever_a_new_learner_does_not_know_is_welcomed_once_however_much_it_had_sent() -> None:
    async def main(site: Site) -> None:
        actor = site.channel.connect(
            Hello(role="actor", name="actor-0", build="test", config_digest="test", group_quota=2)
        )
        await site.channel._inbox.take()  # the learner before has heard that hello
        for _ in range(100):
            await actor.send(heartbeat())
        site.coordinator.open(publication(0))
        hearing = asyncio.create_task(site.hear())
        assert isinstance(await actor.receive(), Welcome)
        await hearing
        assert not site.channel._inbox._waiting  # no second hello
        assert len(grants(await read(actor))) == 2

    run(main)


def decoded(peer: MemoryPeerChannel) -> Message:
    """The oldest message that waits for a peer, as it is: `receive` answers WhoAreYou itself."""
    return decode(peer._inbox._waiting[0][1])


def test_shares_of_actors_are_told_apart() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        for name in ("a", "b"):
            await site.say(await site.connect(name), heartbeat(name))
        assert site.coordinator.blocked_s() == {
            "a": {"no grant": 2.0},
            "b": {"no grant": 2.0},
        }

    run(main)


def test_everyone_is_dismissed_with_the_reason() -> None:
    async def main(site: Site) -> None:
        peers = [await site.connect(name) for name in ("actor-0", "evaluator")]
        site.coordinator.dismiss("the run is complete")
        for peer in peers:
            assert await read(peer) == [Goodbye(reason="the run is complete")]

    run(main)


def test_a_peer_that_says_hello_again_is_told_again_what_it_plays() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect(group_quota=1)
        (grant,) = grants(await read(actor))
        await site.say(actor, result(grant, 1))
        await read(actor)
        hello = Hello(
            role="actor", name="actor-0", build="test", config_digest="test", group_quota=1
        )
        await site.say(actor, hello)
        (again,) = grants(await read(actor))
        assert (again.grant, again.epoch, again.held) == (grant.grant, grant.epoch, (1,))

    run(main)


def test_groups_of_a_peer_that_does_not_come_back_after_a_restart_are_granted_again() -> None:
    async def main(site: Site) -> None:
        task = site.coordinator.tasks.task(0)
        site.coordinator.ledger.grant(
            task, num_episodes=3, peer="actor-9/gone", now=site.now, deadline_s=DEADLINE_S
        )
        site.coordinator.open(publication(0))
        actor = await site.connect(group_quota=5)
        assert 0 not in {grant.grant for grant in grants(await read(actor))}
        site.now += SILENCE_S + 1
        site.coordinator.peers[actor.peer].last_message_at = site.now
        site.coordinator.tick()
        (again,) = grants(await read(actor))
        assert (again.grant, again.epoch) == (0, 1)
        # True after `--resume` too, where all processes are new and nothing is amiss.
        (note,) = site.coordinator.faults
        assert note.startswith("actor-9/gone played groups before the learner's start and has")

    run(main)
