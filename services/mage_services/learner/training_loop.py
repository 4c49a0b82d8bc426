"""The training loop of a learner: batches in, versions out, until the last step.

Each step waits for a batch, trains it in the worker's thread, commits it to the journal, and leaves
a copy of the weights to the publisher. The loop waits for actors only through the batch itself.
"""

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from mage_async.protocol.journal_records import Commit
from mage_async.tasks.population import League
from mage_async.trajectory import Group
from mage_services.journal.writer import JournalFile
from mage_services.learner.coordinator import Coordinator
from mage_services.learner.parts import newest_checkpoint
from mage_services.learner.publisher import Publisher
from mage_services.learner.resume import Begun
from mage_services.learner.run_log import RunLog
from mage_services.learner.worker import Worker
from mage_services.processes.process import Status
from mage_services.processes.startup import Startup

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

HEARD_S = 5.0
"""Seconds to wait, at the end, for a hello of every peer that a restarted learner knows of."""
PARITY_PATIENCE_S = 5.0
"""How long to wait, after the last step, for groups drawn by the last weights."""


class TrainingLoop:
    """One learner's life, from the first batch to the goodbye."""

    def __init__(
        self,
        startup: Startup,
        status: Status,
        coordinator: Coordinator,
        league: League,
        journal: JournalFile,
        begun: Begun,
        worker: Worker,
        run_log: RunLog,
    ) -> None:
        self._startup, self._status, self._coordinator = startup, status, coordinator
        self._journal, self._league = journal, league
        self.publisher = Publisher(coordinator.weights, coordinator)
        self._training, self._worker, self.run_log = begun.training, worker, run_log
        self._checkpointed = newest_checkpoint(begun)
        self._begun: tuple[Future[Path], int] | None = None
        """The checkpoint that is being written, and its version."""
        self._enter = run_log.time.enter

    async def train(self) -> dict[str, float]:
        """Train until the configured version, then measure parity, which is returned, and say
        goodbye. Cancellation leaves what the journal has.
        """
        config = self._startup.config
        opened = asyncio.get_running_loop().time()
        if not self._coordinator.weights.is_lag_complete(self._training.trainer.version):
            text = "actors begin with newer weights than admission.lag says"
            self._status.send("note", text=text)
        await self.run_log.keep_memory()
        await self._publish(await self._worker.call(self._training.digest))
        await self.publisher.wait_until_announced()
        self._enter("batch not full")
        while self._training.trainer.version < config.learner.steps:
            await self._step()
        await self.publisher.wait_until_announced()
        parity = await self._parity()
        self._coordinator.close()
        await self._checkpoint()
        await self._wait_until_checkpointed()
        await self.run_log.write_end(parity)
        await self._hear_all(opened + HEARD_S)
        self._coordinator.dismiss("the run is complete")
        return parity

    async def _hear_all(self, due: float) -> None:
        """Wait until every peer can be dismissed, but not beyond `due`, in the loop's time."""
        self._enter("peer gone")
        try:
            async with asyncio.timeout_at(due):
                while not self._coordinator.has_heard_all():
                    self._coordinator.greeted.clear()
                    await self._coordinator.greeted.wait()
        except TimeoutError:
            self._status.send("note", text="somebody did not come back to hear the goodbye")

    async def _step(self) -> None:
        groups = await self._batch()
        waited_s, began = self.run_log.waited_s(), time.monotonic()
        self._enter("training")
        metrics = await self._worker.call(self._training.step, groups)
        self._enter("publishing")
        await self.publisher.wait_until_announced()  # the journal has versions in their order
        self._enter("journal sync")
        commit = await self._worker.call(self._training.commit, groups, self.run_log.elapsed_s())
        self._league.trained(groups)  # as a restarted learner does where it reads the commit
        commit = self._learned(commit, groups)
        await self._journal.durable(commit)
        self._enter("publishing")
        await self.run_log.keep_memory()  # before the evaluator hears of the version
        await self._publish(commit.digest)
        self._coordinator.arrivals.keep_pace(time.monotonic() - began)
        self._coordinator.arrivals.lengths.trained(commit.grants)
        self._coordinator.trained(commit.version)
        record = await self.run_log.step(groups, metrics, waited_s)
        if commit.version % self._startup.config.learner.checkpoint_every == 0:
            await self._checkpoint()
            await self.run_log.write_end({})
        await self._compact()
        await self.run_log.keep_sample(groups)
        self._enter("batch not full")
        self._status.send("step", metrics=record, **self.run_log.view())

    def _learned(self, commit: Commit, groups: list[Group]) -> Commit:
        """Let the graph memory learn from a batch; the commit says what it remembers then."""
        memory = self._coordinator.memory
        memory.trained(groups)
        return msgspec.structs.replace(commit, memory=memory.digest())

    async def _publish(self, digest: str) -> None:
        """Copy the weights and leave the rest to the publisher."""
        await self.publisher.offer(await self._worker.call(self._training.snapshot), digest)

    async def _batch(self) -> list[Group]:
        """The next batch in order of grant. Cancellation leaves it in the ledger."""
        while (groups := self._coordinator.take_batch()) is None:
            if self._journal.why_full() and self._checkpointed < self._training.trainer.version:
                await self._checkpoint()
                await self._wait_until_checkpointed()  # it may make segments unnecessary
                continue
            self._coordinator.arrived.clear()
            await self._coordinator.arrived.wait()
        return groups

    async def _checkpoint(self) -> None:
        """Begin a checkpoint, which ranks write beside the next steps. Cancellation leaves the one
        before.
        """
        await self._wait_until_checkpointed()
        self._enter("checkpoint")
        version, counters = self._training.trainer.version, self.run_log.counters()
        self._begun = await self._worker.call(self._training.checkpoint, counters), version
        await self._compact()

    async def _compact(self) -> None:
        """Let go of what the journal has for the checkpoint before, where one has been written."""
        if self._begun is not None and self._begun[0].done():
            await self._wait_until_checkpointed()

    async def _wait_until_checkpointed(self) -> None:
        """Wait until the checkpoint that was begun is durable. Cancellation leaves it to its
        thread.

        Raises:
            RunError: it cannot be written.
        """
        if self._begun is None:
            return
        written, version = self._begun
        self._enter("checkpoint")
        await asyncio.shield(asyncio.wrap_future(written))
        self._begun, self._checkpointed = None, version
        self._journal.compact(version)

    async def _parity(self) -> dict[str, float]:
        """Log-probs of groups drawn by the last weights: granted, played, and never trained."""
        version = self._training.trainer.version
        parity: dict[str, float] = {}
        if self._startup.config.admission.lag:
            return parity  # actors never have the last weights
        self._enter("parity")
        try:
            async with asyncio.timeout(PARITY_PATIENCE_S):
                while parity.get("equal_version_tokens", 0) == 0 and version > 0:
                    groups = await self._batch()
                    parity = await self._worker.call(self._training.parity, groups)
        except TimeoutError:
            self._status.send("note", text="no group was drawn by the last weights in time")
        return parity
