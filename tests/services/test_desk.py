"""The desk's decisions, message by message, on the real ledger and door; time is set by hand."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from mage_async.admission import SlotLedger
from mage_async.concurrency import Concurrency
from mage_async.config import Curriculum
from mage_async.environments.catalogue import load
from mage_async.errors import RunError
from mage_async.policy_version import VersionRun
from mage_async.task_stream import TaskStream
from mage_async.trajectory import Segment, Task, Trial
from mage_async.wire import (
    Acknowledge,
    Goodbye,
    GroupDrop,
    GroupGrant,
    Heartbeat,
    Hello,
    Loaded,
    Message,
    Publication,
    TrialResult,
    Unwanted,
    Welcome,
    WhoAreYou,
    decode,
)
from mage_services.desk import FIRST_BEAT_S, SILENCE_S, Desk, DeskRules
from mage_services.testing import MemoryJournal, MemoryLearnerChannel, MemoryPeerChannel

GROUPS_PER_STEP, MAX_STALENESS, TRIALS = 2, 1, 2
DEADLINE_S = 60.0


@dataclass
class Site:
    """A desk with peers in memory, and the clock it looks at."""

    now: float = 100.0
    channel: MemoryLearnerChannel = field(default_factory=MemoryLearnerChannel)
    journal: MemoryJournal = field(default_factory=MemoryJournal)

    def __post_init__(self) -> None:
        ledger = SlotLedger(GROUPS_PER_STEP, MAX_STALENESS, TRIALS, max_expiries=2)
        rules = DeskRules(
            num_episodes=3,
            deadline_s=DEADLINE_S,
            max_drops_in_a_row=3,
            evaluate_every=2,
            last_version=3,
        )
        tasks = TaskStream(load("rps"), 0)
        self.desk = Desk(self.channel, ledger, self.journal, tasks, rules, lambda: self.now)

    async def connect(self, name: str = "actor-0", credits: int = 10) -> MemoryPeerChannel:
        """An actor that has said hello, or an evaluator where the name says so."""
        role = "evaluator" if name == "evaluator" else "actor"
        hello = Hello(role=role, name=name, build="test", config_digest="test", credits=credits)
        peer = self.channel.connect(hello)
        await self.hear()
        return peer

    async def say(self, peer: MemoryPeerChannel, *messages: Message) -> None:
        """Messages of a peer, taken by the desk one by one."""
        for message in messages:
            await peer.send(message)
            await self.hear()

    async def hear(self) -> None:
        self.desk.take(*await self.channel.receive())

    def pass_time(self, seconds: float) -> None:
        """As the learner's clock does it, tick by tick."""
        for _ in range(round(seconds)):
            self.now += 1.0
            self.desk.tick()

    def publish(self, version: int) -> None:
        """As the learner does after a step."""
        self.desk.trained(version)
        self.desk.publish(publication(version))


def publication(version: int) -> Publication:
    return Publication(version=version, path=f"/weights/{version}", digest=f"d{version}")


def heartbeat(name: str = "actor-0", completions: float = 1.0) -> Heartbeat:
    counters = {"num_completions": completions}
    return Heartbeat(name=name, counters=counters, blocked_s={"no grant": 2.0})


def result(grant: GroupGrant, index: int) -> TrialResult:
    """The shortest trial there can be."""
    task = Task(grant.environment, grant.member, grant.seed, grant.seat)
    segment = Segment(
        np.ones(1, np.int32), np.ones(1, bool), np.zeros(1, np.float32), (VersionRun(0, 0, 0),)
    )
    trial = Trial(task, index, grant.num_episodes, (segment,), ())
    return TrialResult(grant.grant, grant.epoch, trial)


def results(*grants: GroupGrant) -> list[TrialResult]:
    return [result(grant, index) for grant in grants for index in range(TRIALS)]


async def read(peer: MemoryPeerChannel) -> list[Message]:
    """All that waits for a peer; what was sent in memory has arrived."""
    return [await peer.receive() for _ in range(len(peer._inbox._waiting))]


def grants(messages: Sequence[Message]) -> list[GroupGrant]:
    return [message for message in messages if isinstance(message, GroupGrant)]


def run(main: Callable[[Site], Awaitable[None]]) -> None:
    async def begin() -> None:
        await main(Site())

    asyncio.run(begin())


def test_nobody_is_welcomed_or_granted_anything_before_there_are_weights() -> None:
    async def main(site: Site) -> None:
        actor = await site.connect()
        assert await read(actor) == []
        site.desk.open(publication(0))
        welcome, *rest = await read(actor)
        assert welcome == Welcome(version=0, weights_path="/weights/0")
        assert len(grants(rest)) == len(rest) == 4

    run(main)


def test_with_a_lag_actors_play_old_weights_and_evaluators_measure_new_ones() -> None:
    async def main(site: Site) -> None:
        site.desk.rules = replace(site.desk.rules, lag=1)
        site.desk.ledger.lag = 1
        actor, evaluator = await site.connect(), await site.connect("evaluator")
        site.desk.open(publication(0))
        await site.say(actor, Loaded(version=0))
        for version in (1, 2):
            granted = grants(await read(actor))
            await site.say(actor, *results(*granted[-GROUPS_PER_STEP:]))
            await site.say(actor, *results(*granted))
            assert site.desk.take_batch() is not None
            site.publish(version)
        heard = await read(actor)
        assert [m.version for m in heard if isinstance(m, Publication)] == [1]
        assert {grant.version for grant in grants(heard)} == {1}
        measured = [m.version for m in await read(evaluator) if isinstance(m, Publication)]
        assert measured == [2]

    run(main)


def test_a_group_is_granted_the_horizon_of_its_version_and_keeps_it() -> None:
    async def main(site: Site) -> None:
        rules = Curriculum(steps=1, turns=[2, 4], episodes=[1, 3])
        site.desk.rules = replace(site.desk.rules, curriculum=rules)
        actor = await site.connect()
        site.desk.open(publication(0))
        first = grants(await read(actor))
        assert {(each.num_episodes, each.max_turns) for each in first} == {(1, 2)}
        await site.say(actor, *results(*first[:GROUPS_PER_STEP]))
        assert site.desk.take_batch() is not None
        site.publish(1)
        later = grants(await read(actor))
        assert {(each.num_episodes, each.max_turns) for each in later} == {(3, 4)}
        other = await site.connect("actor-1")
        await site.say(actor, Goodbye(reason="leaving"))
        again = [each for each in grants(await read(other)) if each.epoch == 1]
        by_grant = {each.grant: (each.num_episodes, each.max_turns) for each in (*first, *later)}
        assert again
        assert all((e.num_episodes, e.max_turns) == by_grant[e.grant] for e in again)

    run(main)


def test_age_aware_concurrency_limits_the_groups_in_play() -> None:
    async def main(site: Site) -> None:
        site.desk.pace = Concurrency(4, GROUPS_PER_STEP, MAX_STALENESS, target=0.01, warm=2)
        site.desk.open(publication(0))
        actor = await site.connect()
        granted = grants(await read(actor))
        site.now += 30.0  # of 60 until the deadline
        await site.say(actor, *results(*granted[:GROUPS_PER_STEP]))
        assert site.desk.take_batch() is not None
        site.desk.keep_pace(1.0)
        assert site.desk.ledger.concurrency == 1
        site.publish(1)
        assert grants(await read(actor)) == []  # two slots are free, and two groups in play

    run(main)


def test_grants_end_with_the_slots() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        granted = grants(await read(await site.connect(credits=10)))
        assert [grant.grant for grant in granted] == [0, 1, 2, 3]
        assert {(g.version, g.epoch, g.num_trials, g.num_episodes) for g in granted} == {
            (0, 0, TRIALS, 3)
        }

    run(main)


def test_grants_end_with_an_actors_credits_and_come_again_when_one_is_free() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        actor = await site.connect(credits=1)
        (first,) = grants(await read(actor))
        await site.say(actor, result(first, 0))
        assert grants(await read(actor)) == []
        await site.say(actor, result(first, 1))
        (second,) = grants(await read(actor))
        assert (second.grant, second.seed != first.seed) == (1, True)

    run(main)


def test_the_actor_with_the_most_free_credits_is_granted_the_next_group() -> None:
    async def main(site: Site) -> None:
        small, large = await site.connect("small", 1), await site.connect("large", 3)
        site.desk.open(publication(0))
        assert [g.grant for g in grants(await read(large))] == [0, 1, 3]
        assert [g.grant for g in grants(await read(small))] == [2]

    run(main)


def test_a_silent_actors_groups_go_to_another_with_the_same_seed_and_the_next_epoch() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        silent = await site.connect("silent", 2)
        await site.say(silent, heartbeat("silent"))
        lost = grants(await read(silent))
        site.now += SILENCE_S + 1
        other = await site.connect("other", 2)
        await read(other)
        site.desk.tick()
        assert site.desk.faults == [f"{silent.peer}: silent for {SILENCE_S:g} s"]
        third, fourth = await site.connect("third", 2), grants(await read(other))
        again = grants(await read(third))
        assert fourth == []  # its credits went to new groups before the silence was noticed
        assert [(g.grant, g.epoch, g.seed, g.member) for g in again] == [
            (g.grant, 1, g.seed, g.member) for g in lost
        ]

    run(main)


def test_an_actor_that_speaks_again_is_granted_groups_again() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        actor = await site.connect(credits=4)
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
        site.desk.open(publication(0))
        actor = await site.connect(credits=1)
        await read(actor)
        for _ in range(round(DEADLINE_S) - 1):
            await site.say(actor, heartbeat())
            site.pass_time(1)
        await site.say(
            actor,
            Hello(role="actor", name="actor-0", build="test", config_digest="test", credits=2),
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
        site.desk.open(publication(0))
        actor = await site.connect(credits=1)
        await site.say(actor, heartbeat())
        (grant,) = grants(await read(actor))
        site.pass_time(1)
        site.now += 10 * DEADLINE_S  # stopped
        site.desk.tick()
        assert site.desk.faults == ["the learner itself did not run for 600.0 s"]
        assert site.desk.ledger.playing(actor.peer) == ((grant.grant, 0),)
        site.pass_time(SILENCE_S + 1)
        assert site.desk.ledger.owners() == set()

    run(main)


def test_a_closed_desk_grants_nothing_and_takes_results_in() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        actor = await site.connect(credits=1)
        (grant,) = grants(await read(actor))
        site.desk.close()
        await site.say(actor, *results(grant))
        assert [type(message) for message in await read(actor)] == [Acknowledge] * TRIALS

    run(main)


def test_all_are_heard_when_the_evaluator_and_every_owner_of_a_group_said_hello() -> None:
    async def main(site: Site) -> None:
        task = site.desk.tasks.task(0)
        peer = "actor-0/0"
        site.desk.ledger.grant(task, num_episodes=3, peer=peer, now=site.now, deadline_s=DEADLINE_S)
        site.desk.open(publication(0))
        heard = [site.desk.has_heard_all()]
        for name in ("actor-0", "evaluator"):
            site.desk.greeted.clear()
            await site.connect(name)
            assert site.desk.greeted.is_set()
            heard.append(site.desk.has_heard_all())
        assert heard == [False, False, True]

    run(main)


def test_with_a_lag_a_restarted_learners_actors_get_the_weights_they_would_have_had() -> None:
    async def main(site: Site) -> None:
        site.desk.rules = replace(site.desk.rules, lag=1)
        actor, evaluator = await site.connect(), await site.connect("evaluator")
        site.desk.open(publication(4), publication(5))
        assert (await read(actor))[0].version == 4
        assert (await read(evaluator))[0].version == 5

    run(main)


def test_an_actor_that_makes_its_engine_is_not_silent() -> None:
    async def main(site: Site) -> None:
        actor = await site.connect()
        site.pass_time(10 * FIRST_BEAT_S)  # a long warm start
        site.desk.open(publication(0))
        site.pass_time(SILENCE_S + 1)  # the engine is being made
        await site.say(actor, heartbeat())
        site.desk.tick()
        assert site.desk.faults == []
        assert {g.epoch for g in grants(await read(actor))} == {0}

    run(main)


def test_an_actor_that_never_beats_is_silent_in_the_end() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        actor = await site.connect()
        site.now += FIRST_BEAT_S + 1
        site.desk.tick()
        assert site.desk.faults == [f"{actor.peer}: silent for 60 s"]

    run(main)


@pytest.mark.parametrize("how", ["goodbye", "connection ended"])
def test_a_gone_actors_groups_are_granted_again(how: str) -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        leaving = await site.connect("leaving", 1)
        (lost,) = grants(await read(leaving))
        if how == "goodbye":
            await site.say(leaving, Goodbye(reason="told to end"))
        else:
            await site.say(leaving, Loaded(version=0))
            leaving.close()
            site.desk.publish(publication(1))  # the next thing sent to it finds out
        (again,) = grants(await read(await site.connect("other", 1)))
        assert (again.grant, again.epoch, again.seed) == (lost.grant, 1, lost.seed)
        assert leaving.peer not in site.desk.peers

    run(main)


def test_a_late_result_counts_once_and_every_copy_is_acknowledged() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        slow = await site.connect("slow", 1)
        (old,) = grants(await read(slow))
        site.now += DEADLINE_S
        site.desk.tick()
        (new,) = grants(await read(slow))
        await site.say(slow, result(old, 0), result(new, 0))
        first, second = await read(slow)
        assert first == Acknowledge(grant=0, epoch=0, trial=0, is_duplicate=False)
        assert second == Acknowledge(grant=0, epoch=1, trial=0, is_duplicate=True)
        assert site.desk.counts().duplicate == 1

    run(main)


def test_a_result_nobody_was_granted_is_noted_and_unwanted() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        actor = await site.connect(credits=1)
        (grant,) = grants(await read(actor))
        invented = TrialResult(7, 0, result(grant, 0).trial)
        await site.say(actor, invented)
        (answer,) = await read(actor)
        assert (type(answer), answer.grant, answer.trial) == (Unwanted, 7, 0)
        assert "group 7 was never granted" in answer.reason
        assert site.desk.faults == [f"{actor.peer}: {answer.reason}"]

    run(main)


def test_a_complete_batch_wakes_the_learner() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        actor = await site.connect()
        first, second, *_ = grants(await read(actor))
        await site.say(actor, *results(second))
        assert site.desk.take_batch() is None
        site.desk.arrived.clear()
        await site.say(actor, *results(first))
        assert site.desk.arrived.is_set()
        batch = site.desk.take_batch()
        assert batch is not None
        assert [group.grant for group in batch] == [0, 1]

    run(main)


def test_a_slot_is_free_when_its_step_is_published_and_not_before() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        actor = await site.connect()
        await site.say(actor, *results(*grants(await read(actor))))
        assert site.desk.take_batch() is not None
        assert grants(await read(actor)) == []
        site.publish(1)
        assert [(g.grant, g.version) for g in grants(await read(actor))] == [(4, 1), (5, 1)]

    run(main)


def test_a_publication_comes_before_the_grants_made_at_its_version() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        actor = await site.connect()
        await site.say(actor, Loaded(version=0), *results(*grants(await read(actor))))
        site.desk.take_batch()
        await read(actor)
        site.publish(1)
        published, *granted = await read(actor)
        assert published == publication(1)
        assert [grant.version for grant in grants(granted)] == [1, 1]

    run(main)


def test_the_evaluator_hears_of_measured_versions_and_the_last_only() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        actor, evaluator = await site.connect(credits=0), await site.connect("evaluator", 0)
        for version in (1, 2, 3):
            await site.say(actor, Loaded(version=version - 1))
            site.desk.publish(publication(version))
        assert await read(actor) == [
            Welcome(version=0, weights_path="/weights/0"),
            *map(publication, (1, 2, 3)),
        ]
        assert await read(evaluator) == [
            Welcome(version=0, weights_path="/weights/0"),
            *map(publication, (2, 3)),
        ]

    run(main)


def test_an_evaluator_may_be_silent_and_is_granted_nothing() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        evaluator = await site.connect("evaluator", 4)
        site.now += 10 * FIRST_BEAT_S
        site.desk.tick()
        assert await read(evaluator) == [Welcome(version=0, weights_path="/weights/0")]
        assert site.desk.faults == []

    run(main)


def test_drops_in_a_row_end_the_run_with_the_last_reason() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        actor = await site.connect()
        first, second, third, _ = grants(await read(actor))
        for grant in (first, second):
            await site.say(actor, GroupDrop(grant=grant.grant, epoch=0, reason="no such opponent"))
        last = GroupDrop(grant=third.grant, epoch=0, reason="rps: raised KeyError: 'spock'")
        with pytest.raises(
            RunError,
            match="3 groups in a row were dropped; the last one: rps: raised KeyError: 'spock'",
        ):
            await site.say(actor, last)

    run(main)


def test_a_published_step_between_drops_lets_the_run_go_on() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        actor = await site.connect()
        first, second, *others = grants(await read(actor))
        drops = [GroupDrop(grant=g.grant, epoch=0, reason="bad luck") for g in (first, second)]
        await site.say(actor, *drops, *results(*others))
        assert site.desk.take_batch() is not None
        site.publish(1)
        later = grants(await read(actor))
        await site.say(actor, GroupDrop(grant=later[0].grant, epoch=0, reason="bad luck"))
        assert site.desk.counts().drops_in_a_row == 1

    run(main)


def test_a_group_that_always_misses_its_deadline_is_dropped_and_wakes_the_learner() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        actor = await site.connect(credits=3)
        _, *others = grants(await read(actor))
        await site.say(actor, *results(*others))
        site.desk.arrived.clear()
        for _ in range(2 * round(DEADLINE_S)):
            await site.say(actor, heartbeat())
            site.pass_time(1)
        assert site.desk.arrived.is_set()
        assert site.desk.counts().dropped_by_reason == {"missed its deadline 2 times": 2}

    run(main)


def test_a_restarted_process_of_the_same_name_replaces_the_old_one() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        before = await site.connect("actor-3", 1)
        (lost,) = grants(await read(before))
        after = await site.connect("actor-3", 1)
        (again,) = grants(await read(after))
        assert (again.grant, again.epoch) == (lost.grant, 1)
        assert list(site.desk.peers) == [after.peer]

    run(main)


def test_a_stranger_is_asked_who_it_is_and_its_result_is_taken_all_the_same() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        before = await site.connect("actor-3", 1)
        (grant,) = grants(await read(before))
        await site.connect("actor-3", 0)
        await site.say(before, result(grant, 0))
        assert isinstance(decoded(before), WhoAreYou)
        assert site.desk.counts().acknowledged == 1
        await site.say(before, heartbeat("actor-3"))  # and is no fault
        assert site.desk.shares() == {}

    run(main)


def decoded(peer: MemoryPeerChannel) -> Message:
    """The oldest message that waits for a peer, as it is: `receive` answers WhoAreYou itself."""
    return decode(peer._inbox._waiting[0][1])


def test_counters_are_summed_over_actors_and_shares_are_told_apart() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        for name, completions in (("a", 2.0), ("b", 3.0)):
            await site.say(await site.connect(name), heartbeat(name, completions))
        assert site.desk.counters() == {"num_completions": 5.0}
        assert site.desk.shares() == {"a": {"no grant": 2.0}, "b": {"no grant": 2.0}}

    run(main)


def test_everyone_is_dismissed_with_the_reason() -> None:
    async def main(site: Site) -> None:
        peers = [await site.connect(name) for name in ("actor-0", "evaluator")]
        site.desk.dismiss("the run is complete")
        for peer in peers:
            assert await read(peer) == [Goodbye(reason="the run is complete")]

    run(main)


def test_nothing_is_acknowledged_before_it_is_durable() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        actor = await site.connect(credits=1)
        (grant,) = grants(await read(actor))
        site.journal.is_instant = False
        await site.say(actor, result(grant, 0), result(grant, 0))
        assert await read(actor) == []
        site.journal.sync()
        first, again = await read(actor)
        assert first == Acknowledge(grant=0, epoch=0, trial=0, is_duplicate=False)
        assert again == Acknowledge(grant=0, epoch=0, trial=0, is_duplicate=True)

    run(main)


def test_nobody_is_told_of_a_grant_before_it_is_durable() -> None:
    async def main(site: Site) -> None:
        site.journal.is_instant = False
        site.desk.open(publication(0))
        actor = await site.connect(credits=1)
        assert grants(await read(actor)) == []
        site.journal.sync()
        assert [grant.grant for grant in grants(await read(actor))] == [0]

    run(main)


def test_everything_acknowledged_is_in_what_a_crash_leaves() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        actor = await site.connect()
        await site.say(actor, *results(*grants(await read(actor))))
        told = {(m.grant, m.trial) for m in await read(actor) if isinstance(m, Acknowledge)}
        left = [r for r in site.journal.durable_records() if isinstance(r, TrialResult)]
        assert told == {(r.grant, r.trial.index) for r in left}
        assert len(told) == 4 * TRIALS

    run(main)


def test_a_full_journal_takes_nothing_in_and_asks_again_when_there_is_space() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        actor = await site.connect(credits=1)
        (grant,) = grants(await read(actor))
        site.journal.full = "no space left"
        await site.say(actor, result(grant, 0), result(grant, 1))
        assert await read(actor) == []
        assert site.desk.faults == ["nothing is taken in or granted: no space left"]
        assert site.desk.counts().acknowledged == 0
        site.journal.full = ""
        site.desk.tick()
        welcome, repeated = await read(actor)
        assert welcome == Welcome(version=0, weights_path="/weights/0", keeps=((0, 0),))
        assert (repeated.grant, repeated.epoch) == (grant.grant, grant.epoch)
        await site.say(actor, result(grant, 0))
        assert (await read(actor))[0] == Acknowledge(grant=0, epoch=0, trial=0, is_duplicate=False)

    run(main)


def test_a_peer_that_says_hello_again_is_told_again_what_it_plays() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(0))
        actor = await site.connect(credits=1)
        (grant,) = grants(await read(actor))
        await site.say(actor, result(grant, 1))
        await read(actor)
        hello = Hello(role="actor", name="actor-0", build="test", config_digest="test", credits=1)
        await site.say(actor, hello)
        (again,) = grants(await read(actor))
        assert (again.grant, again.epoch, again.held) == (grant.grant, grant.epoch, (1,))

    run(main)


def test_groups_of_a_peer_that_does_not_come_back_after_a_restart_are_granted_again() -> None:
    async def main(site: Site) -> None:
        task = site.desk.tasks.task(0)
        site.desk.ledger.grant(
            task, num_episodes=3, peer="actor-9/gone", now=site.now, deadline_s=DEADLINE_S
        )
        site.desk.open(publication(0))
        actor = await site.connect(credits=5)
        assert 0 not in {grant.grant for grant in grants(await read(actor))}
        site.now += SILENCE_S + 1
        site.desk.peers[actor.peer].last_heard = site.now
        site.desk.tick()
        (again,) = grants(await read(actor))
        assert (again.grant, again.epoch) == (0, 1)

    run(main)


def test_an_actor_is_told_of_one_version_at_a_time_and_then_of_the_newest() -> None:
    async def main(site: Site) -> None:
        actor = await site.connect(credits=0)
        site.desk.open(publication(0))
        for version in (1, 2, 3):
            site.desk.publish(publication(version))
        assert [type(message) for message in await read(actor)] == [Welcome]
        await site.say(actor, Loaded(version=0))
        assert await read(actor) == [publication(3)]
        await site.say(actor, Loaded(version=3))
        assert await read(actor) == []

    run(main)


def test_weights_stay_while_a_peer_draws_with_them_or_was_told_of_them() -> None:
    async def main(site: Site) -> None:
        fast, slow = await site.connect("actor-0", 0), await site.connect("actor-1", 0)
        site.desk.open(publication(0))
        await site.say(fast, Loaded(version=0))
        for version in (1, 2):
            site.desk.publish(publication(version))
        assert site.desk.unused([0, 1, 2]) == []  # `fast` was told of 1, `slow` of 0
        await site.say(fast, Loaded(version=1), Loaded(version=2))
        assert site.desk.unused([0, 1, 2]) == [1]
        await site.say(slow, Goodbye(reason="tired"))
        assert site.desk.unused([0, 1, 2]) == [0, 1]

    run(main)


def test_an_evaluator_hears_of_every_measured_version_and_each_stays_until_it_is_read() -> None:
    async def main(site: Site) -> None:
        evaluator = await site.connect("evaluator")
        site.desk.open(publication(0))
        for version in (1, 2, 3):
            site.desk.publish(publication(version))
        heard = [m.version for m in await read(evaluator) if isinstance(m, Publication)]
        assert heard == [2, 3]  # every second one, and the last
        assert site.desk.unused([0, 1, 2, 3]) == [1]
        await site.say(evaluator, Loaded(version=2))
        assert site.desk.unused([0, 1, 2, 3]) == [0, 1]

    run(main)


def test_weights_of_an_earlier_life_stay_until_its_peers_are_back_or_forgotten() -> None:
    async def main(site: Site) -> None:
        site.desk.open(publication(2), earlier=[1, 2])
        assert site.desk.unused([1, 2]) == []
        site.now += SILENCE_S + 1
        site.desk.tick()
        assert site.desk.unused([1, 2]) == [1]

    run(main)
