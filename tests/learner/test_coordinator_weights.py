"""Which weights the coordinator tells whom of, and how long they stay."""

import asyncio

from mage_async.protocol.journal_records import LoadedWeights
from mage_async.protocol.messages import Goodbye, Loaded, Publication, Welcome
from mage_services.learner.coordinator import LOST_INTERVALS, SILENCE_S
from mage_services.weights.weight_store import WeightStore
from tests.helpers.coordinator_site import (
    GROUPS_PER_STEP,
    Site,
    grants,
    heartbeat,
    publication,
    read,
    results,
    run,
)
from tests.helpers.memory_channels import MemoryWeights


def test_with_a_lag_actors_play_old_weights_and_evaluators_measure_new_ones() -> None:
    async def main() -> None:
        site = Site(weights=WeightStore(MemoryWeights(), lag=1))
        site.coordinator.ledger.lag = 1
        actor, evaluator = await site.connect(), await site.connect("evaluator")
        site.coordinator.open(publication(0))
        await site.say(actor, Loaded(version=0))
        for version in (1, 2):
            granted = grants(await read(actor))
            await site.say(actor, *results(*granted[-GROUPS_PER_STEP:]))
            await site.say(actor, *results(*granted))
            assert site.coordinator.ledger.take_batch() is not None
            site.publish(version)
        heard = await read(actor)
        assert [m.version for m in heard if isinstance(m, Publication)] == [1]
        assert {grant.version for grant in grants(heard)} == {1}
        measured = [m.version for m in await read(evaluator) if isinstance(m, Publication)]
        assert measured == [2]

    asyncio.run(main())


def test_with_a_lag_a_restarted_learners_actors_get_the_weights_they_would_have_had() -> None:
    async def main() -> None:
        site = Site(weights=WeightStore(MemoryWeights(), lag=1))
        actor, evaluator = await site.connect(), await site.connect("evaluator")
        site.coordinator.open(publication(4), publication(5))
        assert (await read(actor))[0].version == 4
        assert (await read(evaluator))[0].version == 5

    asyncio.run(main())


def test_a_publication_comes_before_the_grants_made_at_its_version() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor = await site.connect()
        await site.say(actor, Loaded(version=0), *results(*grants(await read(actor))))
        site.coordinator.ledger.take_batch()
        await read(actor)
        site.publish(1)
        published, *granted = await read(actor)
        assert published == publication(1)
        assert [grant.version for grant in grants(granted)] == [1, 1]

    run(main)


def test_the_evaluator_hears_of_measured_versions_and_the_last_only() -> None:
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        actor, evaluator = await site.connect(group_quota=0), await site.connect("evaluator", 0)
        for version in (1, 2, 3):
            await site.say(actor, Loaded(version=version - 1))
            site.coordinator.publish(publication(version))
        assert await read(actor) == [
            Welcome(version=0, weights_path="/weights/0"),
            *map(publication, (1, 2, 3)),
        ]
        assert await read(evaluator) == [
            Welcome(version=0, weights_path="/weights/0"),
            *map(publication, (2, 3)),
        ]

    run(main)


def test_an_actor_is_told_of_one_version_at_a_time_and_then_of_the_newest() -> None:
    async def main(site: Site) -> None:
        actor = await site.connect(group_quota=0)
        site.coordinator.open(publication(0))
        for version in (1, 2, 3):
            site.coordinator.publish(publication(version))
        assert [type(message) for message in await read(actor)] == [Welcome]
        await site.say(actor, Loaded(version=0))
        assert await read(actor) == [publication(3)]
        await site.say(actor, Loaded(version=3))
        assert await read(actor) == []

    run(main)


def test_weights_stay_while_a_peer_draws_with_them_or_was_told_of_them() -> None:
    async def main(site: Site) -> None:
        fast, slow = await site.connect("actor-0", 0), await site.connect("actor-1", 0)
        site.coordinator.open(publication(0))
        await site.say(fast, Loaded(version=0))
        for version in (1, 2):
            site.coordinator.publish(publication(version))
        assert site.coordinator.unused([0, 1, 2]) == []  # `fast` was told of 1, `slow` of 0
        await site.say(fast, Loaded(version=1), Loaded(version=2))
        assert site.coordinator.unused([0, 1, 2]) == [1]
        await site.say(slow, Goodbye(reason="tired"))
        assert site.coordinator.unused([0, 1, 2]) == [0, 1]

    run(main)


def test_weights_that_an_actor_was_told_of_before_its_machine_vanished_do_not_stay_for_ever() -> (
    None
):
    async def main(site: Site) -> None:
        site.coordinator.open(publication(0))
        vanished = await site.connect("far")
        await site.say(vanished, heartbeat("far"))  # and never says what it has loaded
        site.pass_time(LOST_INTERVALS * SILENCE_S)
        other = await site.connect()
        await site.say(other, Loaded(version=0))
        for version in (1, 2):
            site.coordinator.publish(publication(version))
            await site.say(other, Loaded(version=version))
        assert site.coordinator.unused([0, 1, 2]) == [1]
        site.pass_time(1)
        assert site.coordinator.unused([0, 1, 2]) == [0, 1]

    run(main)


def test_an_evaluator_hears_of_every_measured_version_and_each_stays_until_it_is_read() -> None:
    async def main(site: Site) -> None:
        evaluator = await site.connect("evaluator")
        site.coordinator.open(publication(0))
        for version in (1, 2, 3):
            site.coordinator.publish(publication(version))
        heard = [m.version for m in await read(evaluator) if isinstance(m, Publication)]
        assert heard == [2, 3]  # every second one, and the last
        assert site.coordinator.unused([0, 1, 2, 3]) == [1]
        await site.say(evaluator, Loaded(version=2))
        assert site.coordinator.unused([0, 1, 2, 3]) == [0, 1]

    run(main)


def test_weights_of_an_earlier_life_stay_until_its_peers_are_back_or_forgotten() -> None:
    async def main(_: Site) -> None:
        site = Site(weights=WeightStore(MemoryWeights(1, 2)))
        site.coordinator.open(publication(2))
        assert site.coordinator.unused([1, 2]) == []
        site.pass_time(10 * SILENCE_S)
        assert site.coordinator.unused([1, 2]) == []  # the evaluator has not come yet
        await site.say(await site.connect("evaluator"), Loaded(version=2))
        site.pass_time(1)
        assert site.coordinator.unused([1, 2]) == [1]

    run(main)


def test_versions_that_the_evaluator_has_queued_stay_after_a_restart_until_it_loads_them() -> None:
    async def main(_: Site) -> None:
        # The evaluator plays version 10, and has queued 20 and 30.
        site = Site(weights=WeightStore(MemoryWeights(10, 20, 30)))
        site.coordinator.open(publication(30))
        evaluator = await site.connect("evaluator")
        site.pass_time(SILENCE_S + 1)
        assert site.coordinator.unused([10, 20, 30]) == []
        await site.say(evaluator, Loaded(version=20))
        assert site.coordinator.unused([10, 20, 30]) == [10]
        await site.say(evaluator, Loaded(version=30))
        assert site.coordinator.unused([10, 20, 30]) == [10, 20]

    run(main)


def test_a_version_that_an_actor_is_loading_stays_when_the_learner_restarts() -> None:
    async def main(_: Site) -> None:
        site = Site(weights=WeightStore(MemoryWeights(3, 4, 5), lag=1))
        site.coordinator.open(publication(4), publication(5))
        actor, evaluator = await site.connect(group_quota=0), await site.connect("evaluator")
        await site.say(evaluator, Loaded(version=5))
        site.pass_time(SILENCE_S + 1)
        assert site.coordinator.unused([3, 4, 5]) == []
        await site.say(actor, Loaded(version=3), Loaded(version=4))
        assert site.coordinator.unused([3, 4, 5]) == [3]
        site.coordinator.publish(publication(6))  # the actor waits for nothing older than its next
        assert (await read(actor))[-1] == publication(5)

    run(main)


def test_a_receipt_is_journalled_and_counted_once() -> None:
    async def main(site: Site) -> None:
        actor = await site.connect()
        site.coordinator.open(publication(0))
        await site.say(
            actor, Loaded(version=0), Loaded(version=1, digest="d", difference=0.5, num_retries=1)
        )
        (receipt,) = site.coordinator.take_load_records()
        assert (receipt.version, receipt.digest, receipt.difference) == (1, "d", 0.5)
        records = site.journal.durable_records()
        assert [each for each in records if isinstance(each, LoadedWeights)] == [receipt]
        assert site.coordinator.take_load_records() == []
        assert "had to read the weights of version 1 again" in site.coordinator.faults[-1]

    run(main)
