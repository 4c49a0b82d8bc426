"""The learner: an inbox on the event loop, a trainer in a thread, and the desk between them.

    task      consumes                waits for              unblocks
    inbox     peers' messages         the socket             train, by `desk.arrived`
    blobs     questions for files     the inbox              actors on other machines
    clock     -                       half a second          lapsed grants, the supervisor's view
    train     batches of groups       `desk.arrived`         publish, by a snapshot of the weights
    publish   snapshots               a snapshot             actors, by announcing the version

The trainer never waits for an actor but for the batch itself: it copies its weights and goes on,
and `publishing.py` writes and announces the copy meanwhile.

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
from mage_services.learner.coordinator import Desk
from mage_services.learner.coordinator_rules import head_of
from mage_services.learner.file_server import Blobs
from mage_services.learner.parts import (
    check_rivals,
    journal_of,
    ledger_of,
    matchmaker_of,
    newest_checkpoint,
    pace_of,
    rules_of_desk,
)
from mage_services.learner.run_log import Books
from mage_services.learner.training import Begun, Replayed, Training
from mage_services.learner.worker import Worker
from mage_services.processes.process import Status, run_process, ticks
from mage_services.processes.startup import Startup, read_startup
from mage_services.processes.time_accounting import TimeBook
from mage_services.transport.authentication import keys_in, learner_keys
from mage_services.transport.channel import LearnerChannel
from mage_services.weights.weight_store import Publishing, Shelf, shelf_of

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
        desk: Desk,
        league: League,
        journal: JournalFile,
        begun: Begun,
        worker: Worker,
        shelf: Shelf,
        books: Books,
    ) -> None:
        self._startup, self._status, self._desk = startup, status, desk
        self._journal, self._league = journal, league
        self._shelf, self._earlier = shelf, shelf.versions()
        self.publishing = Publishing(
            shelf, self._announce, desk.unused, journal.settled, league.takes
        )
        self._training, self._worker, self.books = begun.training, worker, books
        self._checkpointed = newest_checkpoint(begun)
        self._enter = books.time.enter

    async def train(self) -> dict[str, float]:
        """Train until the configured version, then measure parity, which is returned, and say
        goodbye. Cancellation leaves what the journal has.
        """
        config = self._startup.config
        opened = asyncio.get_running_loop().time()
        await self._publish(await self._worker.call(self._training.digest))
        await self.publishing.wait_until_announced()
        self._enter("batch not full")
        while self._training.trainer.version < config.learner.steps:
            await self._step()
        await self.publishing.wait_until_announced()
        parity = await self._parity()
        self._desk.close()
        await self._checkpoint()
        await self.books.write_end(parity)
        await self._hear_all(opened + HEARD_S)
        self._desk.dismiss("the run is complete")
        return parity

    async def _hear_all(self, due: float) -> None:
        """Wait until everyone can be said goodbye to, but not beyond `due`, in the loop's time."""
        self._enter("peer gone")
        try:
            async with asyncio.timeout_at(due):
                while not self._desk.has_heard_all():
                    self._desk.greeted.clear()
                    await self._desk.greeted.wait()
        except TimeoutError:
            self._status.send("note", text="somebody did not come back to hear the goodbye")

    async def _step(self) -> None:
        groups = await self._batch()
        waited_s, began = self.books.waited_s(), time.monotonic()
        self._enter("training")
        metrics = await self._worker.call(self._training.step, groups)
        self._enter("publishing")
        await self.publishing.wait_until_announced()  # the journal has versions in their order
        self._enter("journal sync")
        commit = await self._worker.call(self._training.commit, groups, self.books.elapsed_s())
        self._league.trained(groups)  # as a restarted learner does where it reads the commit
        await self._journal.durable(commit)
        self._enter("publishing")
        await self._publish(commit.digest)
        self._desk.keep_pace(time.monotonic() - began)
        self._desk.lengths.trained(commit.grants)
        self._desk.trained(commit.version)
        record = await self.books.step(groups, metrics, waited_s)
        if commit.version % self._startup.config.learner.checkpoint_every == 0:
            await self._checkpoint()
            await self.books.write_end({})
        await self.books.keep_sample(groups)
        self._enter("batch not full")
        self._status.send("step", metrics=record, **self.books.view())

    async def _publish(self, digest: str) -> None:
        """Copy the weights and leave the rest to the publisher."""
        await self.publishing.offer(await self._worker.call(self._training.snapshot), digest)

    def _announce(self, publication: Publication) -> None:
        """Tell the peers of a version that is there to be read."""
        is_open, version = self._desk.is_open, publication.version
        if is_open or self._league.wants(version):
            self._journal.append(
                Published(version=version, path=publication.path, digest=publication.digest)
            )
        self._league.published(version)
        if is_open:
            self._desk.publish(publication)
        else:
            self._desk.open(*self._lagging(publication), publication, earlier=self._earlier)

    def _lagging(self, newest: Publication) -> list[Publication]:
        """Of a restarted learner: what actors that lag behind it have to draw with, oldest first.

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
            Publication(version=v, path=str(self._shelf.file(v).resolve()), digest=digests[v])
            for v in there
        ]

    async def _batch(self) -> list[Group]:
        """The next batch in order of grant. Cancellation leaves it in the ledger."""
        while (groups := self._desk.take_batch()) is None:
            if self._journal.why_full() and self._checkpointed < self._training.trainer.version:
                await self._checkpoint()  # it may make segments unnecessary
                continue
            self._desk.arrived.clear()
            await self._desk.arrived.wait()
        return groups

    async def _checkpoint(self) -> None:
        self._enter("checkpoint")
        await self._worker.call(self._training.checkpoint, self.books.counters())
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


async def _inbox(channel: LearnerChannel, desk: Desk, blobs: Blobs) -> None:
    """Hand every message to the desk, or who asks for files to those. Cancellation loses none."""
    while True:
        peer, message = await channel.receive()
        if isinstance(message, Enquiry | Fetch):
            blobs.take(peer, message)
        else:
            desk.take(peer, message)


async def _clock(desk: Desk, learner: Learner, status: Status) -> None:
    async for _ in ticks(TICK_S):
        desk.tick()
        status.send("view", **learner.books.view())


async def main(startup: Startup, status: Status) -> None:
    """Bind, prepare the policy while peers arrive, train, and end.

    Until the policy and the ledger are as they were, what peers say waits in the socket.
    """
    config, time_book, worker = startup.config, TimeBook("preparing"), Worker()
    ledger, rules = ledger_of(config), rules_of_desk(config)
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
        shelf, matchmaker = shelf_of(startup.run, config), matchmaker_of(config, league)
        desk = Desk(channel, ledger, journal, matchmaker, rules, time.monotonic)
        desk.pace, desk.league, desk.weights_of = pace_of(config), league, shelf.file
        check_rivals(desk.rivals(), shelf)
        status.send("fact", text=shelf.describe())
        books = Books(startup, desk, league, training, worker, warm_start_s, time_book)
        learner = Learner(startup, status, desk, league, journal, begun, worker, shelf, books)
        try:
            blobs = Blobs(channel, rules.config, startup.run.policy, shelf.file)
            await _live(channel, desk, blobs, learner, journal, status, begun.replayed)
        finally:
            journal.close()
            learner.publishing.close()
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
    desk: Desk,
    blobs: Blobs,
    learner: Learner,
    journal: JournalFile,
    status: Status,
    replayed: list[Replayed],
) -> None:
    """Train to the end beside inbox, clock and the journal's watch. Cancellation ends all."""
    await learner.books.complete(replayed)
    async with asyncio.TaskGroup() as tasks:
        others = [
            tasks.create_task(_inbox(channel, desk, blobs), name="inbox"),
            tasks.create_task(blobs.run(), name="blobs"),
            tasks.create_task(_clock(desk, learner, status), name="clock"),
            tasks.create_task(journal.watch(), name="journal"),
            tasks.create_task(learner.publishing.run(), name="publish"),
        ]
        parity = await learner.train()
        for other in others:
            other.cancel()
    await learner.books.write_end(parity)  # again: now nothing is taken in any more


def _announce(startup: Startup, status: Status) -> None:
    """Say that a warm start may follow: its data take a moment."""
    steps = startup.config.warm_start.steps
    if steps and not startup.run.policy.exists():
        _reporter(status)(Progress(0, steps, math.nan, math.nan))


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
