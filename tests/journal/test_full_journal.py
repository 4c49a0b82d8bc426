"""A learner that begins with a journal that is full: it makes space, and goes on."""

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mage_async.config import config_file
from mage_async.errors import DeterministicFailure, DiskFull
from mage_async.protocol.journal_records import Commit, Dropped, first_segment_header
from mage_async.results.run_directory import RunDirectory
from mage_services.journal.reader import open_journal
from mage_services.journal.writer import JournalFile
from mage_services.learner.learner import open_journal_file
from mage_services.learner.resume import Prepared
from mage_services.learner.run_log import RunLog
from mage_services.learner.trainer_thread import TrainerThread
from mage_services.learner.training_loop import Publisher, TrainingLoop
from mage_services.processes import process
from mage_services.processes.process import Startup, Status
from mage_services.processes.time_accounting import TimeAccounting
from mage_services.weights.weight_store import WeightStore
from tests.helpers.coordinator_site import GROUPS_PER_STEP, Site, grants, publication, read, results
from tests.helpers.memory_channels import MemoryWeights

if TYPE_CHECKING:
    from mage_async.policy.snapshot import Snapshot

STEPS = 5
SMALL = ("journal.max_bytes=5000",)


@dataclass
class Trainer:
    version: int = STEPS


@dataclass
class Trained:
    """A policy that has been trained already; of its checkpoints only the versions are kept."""

    trainer: Trainer = field(default_factory=Trainer)
    counters: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)
    num_refused: int = 0
    """Number of attempts that meet a full disk."""
    is_slow: bool = False
    """Checkpoints are written until the test says that they are."""
    written: "Future[Path]" = field(default_factory=Future)

    def checkpoint(self, counters: dict[str, Any]) -> "Future[Path]":
        if self.num_refused:
            self.num_refused -= 1
            raise DiskFull("cannot write a checkpoint: No space left on device", "make room")
        self.checkpoints.append(self.trainer.version)
        if not self.is_slow:
            self.written.set_result(Path("checkpoint"))
        return self.written


async def fill(startup: Startup) -> None:
    """A life that ends with its journal full, behind its last step."""
    rules = startup.config.journal
    startup.run.journal.mkdir()
    journal = JournalFile(
        startup.run.journal, [], first_segment_header(0, 0), rules.max_bytes, 1000
    )
    for version in range(1, STEPS + 1):
        journal.append(Dropped(grant=version, reason="x" * 1000))
        step = Commit(version=version, grants=(), digest="d", tensors={}, time_s=1.0)
        await journal.durable(step)
        journal.roll(lambda version=version: first_segment_header(version, 0))
    await journal.settled()
    assert "waiting for a checkpoint" in journal.why_full()
    journal.close()


def loop_of(startup: Startup, site: Site, begun: Prepared) -> TrainingLoop:
    trainer_thread = TrainerThread()
    run_log = RunLog(
        startup, site.coordinator, begun.training, trainer_thread, 0.0, TimeAccounting("preparing")
    )
    return TrainingLoop(
        startup,
        Status(),
        site.coordinator,
        begun,
        trainer_thread,
        run_log,
    )


@pytest.mark.parametrize(
    ("checkpoint", "made"),
    [
        (0, [STEPS]),  # killed before there was any
        (2, [STEPS]),  # killed before the one that would have made space was whole
        (STEPS, []),  # killed between the checkpoint and the deletion of segments
    ],
)
def test_a_journal_that_is_full_as_a_learner_begins_is_freed(
    tmp_path: Path, checkpoint: int, made: list[int]
) -> None:
    config = config_file.load(config_file.find(None), list(SMALL))
    startup = Startup(RunDirectory(tmp_path), config, "", "", "learner", "")

    async def main() -> None:
        await fill(startup)
        training, found = Trained(), open_journal(startup.run.journal)
        replayed: list[Any] = [None] * (STEPS - checkpoint)
        begun = Prepared(training, "", found.segments, replayed, 0)  # type: ignore[arg-type]
        journal = open_journal_file(startup, begun, first_segment_header(STEPS, 0))
        site = Site(journal=journal)  # type: ignore[arg-type]
        loop = loop_of(startup, site, begun)
        site.coordinator.open(publication(STEPS))
        actor = await site.connect()
        await journal.settled()
        granted = grants(await read(actor))
        site.coordinator.tick()  # where it is full it is seen, and nothing is taken in
        batch = asyncio.create_task(loop._batch())
        while journal.why_full():  # noqa: ASYNC110 - freed in the loop's next rounds
            await asyncio.sleep(0)
        site.coordinator.tick()
        await site.say(actor, *results(*granted))
        assert len(await batch) == GROUPS_PER_STEP
        assert training.checkpoints == made
        journal.close()
        site.weights.close()

    async def limited() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(limited())


def test_segments_stay_until_a_checkpoint_that_is_written_beside_the_training_is_durable(
    tmp_path: Path,
) -> None:
    config = config_file.load(config_file.find(None), list(SMALL))
    startup = Startup(RunDirectory(tmp_path), config, "", "", "learner", "")

    async def main() -> None:
        await fill(startup)
        training, found = Trained(is_slow=True), open_journal(startup.run.journal)
        replayed: list[Any] = [None] * STEPS
        begun = Prepared(training, "", found.segments, replayed, 0)  # type: ignore[arg-type]
        journal = open_journal_file(startup, begun, first_segment_header(STEPS, 0))
        site = Site(journal=journal)  # type: ignore[arg-type]
        loop = loop_of(startup, site, begun)
        await loop._checkpoint()  # returns, though nothing is written
        assert journal.why_full()
        training.written.set_result(Path("checkpoint"))
        await loop._wait_until_checkpointed()
        assert not journal.why_full()
        journal.close()
        site.weights.close()

    asyncio.run(main())


def test_a_checkpoint_that_finds_no_space_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "RETRY_S", 0.01)
    config = config_file.load(config_file.find(None), list(SMALL))
    startup = Startup(RunDirectory(tmp_path), config, "", "", "learner", "")

    async def main() -> None:
        await fill(startup)
        training, found = Trained(num_refused=3), open_journal(startup.run.journal)
        replayed: list[Any] = [None] * STEPS
        begun = Prepared(training, "", found.segments, replayed, 0)  # type: ignore[arg-type]
        journal = open_journal_file(startup, begun, first_segment_header(STEPS, 0))
        site = Site(journal=journal)  # type: ignore[arg-type]
        batch = asyncio.create_task(loop_of(startup, site, begun)._batch())
        while journal.why_full() and not batch.done():  # noqa: ASYNC110 - freed in later rounds
            await asyncio.sleep(0)
        assert not batch.done()
        assert training.num_refused == 0
        assert site.coordinator.faults == [
            "cannot write a checkpoint: No space left on device. Make room, and the run goes on by "
            "itself"
        ]
        batch.cancel()
        journal.close()
        site.weights.close()

    asyncio.run(main())


def test_a_budget_that_has_no_room_for_a_batch_ends_the_learner_with_the_numbers(
    tmp_path: Path,
) -> None:
    config = config_file.load(config_file.find(None), ["journal.max_bytes=1000"])
    startup = Startup(RunDirectory(tmp_path), config, "", "", "learner", "")

    async def main() -> None:
        startup.run.journal.mkdir()
        begun = Prepared(Trained(), "", [], [], 0)  # type: ignore[arg-type]
        journal = open_journal_file(startup, begun, first_segment_header(STEPS, 0))
        site = Site(journal=journal)  # type: ignore[arg-type]
        site.coordinator.open(publication(STEPS))
        await site.connect()
        site.coordinator.tick()  # the grants alone have filled the journal
        says = r"max_bytes is 1,000.* of step 5, frees no space: .* Multiply journal.max_bytes by 4"
        with pytest.raises(DeterministicFailure, match=says):
            async with asyncio.timeout(10):
                await loop_of(startup, site, begun)._batch()
        journal.close()
        site.weights.close()

    asyncio.run(main())


def test_an_evaluator_that_is_still_starting_at_the_end_is_not_called_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    startup = Startup(
        RunDirectory(tmp_path), config_file.load(config_file.find(None)), "", "", "learner", ""
    )
    notes: list[str] = []
    monkeypatch.setattr(Status, "note", lambda self, text: notes.append(text))

    async def main() -> None:
        begun = Prepared(Trained(), "", [], [], 0)  # type: ignore[arg-type]
        site = Site()
        site.coordinator.open(publication(STEPS))
        await site.connect()
        await loop_of(startup, site, begun)._wait_for_peers(asyncio.get_running_loop().time())

    asyncio.run(main())
    assert notes == []


def test_a_publication_that_finds_no_space_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "RETRY_S", 0.01)

    class FullAtFirst(MemoryWeights):
        num_refused = 3

        def write(self, snapshot: "Snapshot") -> Path:
            if self.num_refused:
                self.num_refused -= 1
                raise DiskFull("cannot write weights: No space left on device", "make room")
            return super().write(snapshot)

    async def main() -> None:
        site = Site(weights=WeightStore(FullAtFirst()))
        site.weights.leases.announce("evaluator/1", 0)
        publisher = Publisher(site.coordinator)
        running = asyncio.create_task(publisher.run())
        publisher.offer(SimpleNamespace(version=0), "digest")  # type: ignore[arg-type]
        await asyncio.wait(
            [running, asyncio.ensure_future(publisher.wait_until_announced())],
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert not running.done()
        assert site.weights.is_open
        assert site.coordinator.faults == [
            "cannot write weights: No space left on device; versions still to be loaded: 1 by "
            "evaluator. Make room, and the run goes on by itself"
        ]
        running.cancel()
        site.weights.close()

    asyncio.run(main())
