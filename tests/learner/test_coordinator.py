"""The coordinator's decisions, message by message, on the real ledger and access control."""

from dataclasses import replace

import msgspec
import pytest

from mage_async.admission.concurrent_groups import Concurrency
from mage_async.config.schema import Config
from mage_async.environments.catalogue import load
from mage_async.errors import RunError
from mage_async.methods.method import Methods
from mage_async.protocol.messages import (
    Acknowledge,
    EpisodeResult,
    Goodbye,
    GroupDrop,
    GroupGrant,
    TrialResult,
    Unwanted,
    Welcome,
)
from mage_async.results.progress import Progress, sentence
from mage_async.trajectory import FinishedEpisodes, Kind, Turn
from tests.helpers.coordinator_site import (
    DEADLINE_S,
    GROUPS_PER_STEP,
    MAX_STALENESS,
    TRIALS,
    Site,
    grants,
    heartbeat,
    publication,
    read,
    result,
    results,
    run,
)


def test_nobody_is_welcomed_or_granted_anything_before_there_are_weights() -> None:
    async def main(site: Site) -> None:
        actor = await site.connect()
        assert await read(actor) == []
        site.coordinator.open(publication(0))
        welcome, *rest = await read(actor)
        assert welcome == Welcome(version=0, weights_path="/weights/0")
        assert len(grants(rest)) == len(rest) == 4

    run(main)


def test_a_group_is_granted_the_horizon_of_its_version_and_keeps_it() -> None:
    async def main(site: Site) -> None:
        stages = {"steps": 1, "turns": [2, 4], "episodes": [1, 3]}
        site.coordinator.methods = Methods(Config(methods={"scaling_inter": stages}))
        actor = await site.connect()
        site.coordinator.open(publication(0))
        first = grants(await read(actor))
        assert {(each.num_episodes, each.max_turns) for each in first} == {(1, 2)}
        await site.say(actor, *results(*first[:GROUPS_PER_STEP]))
        assert site.coordinator.ledger.take_batch() is not None
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
        site.coordinator.concurrency = Concurrency(
            4, GROUPS_PER_STEP, MAX_STALENESS, target=0.01, min_groups=2
        )
        site.coordinator.open(publication(0))
        actor = await site.connect()
        granted = grants(await read(actor))
        site.now += 30.0  # of 60 until the deadline
        await site.say(actor, *results(*granted[:GROUPS_PER_STEP]))
        assert site.coordinator.ledger.take_batch() is not None
        site.coordinator.limit_concurrency(1.0)
        assert site.coordinator.ledger.max_concurrent_groups == 1
        site.publish(1)
        assert grants(await read(actor)) == []  # two slots are free, and two groups in play

    run(main)


def test_grants_end_with_the_slots() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        granted = grants(await read(await site.connect(group_quota=10)))
        assert [grant.grant for grant in granted] == [0, 1, 2, 3]
        assert {(g.version, g.epoch, g.num_trials, g.num_episodes) for g in granted} == {
            (0, 0, TRIALS, 3)
        }

    run(main)


def test_grants_end_with_an_actors_credits_and_come_again_when_one_is_free() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect(group_quota=1)
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
        site.coordinator.open(publication(0))
        assert [g.grant for g in grants(await read(large))] == [0, 1, 3]
        assert [g.grant for g in grants(await read(small))] == [2]

    run(main)


def test_a_closed_coordinator_grants_nothing_and_takes_results_in() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect(group_quota=1)
        (grant,) = grants(await read(actor))
        site.coordinator.close()
        await site.say(actor, *results(grant))
        assert [type(message) for message in await read(actor)] == [Acknowledge] * TRIALS

    run(main)


def test_a_late_result_counts_once_and_every_copy_is_acknowledged() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        slow = await site.connect("slow", 1)
        (old,) = grants(await read(slow))
        site.now += DEADLINE_S
        site.coordinator.tick()
        (new,) = grants(await read(slow))
        await site.say(slow, result(old, 0), result(new, 0))
        first, second = await read(slow)
        assert first == Acknowledge(grant=0, epoch=0, trial=0, is_duplicate=False)
        assert second == Acknowledge(grant=0, epoch=1, trial=0, is_duplicate=True)
        assert site.coordinator.ledger.counts().duplicate == 1

    run(main)


def test_a_result_nobody_was_granted_is_noted_and_unwanted() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect(group_quota=1)
        (grant,) = grants(await read(actor))
        invented = TrialResult(7, 0, result(grant, 0).trial)
        await site.say(actor, invented)
        (answer,) = await read(actor)
        assert (type(answer), answer.grant, answer.trial) == (Unwanted, 7, 0)
        assert "group 7 was never granted" in answer.reason
        assert site.coordinator.faults == [f"{actor.peer}: {answer.reason}"]

    run(main)


def test_a_complete_batch_wakes_the_learner() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect()
        first, second, *_ = grants(await read(actor))
        await site.say(actor, *results(second))
        assert site.coordinator.ledger.take_batch() is None
        site.coordinator.arrived.clear()
        await site.say(actor, *results(first))
        assert site.coordinator.arrived.is_set()
        batch = site.coordinator.ledger.take_batch()
        assert batch is not None
        assert [group.grant for group in batch] == [0, 1]

    run(main)


def test_a_slot_is_free_when_its_step_is_published_and_not_before() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect()
        await site.say(actor, *results(*grants(await read(actor))))
        assert site.coordinator.ledger.take_batch() is not None
        assert grants(await read(actor)) == []
        site.publish(1)
        assert [(g.grant, g.version) for g in grants(await read(actor))] == [(4, 1), (5, 1)]

    run(main)


def test_drops_in_a_row_end_the_run_with_the_last_reason() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect()
        first, second, third, _ = grants(await read(actor))
        for grant in (first, second):
            await site.say(actor, GroupDrop(grant=grant.grant, epoch=0, reason="no such opponent"))
        last = GroupDrop(grant=third.grant, epoch=0, reason="rps: raised KeyError: 'spock'")
        with pytest.raises(
            RunError,
            match=r"3 groups in a row were dropped, and 3 end a run. The last drop: rps: "
            r"raised KeyError: 'spock'\. Mend .* go on with --resume",
        ):
            await site.say(actor, last)

    run(main)


def test_complete_groups_between_drops_let_the_run_go_on() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect()
        first, second, *others = grants(await read(actor))
        # No step is trained meanwhile: the training of a large batch may take long.
        for played in (others[:1], others[1:], []):
            drops = [GroupDrop(grant=g.grant, epoch=0, reason="bad luck") for g in (first, second)]
            await site.say(actor, *drops, *results(*played))
            first, second = grants(await read(actor))
        assert site.coordinator.ledger.counts().groups.dropped == 6

    run(main)


def test_a_group_that_always_misses_its_deadline_is_dropped_and_wakes_the_learner() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect(group_quota=3)
        _, *others = grants(await read(actor))
        await site.say(actor, *results(*others))
        site.coordinator.arrived.clear()
        for _ in range(2 * round(DEADLINE_S)):
            playing = site.coordinator.ledger.played_by(actor.peer)
            turns = tuple((*key, 7) for key in playing)
            await site.say(actor, msgspec.structs.replace(heartbeat(), turns=turns))
            site.pass_time(1)
        assert site.coordinator.arrived.is_set()
        assert [drop.num_turns for drop in site.coordinator.ledger.take_drops()] == [7, 7]
        assert site.coordinator.ledger.counts().dropped_by_reason == {
            "missed its deadline 2 times": 2
        }

    run(main)


def test_nothing_is_acknowledged_before_it_is_durable() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect(group_quota=1)
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
        site.coordinator.open(publication(0))
        actor = await site.connect(group_quota=1)
        assert grants(await read(actor)) == []
        site.journal.sync()
        assert [grant.grant for grant in grants(await read(actor))] == [0]

    run(main)


def test_everything_acknowledged_is_in_what_a_crash_leaves() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect()
        await site.say(actor, *results(*grants(await read(actor))))
        told = {(m.grant, m.trial) for m in await read(actor) if isinstance(m, Acknowledge)}
        left = [r for r in site.journal.durable_records() if isinstance(r, TrialResult)]
        assert told == {(r.grant, r.trial.index) for r in left}
        assert len(told) == 4 * TRIALS

    run(main)


def test_no_group_misses_its_deadline_while_the_journal_is_full() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect(group_quota=1)
        (grant,) = grants(await read(actor))
        site.journal.full = "no space left"
        for _ in range(round(3 * DEADLINE_S)):
            site.pass_time(1.0)
            await site.say(actor, heartbeat())
        site.journal.full = ""
        site.coordinator.tick()
        repeated = grants(await read(actor))
        assert [(each.grant, each.epoch) for each in repeated] == [(grant.grant, 0)]

    run(main)


def test_a_full_journal_takes_nothing_in_and_asks_again_when_there_is_space() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect(group_quota=1)
        (grant,) = grants(await read(actor))
        site.journal.full = "no space left"
        await site.say(actor, result(grant, 0), result(grant, 1))
        assert await read(actor) == []
        assert site.coordinator.faults == [
            "no result is accepted and no group is granted: no space left. Make room, and the run "
            "goes on by itself; `journal.max_bytes` bounds the journal"
        ]
        assert site.coordinator.ledger.counts().acknowledged == 0
        site.journal.full = ""
        site.coordinator.tick()
        welcome, repeated = await read(actor)
        assert welcome == Welcome(version=0, weights_path="/weights/0", keeps=((0, 0),))
        assert (repeated.grant, repeated.epoch) == (grant.grant, grant.epoch)
        await site.say(actor, result(grant, 0))
        assert (await read(actor))[0] == Acknowledge(grant=0, epoch=0, trial=0, is_duplicate=False)

    run(main)


def test_the_first_drop_of_each_kind_is_noted_at_once_with_its_cure() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect()
        first, second, third, _ = grants(await read(actor))
        for grant in (first, second):
            reason = f"a completion was not sampled within {grant.grant + 1} s"
            await site.say(actor, GroupDrop(grant=grant.grant, epoch=0, reason=reason))
            assert site.coordinator.faults == [
                "a group is dropped: a completion was not sampled within 1 s. Raise "
                "engine.turn_deadline_s, or lower engine.max_contexts, so that fewer turns share "
                "the engine."
            ]
        reason = "rps against 'x', seed 3: raised KeyError: 'spock'"
        with pytest.raises(RunError, match=r"in a row were dropped.* Mend the environment"):
            await site.say(actor, GroupDrop(grant=third.grant, epoch=0, reason=reason))
        assert site.coordinator.faults[-1].startswith(f"a group is dropped: {reason}. Mend")

    run(main)


def test_cut_answers_are_noted_with_the_first_trial_that_has_them() -> None:
    async def main(site: Site) -> None:
        site.coordinator.cut_length = 1
        site.coordinator.open(publication(0))
        actor = await site.connect()
        first, *_ = grants(await read(actor))
        turns = (Turn(Kind.ACT, 0, 0, 0, 0, 1, 0.0, False, ""),)
        for index in range(2):
            found = result(first, index)
            await site.say(actor, replace(found, trial=replace(found.trial, turns=turns)))
        (note,) = site.coordinator.faults
        assert "cut at transcript.max_action_tokens = 1" in note

    run(main)


def test_progress_follows_heartbeats_trials_and_drops() -> None:
    config = Config()

    def progress(site: Site) -> Progress:
        coordinator, ledger = site.coordinator, site.coordinator.ledger
        return coordinator.progress.snapshot(
            site.now,
            config,
            load("rps"),
            version=ledger.version,
            doing=("batch not full", 30.0),
            actors=coordinator.present_actors(),
            groups_in_flight=ledger.num_in_flight(),
            trials=ledger.trials_of_next_batch(),
            under_way=ledger.under_way(),
            dropped_by_reason=ledger.counts().dropped_by_reason,
        )

    async def main(site: Site) -> None:
        assert "no actor is connected yet" in sentence(progress(site))
        site.coordinator.open(publication(0))
        actor, evaluator = await site.connect(), await site.connect("evaluator")
        first, second, third, _ = grants(await read(actor))
        assert "every actor still loads its engine" in sentence(progress(site))
        await site.say(actor, heartbeat(completions=10))
        await site.say(evaluator, heartbeat("evaluator", completions=1000))
        await site.say(actor, result(second, 0), result(third, 0), result(third, 1))
        site.now += 10.0
        await site.say(actor, heartbeat(completions=30))
        seen = progress(site)
        assert (seen.num_actors, seen.num_loading, seen.groups_in_flight) == (1, 0, 4)
        # The third group is complete, and no part of the batch of the two oldest.
        assert (seen.trials_arrived, seen.trials_needed) == (1, GROUPS_PER_STEP * TRIALS)
        assert (seen.turns, seen.turns_per_s) == (30, 3.0)
        await site.say(actor, GroupDrop(grant=first.grant, epoch=0, reason="rps: raised KeyError"))
        seen = progress(site)
        assert seen.trials_arrived == 3
        assert seen.dropped == {"the environment raised": 1}
        site.pass_time(5)
        assert progress(site).num_actors == 0

    run(main)


def test_the_first_missed_deadline_is_noted_before_any_group_is_dropped() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        slow = await site.connect(group_quota=1)
        site.now += DEADLINE_S
        await site.say(slow, heartbeat())
        site.coordinator.tick()
        (note,) = site.coordinator.faults
        assert note.startswith(
            "a group was not played within admission.grant_deadline_s = 60 s and is granted again; "
            "at 2 missed deadlines it is dropped. Raise it"
        )
        assert "environment.step_deadline_s" in note
        assert site.coordinator.ledger.counts().groups.dropped == 0

    run(main)


def test_finished_episodes_go_to_the_next_actor_before_the_grant() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect(group_quota=1)
        (grant,) = grants(await read(actor))
        two, one = (finished(grant, 0, episodes) for episodes in (2, 1))
        foreign = finished(msgspec.structs.replace(grant, seed=grant.seed + 1), 1, 1)
        await site.say(actor, two, one, foreign, finished(grant, TRIALS, 1))
        await site.say(actor, Goodbye(reason="preempted"))
        other = await site.connect("actor-1", group_quota=1)
        kept, again = (await read(other))[-2:]
        assert isinstance(kept, EpisodeResult)
        assert isinstance(again, GroupGrant)
        assert (again.grant, again.epoch) == (grant.grant, 1)
        assert (kept.finished.trial.index, kept.finished.num_episodes) == (0, 2)
        assert site.coordinator.ledger.episodes_of(grant.grant) != []
        await site.say(other, *results(again))
        assert site.coordinator.ledger.episodes_of(grant.grant) == []

    run(main)


def finished(grant: GroupGrant, index: int, num_episodes: int) -> EpisodeResult:
    """Episodes of one turn each."""
    trial = result(grant, index).trial
    turns = tuple(Turn(Kind.ACT, at, 0, 0, 0, 1, 0.0, True, "rock") for at in range(num_episodes))
    return EpisodeResult(
        grant.grant, grant.epoch, FinishedEpisodes(replace(trial, turns=turns), "over")
    )
