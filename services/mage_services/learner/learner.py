"""The learner: an inbox on the event loop, a trainer in a thread, and the coordinator between them.

    task      consumes                waits for               unblocks
    inbox     peers' messages         the socket              train, by `coordinator.arrived`
    files     questions for files     the inbox               actors on other machines
    clock     -                       half a second           lapsed grants, the supervisor's view
    train     batches of groups       `coordinator.arrived`   publish, by a snapshot of the weights
    publish   snapshots               a snapshot              actors, by announcing the version

The trainer never waits for an actor but for the batch itself: it copies its weights and goes on,
and `weight_store.py` writes and announces the copy meanwhile.

A step is committed to the journal, durably, before anyone hears of its version. A learner that
begins brings the newest checkpoint up to date from the journal, and its ledger of groups with it.
"""

import asyncio
import math
import time
from collections.abc import Callable

from mage_async.admission.ledger import SlotLedger
from mage_async.assembly import environment_of
from mage_async.policy.warm_start import Progress
from mage_async.protocol.journal_records import Published
from mage_async.protocol.messages import Enquiry, Fetch, Publication
from mage_async.results.durable_files import sync
from mage_async.tasks.population import League
from mage_async.trajectory import Group
from mage_services.journal.writer import JournalFile
from mage_services.learner.coordinator import Coordinator
from mage_services.learner.coordinator_rules import head_of
from mage_services.learner.file_server import FileServer
from mage_services.learner.parts import (
    check_rivals,
    coordinator_rules_of,
    journal_of,
    ledger_of,
    matchmaker_of,
    newest_checkpoint,
    pace_of,
)
from mage_services.learner.run_log import RunLog
from mage_services.learner.training import Begun, Replayed, Training
from mage_services.learner.worker import Worker
from mage_services.processes.process import Status, run_process, ticks
from mage_services.processes.startup import Startup, read_startup
from mage_services.processes.time_accounting import TimeAccounting
from mage_services.transport.authentication import keys_in, learner_keys
from mage_services.transport.channel import LearnerChannel
from mage_services.weights.weight_store import WeightStore, WeightTransport, weight_transport_of

TICK_S = 0.5
HEARD_S = 5.0
"""How long to wait, in the end, for a hello from everyone a restarted learner knows of."""
PARITY_PATIENCE_S = 5.0
"""How long to wait, after the last step, for groups drawn by the last weights."""


class Learner:
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
        weights: WeightTransport,
        run_log: RunLog,
    ) -> None:
        self._startup, self._status, self._coordinator = startup, status, coordinator
        self._journal, self._league = journal, league
        self._weights, self._earlier = weights, weights.versions()
        self.weight_store = WeightStore(
            weights, self._announce, coordinator.unused, journal.settled, league.takes
        )
        self._training, self._worker, self.run_log = begun.training, worker, run_log
        self._checkpointed = newest_checkpoint(begun)
        self._enter = run_log.time.enter

    async def train(self) -> dict[str, float]:
        """Train until the configured version, then measure parity, which is returned, and say
        goodbye. Cancellation leaves what the journal has.
        """
        config = self._startup.config
        opened = asyncio.get_running_loop().time()
        await self._publish(await self._worker.call(self._training.digest))
        await self.weight_store.wait_until_announced()
        self._enter("batch not full")
        while self._training.trainer.version < config.learner.steps:
            await self._step()
        await self.weight_store.wait_until_announced()
        parity = await self._parity()
        self._coordinator.close()
        await self._checkpoint()
        await self.run_log.write_end(parity)
        await self._hear_all(opened + HEARD_S)
        self._coordinator.dismiss("the run is complete")
        return parity

    async def _hear_all(self, due: float) -> None:
        """Wait until everyone can be said goodbye to, but not beyond `due`, in the loop's time."""
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
        await self.weight_store.wait_until_announced()  # the journal has versions in their order
        self._enter("journal sync")
        commit = await self._worker.call(self._training.commit, groups, self.run_log.elapsed_s())
        self._league.trained(groups)  # as a restarted learner does where it reads the commit
        await self._journal.durable(commit)
        self._enter("publishing")
        await self._publish(commit.digest)
        self._coordinator.keep_pace(time.monotonic() - began)
        self._coordinator.lengths.trained(commit.grants)
        self._coordinator.trained(commit.version)
        record = await self.run_log.step(groups, metrics, waited_s)
        if commit.version % self._startup.config.learner.checkpoint_every == 0:
            await self._checkpoint()
            await self.run_log.write_end({})
        await self.run_log.keep_sample(groups)
        self._enter("batch not full")
        self._status.send("step", metrics=record, **self.run_log.view())

    async def _publish(self, digest: str) -> None:
        """Copy the weights and leave the rest to the publisher."""
        await self.weight_store.offer(await self._worker.call(self._training.snapshot), digest)

    def _announce(self, publication: Publication) -> None:
        """Tell the peers of a version that is there to be read."""
        is_open, version = self._coordinator.is_open, publication.version
        if is_open or self._league.wants(version):
            self._journal.append(
                Published(version=version, path=publication.path, digest=publication.digest)
            )
        self._league.published(version)
        if is_open:
            self._coordinator.publish(publication)
        else:
            self._coordinator.open(*self._lagging(publication), publication, earlier=self._earlier)

    def _lagging(self, newest: Publication) -> list[Publication]:
        """Publications that actors behind a restarted learner have to draw with, oldest first.

        Without what the journal no longer knows they begin with newer weights.
        """
        wanted = range(max(0, newest.version - self._startup.config.admission.lag), newest.version)
        digests = self._training.digests
        there = [v for v in wanted if v in digests and v in self._earlier]
        if len(there) < len(wanted):
            self._status.send(
                "note", text="actors begin with newer weights than admission.lag says"
            )
        return [
            Publication(version=v, path=str(self._weights.file(v).resolve()), digest=digests[v])
            for v in there
        ]

    async def _batch(self) -> list[Group]:
        """The next batch in order of grant. Cancellation leaves it in the ledger."""
        while (groups := self._coordinator.take_batch()) is None:
            if self._journal.why_full() and self._checkpointed < self._training.trainer.version:
                await self._checkpoint()  # it may make segments unnecessary
                continue
            self._coordinator.arrived.clear()
            await self._coordinator.arrived.wait()
        return groups

    async def _checkpoint(self) -> None:
        self._enter("checkpoint")
        await self._worker.call(self._training.checkpoint, self.run_log.counters())
        self._checkpointed = self._training.trainer.version
        self._journal.compact(self._checkpointed)

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


async def _inbox(
    channel: LearnerChannel, coordinator: Coordinator, file_server: FileServer
) -> None:
    """Hand questions for files to the file server, and all else to the coordinator.

    Cancellation loses no message.
    """
    while True:
        peer, message = await channel.receive()
        if isinstance(message, Enquiry | Fetch):
            file_server.take(peer, message)
        else:
            coordinator.take(peer, message)


async def _clock(coordinator: Coordinator, learner: Learner, status: Status) -> None:
    async for _ in ticks(TICK_S):
        coordinator.tick()
        status.send("view", **learner.run_log.view())


async def main(startup: Startup, status: Status) -> None:
    """Bind, prepare the policy while peers arrive, train, and end.

    Until the policy and the ledger are as they were, what peers say waits in the socket.
    """
    config, time_accounting, worker = startup.config, TimeAccounting("preparing"), Worker()
    ledger, rules = ledger_of(config), coordinator_rules_of(config)
    league = League(config.population, environment_of(config).facts)
    with LearnerChannel(
        startup.address,
        build=startup.build,
        config_digest=startup.config_digest,
        keys=keys_in(learner_keys, config.transport.keys),
    ) as channel:
        began = time.monotonic()
        begun = await _begin(startup, status, worker, ledger, league)
        warm_start_s, training = time.monotonic() - began, begun.training
        journal = journal_of(startup, begun, head_of(ledger, rules, league))
        ledger.resume(time.monotonic())
        weights = weight_transport_of(startup.run, config)
        matchmaker = matchmaker_of(config, league)
        coordinator = Coordinator(channel, ledger, journal, matchmaker, rules, time.monotonic)
        coordinator.pace, coordinator.league, coordinator.weights_of = (
            pace_of(config),
            league,
            weights.file,
        )
        check_rivals(coordinator.rivals(), weights)
        status.send("fact", text=weights.describe())
        run_log = RunLog(
            startup, coordinator, league, training, worker, warm_start_s, time_accounting
        )
        learner = Learner(
            startup, status, coordinator, league, journal, begun, worker, weights, run_log
        )
        try:
            file_server = FileServer(channel, rules.config, startup.run.policy, weights.file)
            await _live(channel, coordinator, file_server, learner, journal, status, begun.replayed)
        finally:
            journal.close()
            learner.weight_store.close()
        worker.close()
        channel.close(linger_s=2.0)
    status.send("done", reason="the run is complete")


async def _begin(
    startup: Startup, status: Status, worker: Worker, ledger: SlotLedger, league: League
) -> Begun:
    """The policy and the ledger as they were, or new. Cancellation leaves what is written."""
    began = time.monotonic()
    _announce(startup, status)
    begun = await worker.call(Training.begin, startup, _reporter(status), ledger, league)
    if startup.run.checkpoints.exists():  # who was killed may not have come to it
        await worker.call(sync, startup.run.checkpoints)
    status.send("fact", text=begun.training.describe())
    status.send("policy", origin=begun.origin, warm_start_s=time.monotonic() - began)
    if begun.lost_bytes:
        status.send("note", text=f"journal: a torn tail of {begun.lost_bytes} bytes was cut")
    return begun


async def _live(
    channel: LearnerChannel,
    coordinator: Coordinator,
    file_server: FileServer,
    learner: Learner,
    journal: JournalFile,
    status: Status,
    replayed: list[Replayed],
) -> None:
    """Train to the end beside inbox, clock and the journal's watch. Cancellation ends all."""
    await learner.run_log.complete(replayed)
    async with asyncio.TaskGroup() as tasks:
        others = [
            tasks.create_task(_inbox(channel, coordinator, file_server), name="inbox"),
            tasks.create_task(file_server.run(), name="files"),
            tasks.create_task(_clock(coordinator, learner, status), name="clock"),
            tasks.create_task(journal.watch(), name="journal"),
            tasks.create_task(learner.weight_store.run(), name="publish"),
        ]
        parity = await learner.train()
        for other in others:
            other.cancel()
    await learner.run_log.write_end(parity)  # again: now nothing is taken in any more


def _announce(startup: Startup, status: Status) -> None:
    """Say that a warm start may follow: its data take a moment."""
    warm = startup.config.warm_start
    if warm and not startup.run.policy.exists():
        _reporter(status)(Progress(0, warm.steps, math.nan, math.nan))


def _reporter(status: Status) -> Callable[[Progress], None]:
    def report(progress: Progress) -> None:
        status.send(
            "warm_start",
            step=progress.step,
            steps=progress.steps,
            loss=progress.loss,
            gate=progress.gate,
        )

    return report


if __name__ == "__main__":
    run_process(lambda status: main(read_startup("The learner of a run."), status))
