"""Take a batch, train, commit, publish and checkpoint, in a loop on the learner's event loop.

The computing itself is in `trainer_thread.py`; the messages of peers are the coordinator's.
"""

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from mage_async.errors import DeterministicFailure, DiskFull
from mage_async.policy.snapshot import Snapshot
from mage_async.policy.weight_digest import overall
from mage_async.protocol.journal_records import Commit
from mage_async.trajectory import Group
from mage_services.learner.coordinator import Coordinator
from mage_services.learner.resume import Prepared
from mage_services.learner.run_log import RunLog
from mage_services.learner.trainer_thread import TrainerThread
from mage_services.processes.process import Startup, Status, until_there_is_space

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

# The order of a step, and why:
#
#     1. train                   in the trainer's thread; actors go on playing
#     2. wait for the publisher  the version before must be announced: the journal's records of
#                                publications are in order of version, and memory holds one copy
#                                of the weights at a time
#     3. copy the weights        and compute their digests
#     4. commit                  the journal holds the digests, durably; from here on a restarted
#                                learner computes the version again. The publisher writes and
#                                announces the copy only now, while the loop goes on: so every
#                                announced version can be computed again
#     5. end the batch           its groups are no longer in flight, so new ones can be granted
#     6. checkpoint              every `checkpoint_every` steps or `checkpoint_minutes`; when it is
#                                durable, earlier segments of the journal may be deleted

GOODBYE_PATIENCE_S = 5.0
"""Seconds after the beginning of training until which a learner that has finished waits for peers
that have not said Hello yet, in order to send them a Goodbye. Only a learner that ends earlier
waits, such as a restarted one with almost nothing left to train."""
PARITY_PATIENCE_S = 5.0
"""Seconds to wait, after the last step, for a group sampled with the last weights."""


class TrainingLoop:
    """Train from the first batch to the last, and dismiss the peers at the end."""

    def __init__(
        self,
        startup: Startup,
        status: Status,
        coordinator: Coordinator,
        prepared: Prepared,
        trainer_thread: TrainerThread,
        run_log: RunLog,
    ) -> None:
        self._config, self._status, self._coordinator = startup.config, status, coordinator
        self._journal, self._training = coordinator.journal, prepared.training
        self._thread, self.run_log = trainer_thread, run_log
        self.publisher = Publisher(coordinator)
        self._checkpoint_version = prepared.checkpoint_version()
        """Version of the newest durable checkpoint; 0 before the first."""
        self._pending_checkpoint: tuple[Future[Path], int] | None = None
        """The checkpoint that is being written, and its version."""
        self._checkpoint_at = time.monotonic()
        """When the newest checkpoint was begun or, before the first one, the run."""
        self._enter = run_log.time.enter  # names what the learner does from now on

    async def train(self) -> dict[str, float]:
        """Train to the last step; return how far engine and learner differ in log-probs.

        If cancelled, the journal holds every step that was committed.
        """
        began = asyncio.get_running_loop().time()
        if not self._coordinator.weights.is_lag_complete(self._training.trainer.version):
            self._status.note(
                "older weights are gone: actors begin with newer ones than admission.lag asks for"
            )
        await self.run_log.write_method_states()
        snapshot, digests = await self._thread.call(self._training.snapshot)
        self.publisher.offer(snapshot, overall(digests))
        await self.publisher.wait_until_announced()
        self._enter("batch not full")
        while self._training.trainer.version < self._config.learner.steps:
            await self._step()
        await self.publisher.wait_until_announced()
        parity = await self._parity()
        self._coordinator.close()
        await self._checkpoint()
        await self._wait_until_checkpointed()
        await self.run_log.write_learner_summary(parity)
        await self._wait_for_peers(began + GOODBYE_PATIENCE_S)
        self._coordinator.dismiss("the run is complete")
        return parity

    async def _step(self) -> None:
        """Train one batch, in the order that the comment at the top of this file explains."""
        groups = await self._batch()
        self.run_log.note_if_nothing_to_learn(groups)  # before the step, which may take long
        waited_s, began = self.run_log.waited_s(), time.monotonic()
        self._enter("training")
        metrics = await self._thread.call(self._training.step, groups)
        self._enter("publishing")
        await self.publisher.wait_until_announced()
        elapsed_s = self.run_log.elapsed_s()
        commit, snapshot = await self._thread.call(self._training.commit, groups, elapsed_s)
        self._enter("journal sync")
        # League and methods are updated at the commit, as in a replay of the journal.
        self._coordinator.league.trained(groups)
        commit = self._learn_methods(commit, groups)
        await self._journal.durable(commit)
        self._enter("publishing")
        # Before the version is announced: the evaluator reads the states that belong to it.
        await self.run_log.write_method_states()
        self.publisher.offer(snapshot, commit.digest)
        self._coordinator.limit_concurrency(time.monotonic() - began)
        self._coordinator.trained(commit.version)
        record = await self.run_log.write_step(groups, metrics, waited_s)
        learner, since_s = self._config.learner, time.monotonic() - self._checkpoint_at
        is_due = commit.version % learner.checkpoint_every == 0
        if is_due or since_s >= 60 * learner.checkpoint_minutes:
            await self._checkpoint()
            # The parity is measured at the end of the run.
            await self.run_log.write_learner_summary(parity={})
        await self._finish_checkpoint()
        await self.run_log.write_sample(groups)
        self._enter("batch not full")
        self._status.send("step", metrics=record, **self.run_log.view())

    async def _batch(self) -> list[Group]:
        """Wait for the next batch. If cancelled, the batch stays in the ledger.

        Raises:
            DeterministicFailure: `journal.max_bytes` has no room for a batch.
        """
        while (groups := self._coordinator.ledger.take_batch()) is None:
            can_checkpoint = self._checkpoint_version < self._training.trainer.version
            if can_checkpoint and self._journal.why_full():
                # No trial is accepted until there is space. Once a checkpoint is durable, earlier
                # segments of the journal may be deleted.
                await self._checkpoint()
                await self._wait_until_checkpointed()
                continue
            self._coordinator.arrived.clear()
            if self._journal.is_over_budget():
                # A header that becomes durable may free segments.
                await self._journal.settled()
                self._check_budget()
            await self._coordinator.arrived.wait()
        return groups

    def _check_budget(self) -> None:
        """Raise a `DeterministicFailure` if the journal is over its budget before the last step:
        the newest checkpoint is durable then, and no later one can free space.
        """
        is_last = self._training.trainer.version == self._config.learner.steps
        if self._journal.is_over_budget() and not is_last:
            raise DeterministicFailure(
                f"{self._journal.why_full()}, but the newest checkpoint, of step "
                f"{self._checkpoint_version}, frees no space: the trials of "
                f"{self._config.admission.max_staleness + 2} steps do not fit. Multiply "
                "journal.max_bytes by 4 or more, then --resume"
            )

    def _learn_methods(self, commit: Commit, groups: list[Group]) -> Commit:
        """Let the methods learn from a batch; return the commit with digests of their states."""
        methods = self._coordinator.methods
        methods.learn(groups)
        return msgspec.structs.replace(commit, methods=methods.digests())

    # Checkpoints. With a single rank, the training waits while a checkpoint is written; several
    # ranks write it while the next steps are trained.

    async def _checkpoint(self) -> None:
        """Begin a checkpoint. If cancelled, the checkpoint before it stays."""
        await self._wait_until_checkpointed()
        self._enter("checkpoint")
        self._checkpoint_at = time.monotonic()
        version, counters = self._training.trainer.version, self.run_log.counters()
        write = partial(self._thread.call, self._training.checkpoint, counters)
        written = await until_there_is_space(write, self._coordinator.note)
        self._pending_checkpoint = written, version
        await self._finish_checkpoint()

    async def _finish_checkpoint(self) -> None:
        """If the pending checkpoint is durable, free the space that it makes unnecessary."""
        if self._pending_checkpoint is not None and self._pending_checkpoint[0].done():
            await self._wait_until_checkpointed()

    async def _wait_until_checkpointed(self) -> None:
        """Wait until the pending checkpoint is durable. If cancelled, it is still written.

        Raises:
            RunError: the checkpoint cannot be written.
        """
        if self._pending_checkpoint is None:
            return
        written, version = self._pending_checkpoint
        self._enter("checkpoint")
        await asyncio.shield(asyncio.wrap_future(written))
        self._pending_checkpoint, self._checkpoint_version = None, version
        self._journal.compact(version)

    # The end of the run.

    async def _parity(self) -> dict[str, float]:
        """Compare the log-probs of engine and learner on groups sampled with the last weights.

        These groups are granted and played as usual, and never trained. The first ones may still be
        of older versions, whose tokens are not compared.
        """
        version = self._training.trainer.version
        parity: dict[str, float] = {}
        if self._config.admission.lag:
            return parity  # actors never have the last weights
        self._enter("log-prob check")
        # If no such group arrives in time, nothing is compared here; the metrics of the steps have
        # comparisons too.
        with suppress(TimeoutError):
            async with asyncio.timeout(PARITY_PATIENCE_S):
                while parity.get("equal_version_tokens", 0) == 0 and version > 0:
                    groups = await self._batch()
                    parity = await self._thread.call(self._training.parity, groups)
        return parity

    async def _wait_for_peers(self, deadline: float) -> None:
        """Wait until every peer can be sent a Goodbye, at most until `deadline` on the loop."""
        # The files of a run count this wait as "peer gone", like a wait for peers that were lost.
        self._enter("peer gone")
        # Nothing depends on the Goodbye. The supervisor ends actors, and an evaluator that is still
        # starting on busy cores, or whose connection broke, finds the end in the run's files.
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while not self._coordinator.has_all_hellos():
                    self._coordinator.greeted.clear()
                    await self._coordinator.greeted.wait()


class Publisher:
    """Write and announce weights while the next step is trained. `run` is its task.

    It takes one version at a time: the training loop waits while the version before is still being
    written, but never for an actor.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._weights, self._coordinator = coordinator.weights, coordinator
        self._offered: asyncio.Queue[tuple[Snapshot, str]] = asyncio.Queue(1)
        """The version that is to be published: a copy of its weights, and their digest."""

    async def wait_until_announced(self) -> None:
        """Wait until every version offered so far is announced. Safe to cancel."""
        await self._offered.join()

    def offer(self, snapshot: Snapshot, digest: str) -> None:
        """Hand over a version for publication; the version before must be announced."""
        self._offered.put_nowait((snapshot, digest))

    async def run(self) -> None:
        """Publish the offered versions. If cancelled, a write that has begun is finished.

        Raises:
            RunError: weights could not be written, for another reason than a full disk.
        """
        while True:
            await self._publish(*await self._offered.get())
            self._offered.task_done()

    async def _publish(self, snapshot: Snapshot, digest: str) -> None:
        """Write and announce the weights of a version; remove weights that nobody needs now."""
        weights, coordinator = self._weights, self._coordinator
        is_rival = coordinator.league.becomes_rival(snapshot.version)

        async def write() -> None:
            try:
                await weights.write(snapshot, is_durable=is_rival)
            except DiskFull as full:
                # Peers may have loaded newer weights since the last removal.
                if not await self._remove_unused():
                    if unread := weights.leases.unread():
                        full.problem += f"; versions still to be loaded: {unread}"
                    raise
                await weights.write(snapshot, is_durable=is_rival)

        await until_there_is_space(write, coordinator.note)
        coordinator.announce(weights.publication(snapshot.version, digest))
        await self._remove_unused()

    async def _remove_unused(self) -> list[int]:
        """Remove the weights that nobody needs now; return their versions."""
        weights, coordinator = self._weights, self._coordinator
        if unused := coordinator.unused(await weights.versions()):
            # A restarted learner needs the weights of every opponent that its journal names. So
            # weights are removed only after the records that make them unnecessary are durable.
            await coordinator.journal.settled()
        await weights.remove(unused)
        return unused
