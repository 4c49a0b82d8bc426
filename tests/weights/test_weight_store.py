"""Versions on their way to the engines: announced in order, kept while used, never half."""

import asyncio
import threading

import pytest
import torch

from mage_async.errors import RunError
from mage_async.policy.snapshot import Place, Snapshot
from mage_async.protocol.messages import Publication
from mage_services.weights.weight_store import WeightFiles, WeightStore


def snapshot(version: int) -> Snapshot:
    place = Place("weight", torch.float32, (2,), 0, 8)
    return Snapshot(version, (place,), torch.full((2,), float(version)).view(torch.uint8))


async def nothing() -> None:
    """There is no journal to wait for."""


def publish(files: WeightFiles, scenario) -> list[Publication]:
    """Run a scenario beside the weight_store task; what was announced."""
    announced: list[Publication] = []

    async def main() -> None:
        weight_store = WeightStore(files, announced.append, lambda there: there[:-2], nothing)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(weight_store.run(), name="publish")
            await scenario(weight_store)
            task.cancel()
        weight_store.close()

    asyncio.run(main())
    return announced


def test_versions_are_announced_in_order_and_those_nobody_may_read_are_deleted(tmp_path) -> None:
    files = WeightFiles(tmp_path)

    async def scenario(weight_store: WeightStore) -> None:
        for version in range(5):
            await weight_store.wait_until_announced()
            await weight_store.offer(snapshot(version), f"digest {version}")
        await weight_store.wait_until_announced()

    announced = publish(files, scenario)
    assert [(one.version, one.digest) for one in announced] == [
        (n, f"digest {n}") for n in range(5)
    ]
    assert files.versions() == [3, 4]


def test_the_trainer_goes_on_while_a_version_is_written(tmp_path) -> None:
    may_write = threading.Event()
    write = (files := WeightFiles(tmp_path)).write
    files.write = lambda one: (may_write.wait(10), write(one))[1]

    async def scenario(weight_store: WeightStore) -> None:
        await weight_store.offer(snapshot(0), "digest")
        assert files.versions() == []  # nothing was written, and we are here
        may_write.set()
        await weight_store.wait_until_announced()

    assert [one.version for one in publish(files, scenario)] == [0]


def test_weights_that_cannot_be_written_end_the_learner_with_the_reason(tmp_path) -> None:
    files = WeightFiles(tmp_path / "gone")
    (tmp_path / "gone").rmdir()

    async def scenario(weight_store: WeightStore) -> None:
        await weight_store.offer(snapshot(0), "digest")
        await weight_store.wait_until_announced()

    with pytest.raises(ExceptionGroup) as caught:
        publish(files, scenario)
    assert caught.group_contains(RunError, match="cannot write weights of version 0")


def test_nothing_is_removed_before_the_journal_says_durably_that_nobody_needs_it(tmp_path) -> None:
    files, asked, may_go = WeightFiles(tmp_path), asyncio.Event(), asyncio.Event()

    async def settled() -> None:
        asked.set()
        await may_go.wait()

    async def main() -> None:
        weight_store = WeightStore(files, lambda _: None, lambda there: there[:-1], settled)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(weight_store.run(), name="publish")
            await weight_store.offer(snapshot(0), "digest")
            await weight_store.wait_until_announced()
            await weight_store.offer(snapshot(1), "digest")
            await asked.wait()
            assert files.versions() == [0, 1]
            may_go.set()
            await weight_store.wait_until_announced()
            assert files.versions() == [1]
            task.cancel()
        weight_store.close()

    asyncio.run(main())
