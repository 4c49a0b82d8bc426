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
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from mage_async import config_file
from mage_async.admission import SlotLedger
from mage_async.admission_rules import RULES
from mage_async.assembly import environment_of
from mage_async.concurrency import Concurrency
from mage_async.config import Config
from mage_async.errors import RunError
from mage_async.journal import Head, Published
from mage_async.learning.warm_start import Progress
from mage_async.matchmaking import Matchmaker
from mage_async.metrics import batch_metrics, batch_totals, check_names, trial_counts
from mage_async.population import League
from mage_async.run_records import read_lines
from mage_async.task_stream import TaskStream
from mage_async.trajectory import Group
from mage_async.wire import Enquiry, Fetch, Publication
from mage_services.blobs import Blobs
from mage_services.blocked import TimeBook
from mage_services.channel import LearnerChannel
from mage_services.curve import keys_in, learner_keys
from mage_services.desk import Desk, DeskRules
from mage_services.journal_file import JournalFile
from mage_services.process import Status, run_process, ticks
from mage_services.publishing import Publishing, Shelf, shelf_of
from mage_services.startup import Startup, read_startup
from mage_services.training import Begun, Replayed, Training

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
        training: Training,
        worker: "Worker",
        shelf: Shelf,
        warm_start_s: float,
        time_book: TimeBook,
    ) -> None:
        self._startup, self._status, self._desk = startup, status, desk
        self._league = league
        self._journal = journal
        self._shelf, self._earlier = shelf, shelf.versions()
        self.publishing = Publishing(shelf, self._announce, desk.unused, league.wants)
        self._training, self._worker, self._warm_start_s = training, worker, warm_start_s
        self._units = environment_of(startup.config).facts.units
        self._began = time.monotonic() - training.counters.get("train_s", 0.0)
        self._checkpointed = training.trainer.version
        self._last = time.monotonic()
        self._totals: dict[str, float] = dict(training.counters.get("totals", {}))
        self.time = time_book

    async def train(self) -> dict[str, float]:
        """Train until the configured version, then measure parity, which is returned, and say
        goodbye. Cancellation leaves what the journal has.
        """
        config = self._startup.config
        opened = asyncio.get_running_loop().time()
        await self._publish(await self._worker.call(self._training.digest))
        await self.publishing.wait_until_announced()
        self.time.enter("batch not full")
        while self._training.trainer.version < config.learner.steps:
            await self._step()
        await self.publishing.wait_until_announced()
        parity = await self._parity()
        self._desk.close()
        await self._checkpoint()
        await self.write_end(parity)
        await self._hear_all(opened + HEARD_S)
        self._desk.dismiss("the run is complete")
        return parity

    async def _hear_all(self, due: float) -> None:
        """Wait until everyone can be said goodbye to, but not beyond `due`, in the loop's time."""
        self.time.enter("peer gone")
        try:
            async with asyncio.timeout_at(due):
                while not self._desk.has_heard_all():
                    self._desk.greeted.clear()
                    await self._desk.greeted.wait()
        except TimeoutError:
            self._status.send("note", text="somebody did not come back to hear the goodbye")

    async def _step(self) -> None:
        groups = await self._batch()
        waited, began = time.monotonic() - self._last, time.monotonic()
        self.time.enter("training")
        metrics = await self._worker.call(self._training.step, groups)
        self.time.enter("journal sync")
        elapsed_s = time.monotonic() - self._began
        commit = await self._worker.call(self._training.commit, groups, elapsed_s)
        self._league.trained(groups)  # as a restarted learner does where it reads the commit
        await self._journal.durable(commit)
        self.time.enter("publishing")
        await self._publish(commit.digest)
        self._desk.keep_pace(time.monotonic() - began)
        self._desk.lengths.trained(commit.grants)
        self._desk.trained(commit.version)
        record = self._record(groups, metrics, waited)
        await self._worker.call(self._training.record, self._startup.run.metrics, record)
        if commit.version % self._startup.config.learner.checkpoint_every == 0:
            await self._checkpoint()
            await self.write_end({})
        await self._keep_sample(groups)
        self.time.enter("batch not full")
        self._status.send("step", metrics=record, **self.view())

    async def _publish(self, digest: str) -> None:
        """Copy the weights and leave the rest to the publisher."""
        await self.publishing.wait_until_announced()
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
        self.time.enter("checkpoint")
        await self._worker.call(self._training.checkpoint, self._counters())
        self._checkpointed = self._training.trainer.version
        self._journal.compact(self._checkpointed)

    async def book(self, replayed: list[Replayed]) -> None:
        """Complete the books with steps that were committed and perhaps not written down."""
        metrics = self._startup.run.metrics
        known = {record["step"] for record in read_lines(metrics)}
        for step in replayed:
            record = self._record_of(
                step.version, step.groups, step.metrics, 0.0, step.elapsed_s, step.time_s
            )
            self._add_totals(step.groups, record)
            if step.version not in known:
                await self._worker.call(self._training.record, metrics, record)
            self._began = time.monotonic() - step.time_s

    async def _parity(self) -> dict[str, float]:
        """Log-probs of groups drawn by the last weights: granted, played, and never trained."""
        version = self._training.trainer.version
        parity: dict[str, float] = {}
        if self._startup.config.admission.lag:
            return parity  # actors never have the last weights
        self.time.enter("parity")
        try:
            async with asyncio.timeout(PARITY_PATIENCE_S):
                while parity.get("equal_version_tokens", 0) == 0 and version > 0:
                    groups = await self._batch()
                    parity = await self._worker.call(self._training.parity, groups)
        except TimeoutError:
            self._status.send("note", text="no group was drawn by the last weights in time")
        return parity

    def _record(
        self, groups: list[Group], metrics: dict[str, Any], waited: float
    ) -> dict[str, Any]:
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        version = self._training.trainer.version
        record = self._record_of(version, groups, metrics, waited, elapsed, now - self._began)
        self._add_totals(groups, record)
        return record

    def _record_of(
        self,
        step: int,
        groups: list[Group],
        metrics: dict[str, Any],
        waited: float,
        elapsed: float,
        time_s: float,
    ) -> dict[str, Any]:
        record = {
            "step": step,
            "time_s": time_s,
            **batch_metrics(groups, self._units, elapsed, self._num_episodes()),
            **metrics,
            "waiting_s": waited,
            "groups_in_flight": self._desk.counts().groups.in_flight,
        }
        check_names(record)
        return record

    def _num_episodes(self) -> int:
        return self._startup.config.trial.episodes

    def _add_totals(self, groups: list[Group], record: dict[str, Any]) -> None:
        for name, value in {**batch_totals(groups), "train_s": record["train_s"]}.items():
            self._totals[name] = self._totals.get(name, 0) + value

    async def _keep_sample(self, groups: list[Group]) -> None:
        """One trial of the batch as text, ten times a run, for people to read."""
        version, steps = self._training.trainer.version, self._startup.config.learner.steps
        if version % max(1, steps // 10) == 0:
            await self._worker.call(self._training.sample, groups[0].trials[0], version)

    def _counters(self) -> dict[str, Any]:
        return {
            "next_grant": self._desk.ledger.next_grant,
            "train_s": time.monotonic() - self._began,
            "totals": self._totals,
        }

    async def write_end(self, parity: dict[str, float]) -> None:
        """What only the learner knows of the run so far; written at checkpoints and at the end.

        Read here on the loop, where nothing changes meanwhile, and written by the thread.
        """
        end = {
            "version": self._training.trainer.version,
            "warm_start_s": self._warm_start_s,
            "train_s": time.monotonic() - self._began,
            "totals": self._totals,
            "parity": parity,
            "trials": trial_counts(self._desk.counts()),
            "dropped_by_reason": dict(self._desk.counts().dropped_by_reason),
            "granted_again": self._desk.counts().granted_again,
            "fates": self._desk.fates(),
            "blocked_s": self.shares(),
        }
        if self._league.is_on:
            end["population"] = msgspec.to_builtins(self._league.table())
        await self._worker.call(_write_whole, self._startup.run.learner, json.dumps(end, indent=2))

    def shares(self) -> dict[str, dict[str, float]]:
        """Seconds by state, of the learner and of every actor."""
        return {"learner": self.time.seconds(), **self._desk.shares()}

    def view(self) -> dict[str, Any]:
        """What the terminal shows beside a step's metrics."""
        return {
            "trials": trial_counts(self._desk.counts()),
            "blocked_s": self.shares(),
            "faults": self._desk.faults[-3:],
        }


def _write_whole(file: Path, text: str) -> None:
    working = file.with_suffix(".part")
    working.write_text(text)
    os.replace(working, file)


class Worker:
    """The one thread that computes."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    async def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run `work` in the thread. Cancellation lets what has begun finish, unheard."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args))

    def close(self) -> None:
        """Drop what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


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
        status.send("view", **learner.view())


def _ledger(config: Config) -> SlotLedger:
    rules = config.admission
    return SlotLedger(
        rules.groups_per_step,
        rules.max_staleness,
        rules.trials_per_group,
        rule=RULES[rules.rule],
        lag=rules.lag,
        concurrency=rules.max_groups_in_play,
    )


def _tasks(config: Config, league: League) -> Matchmaker:
    environment = environment_of(config)
    return Matchmaker(
        TaskStream(environment, config.seed).task,
        environment,
        league,
        config.population,
        seed=config.seed,
        groups_per_step=config.admission.groups_per_step,
    )


def check_rivals(versions: Iterable[int], shelf: Shelf) -> None:
    """Whether the weights of all rivals that the journal names are there.

    Raises:
        RunError: some are gone.
    """
    missing = [file for version in sorted(versions) if not (file := shelf.file(version)).is_file()]
    if missing:
        raise RunError(
            f"the journal names rivals whose weights are gone: {', '.join(map(str, missing))}; "
            "restore them, or begin the run anew"
        )


def _pace(config: Config) -> Concurrency:
    rules = config.admission
    return Concurrency(
        rules.max_groups_in_play, rules.groups_per_step, rules.max_staleness, rules.over_age_target
    )


def _rules(config: Config) -> DeskRules:
    return DeskRules(
        config.trial.episodes,
        config.admission.grant_deadline_s,
        config.admission.max_drops_in_a_row,
        config.evaluation.every,
        config.learner.steps,
        config.admission.lag,
        config_file.dump(config),
        config.curriculum,
    )


def _journal(startup: Startup, begun: Begun, head: Head) -> JournalFile:
    """A new segment behind those of earlier lives."""
    rules = startup.config.journal
    return JournalFile(
        startup.run.journal, begun.segments, head, rules.max_bytes, rules.segment_bytes
    )


async def main(startup: Startup, status: Status) -> None:
    """Bind, prepare the policy while peers arrive, train, and end.

    Until the policy and the ledger are as they were, what peers say waits in the socket.
    """
    config, time_book = startup.config, TimeBook("preparing")
    worker, ledger, rules = Worker(), _ledger(config), _rules(config)
    league = League(config.population, environment_of(config).facts)
    with LearnerChannel(
        startup.address,
        build=startup.build,
        config_digest=startup.config_digest,
        keys=keys_in(learner_keys, config.transport.keys),
    ) as channel:
        began = time.monotonic()
        _announce(startup, status)
        begun = await worker.call(Training.begin, startup, _reporter(status), ledger, league)
        warm_start_s = time.monotonic() - began
        status.send("fact", text=begun.training.describe())
        status.send("policy", origin=begun.origin, warm_start_s=warm_start_s)
        if begun.lost_bytes:
            status.send("note", text=f"journal: a torn tail of {begun.lost_bytes} bytes was cut")
        head = ledger.head(rules.config, rules.deadline_s)
        population = league.table() if league.is_on else None
        journal = _journal(startup, begun, msgspec.structs.replace(head, population=population))
        ledger.resume(time.monotonic())
        shelf, tasks_of = shelf_of(startup.run, config), _tasks(config, league)
        desk = Desk(channel, ledger, journal, tasks_of, rules, time.monotonic, pace=_pace(config))
        desk.league, desk.weights_of = league, shelf.file
        check_rivals(desk.rivals(), shelf)
        status.send("fact", text=shelf.describe())
        learner = Learner(
            startup,
            status,
            desk,
            league,
            journal,
            begun.training,
            worker,
            shelf,
            warm_start_s,
            time_book,
        )
        try:
            blobs = Blobs(channel, rules.config, startup.run.policy, shelf.file)
            await _live(channel, desk, blobs, learner, journal, status, begun.replayed)
        finally:
            journal.close()
            learner.publishing.close()
        worker.close()
        channel.close(linger_s=2.0)
    status.send("done", reason="the run is complete")


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
    await learner.book(replayed)
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
    await learner.write_end(parity)  # again: now nothing is taken in any more


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
