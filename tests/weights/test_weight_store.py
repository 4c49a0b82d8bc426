"""Versions on their way to the engines: announced in order, kept while used, never half."""

import asyncio
import errno
import shutil
import threading
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from mage_async.errors import ConfigError, DiskFull, RunError
from mage_async.policy.snapshot import Place, Snapshot
from mage_async.protocol.journal_records import Published
from mage_async.protocol.messages import Loaded
from mage_services.learner.training_loop import Publisher
from mage_services.weights.weight_store import WeightFiles, WeightStore
from tests.helpers.coordinator_site import Site, publication
from tests.helpers.memory_channels import MemoryJournal


def snapshot(version: int) -> Snapshot:
    place = Place("weight", torch.float32, (2,), 0, 8)
    weight = torch.full((2,), float(version))
    return Snapshot(version, (place,), weight.view(torch.uint8), weight.double(), {"weight": 2})


def publish(files: WeightFiles, scenario) -> list[Published]:
    """Run a scenario beside the publisher's task; what the journal has of it.

    Nobody reads, and actors lag by one version: the two newest are kept.
    """
    published: list[Published] = []

    async def main() -> None:
        site = Site(weights=WeightStore(files, lag=1))
        site.coordinator.open(publication(0))
        publisher = Publisher(site.coordinator)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(publisher.run(), name="publish")
            await scenario(publisher)
            task.cancel()
        site.weights.close()
        published.extend(site.journal.durable_records())

    asyncio.run(main())
    return published


def test_versions_are_announced_in_order_and_those_nobody_may_read_are_deleted(tmp_path) -> None:
    files = WeightFiles(tmp_path)

    async def scenario(publisher: Publisher) -> None:
        for version in range(1, 6):
            await publisher.wait_until_announced()
            publisher.offer(snapshot(version), f"digest {version}")
        await publisher.wait_until_announced()

    announced = publish(files, scenario)
    assert [(one.version, one.digest) for one in announced] == [
        (n, f"digest {n}") for n in range(1, 6)
    ]
    assert files.versions() == [4, 5]


def test_the_trainer_goes_on_while_a_version_is_written(tmp_path) -> None:
    may_write = threading.Event()
    write = (files := WeightFiles(tmp_path)).write
    files.write = lambda one: (may_write.wait(10), write(one))[1]

    async def scenario(publisher: Publisher) -> None:
        publisher.offer(snapshot(0), "digest")
        assert files.versions() == []  # nothing was written, and we are here
        may_write.set()
        await publisher.wait_until_announced()

    assert [one.version for one in publish(files, scenario)] == [0]


def test_weights_that_cannot_be_written_end_the_learner_with_the_reason(tmp_path) -> None:
    files = WeightFiles(tmp_path / "gone")
    (tmp_path / "gone").rmdir()

    async def scenario(publisher: Publisher) -> None:
        publisher.offer(snapshot(0), "digest")
        await publisher.wait_until_announced()

    with pytest.raises(ExceptionGroup) as caught:
        publish(files, scenario)
    assert caught.group_contains(RunError, match="cannot write weights of version 0")


def test_a_full_file_system_gets_space_from_versions_that_peers_have_left(tmp_path, monkeypatch):
    write = Snapshot.write

    def write_if_two_fit(one: Snapshot, file: Path) -> None:
        if len(list(tmp_path.glob("v*"))) == 2:
            raise OSError(errno.ENOSPC, "full")
        write(one, file)

    monkeypatch.setattr(Snapshot, "write", write_if_two_fit)

    async def main() -> None:
        files = WeightFiles(tmp_path)
        site = Site(weights=WeightStore(files))
        publisher, actor = Publisher(site.coordinator), await site.connect()
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(publisher.run(), name="publish")
            for version in range(4):
                publisher.offer(snapshot(version), "digest")
                await publisher.wait_until_announced()
                await site.say(actor, Loaded(version=version))
            task.cancel()
        site.weights.close()
        assert (files.versions(), site.coordinator.faults) == ([2, 3], [])

    asyncio.run(main())


def test_a_file_system_that_is_too_small_for_all_versions_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Snapshot, "write", MagicMock(side_effect=OSError(errno.ENOSPC, "full")))
    files, usage = WeightFiles(tmp_path, 5), MagicMock(total=40)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(DiskFull):  # it has room, which others use now
        files.write(snapshot(0))
    usage.total = 39
    with pytest.raises(ConfigError, match=r"the 5 versions of the weights .*--shm-size"):
        files.write(snapshot(0))


def test_weights_that_cannot_be_removed_are_an_error_of_one_line(tmp_path) -> None:
    store = WeightStore(WeightFiles(tmp_path))
    with pytest.raises(RunError, match=r"cannot remove weights .*v000007\.safetensors"):
        asyncio.run(store.remove([7]))
    store.close()


def test_nothing_is_removed_before_the_journal_says_durably_that_nobody_needs_it(tmp_path) -> None:
    async def main() -> None:
        files = WeightFiles(tmp_path)
        site = Site(journal=MemoryJournal(is_instant=False), weights=WeightStore(files))
        publisher = Publisher(site.coordinator)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(publisher.run(), name="publish")
            publisher.offer(snapshot(0), "digest")
            await publisher.wait_until_announced()
            publisher.offer(snapshot(1), "digest")
            while site.journal.num_waiting() < 2:  # noqa: ASYNC110 - the record, and who waits
                await asyncio.sleep(0)
            assert files.versions() == [0, 1]
            site.journal.sync()
            await publisher.wait_until_announced()
            assert files.versions() == [1]
            task.cancel()
        site.weights.close()

    asyncio.run(main())
