"""The learner: an inbox on the event loop, a trainer in a thread, and the coordinator between them.

    task      consumes                waits for               unblocks
    inbox     peers' messages         the socket              train, by `coordinator.arrived`
    clock     -                       half a second           lapsed grants, the supervisor's view
    ranks     -                       the end of a follower   the end of the learner
    train     batches of groups       `coordinator.arrived`   publish, by a snapshot of the weights
    publish   snapshots               a snapshot              actors, by announcing the version

The trainer never waits for an actor but for the batch itself: it copies its weights and goes on,
and `publisher.py` writes and announces the copy meanwhile.

A step is committed to the journal, durably, before anyone hears of its version. A learner that
begins brings the newest checkpoint up to date from the journal, and its ledger of groups with it.
"""

import asyncio
import math
import time
from collections.abc import Callable

from mage_async.admission.ledger import SlotLedger
from mage_async.assembly import environment_of
from mage_async.graph_memory.memory import GraphMemory
from mage_async.policy.warm_start import Progress
from mage_async.results.durable_files import sync
from mage_async.tasks.population import League
from mage_services.journal.writer import JournalFile
from mage_services.learner.coordinator import Coordinator
from mage_services.learner.coordinator_rules import head_of
from mage_services.learner.parts import (
    check_rivals,
    coordinator_rules_of,
    journal_of,
    ledger_of,
    matchmaker_of,
    pace_of,
    weight_store_of,
)
from mage_services.learner.ranks.gang import Gang
from mage_services.learner.resume import Begun, Replayed, begin
from mage_services.learner.run_log import RunLog
from mage_services.learner.training_loop import TrainingLoop
from mage_services.learner.worker import Worker
from mage_services.processes.process import Status, run_process, ticks
from mage_services.processes.startup import Startup, read_startup
from mage_services.processes.time_accounting import TimeAccounting
from mage_services.transport.authentication import keys_in, learner_keys
from mage_services.transport.learner_channel import LearnerChannel

TICK_S = 0.5


async def _inbox(channel: LearnerChannel, coordinator: Coordinator) -> None:
    """Hand every message to the coordinator. Cancellation loses none."""
    while True:
        coordinator.take(*await channel.receive())


async def _clock(coordinator: Coordinator, run_log: RunLog, status: Status) -> None:
    async for _ in ticks(TICK_S):
        coordinator.tick()
        status.send("view", **run_log.view())


async def main(startup: Startup, status: Status) -> None:
    """Bind, prepare the policy while peers arrive, train, and end.

    Until the policy and the ledger are as they were, what peers say waits in the socket.
    """
    config, time_accounting, worker = startup.config, TimeAccounting("preparing"), Worker()
    ledger, rules = ledger_of(config), coordinator_rules_of(config)
    environment = environment_of(config)
    league, memory = League(config.population, environment.facts), GraphMemory(config, environment)
    with (
        LearnerChannel(
            startup.address,
            build=startup.build,
            config_digest=startup.config_digest,
            keys=keys_in(learner_keys, startup.keys),
        ) as channel,
        Gang(startup.run, config) as gang,
    ):
        began = time.monotonic()
        begun = await _begin(startup, status, worker, ledger, league, memory, gang)
        warm_start_s, training = time.monotonic() - began, begun.training
        journal = journal_of(startup, begun, head_of(ledger, rules, league, memory))
        ledger.resume(time.monotonic())
        weights = weight_store_of(startup, begun)
        coordinator = Coordinator(
            channel,
            ledger,
            journal,
            matchmaker_of(config, league),
            rules,
            time.monotonic,
            weights,
            league,
            memory,
            pace_of(config),
        )
        check_rivals(coordinator.rivals(), weights)
        status.send("fact", text=weights.describe())
        run_log = RunLog(
            startup, coordinator, league, training, worker, warm_start_s, time_accounting
        )
        loop = TrainingLoop(startup, status, coordinator, league, journal, begun, worker, run_log)
        try:
            await _live(channel, coordinator, loop, journal, gang, status, begun.replayed)
        finally:
            journal.close()
            weights.close()
        worker.close()
        channel.close(linger_s=2.0)
    status.send("done", reason="the run is complete")


async def _begin(
    startup: Startup,
    status: Status,
    worker: Worker,
    ledger: SlotLedger,
    league: League,
    memory: GraphMemory,
    gang: Gang,
) -> Begun:
    """The policy and the ledger as they were, or new. Cancellation leaves what is written."""
    began = time.monotonic()
    _announce(startup, status)
    begun = await worker.call(begin, startup, _reporter(status), ledger, league, memory, gang)
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
    loop: TrainingLoop,
    journal: JournalFile,
    gang: Gang,
    status: Status,
    replayed: list[Replayed],
) -> None:
    """Train to the end beside inbox, clock, and the watch of journal and ranks. Cancellation ends
    all.
    """
    await loop.run_log.complete(replayed)
    async with asyncio.TaskGroup() as tasks:
        others = [
            tasks.create_task(_inbox(channel, coordinator), name="inbox"),
            tasks.create_task(_clock(coordinator, loop.run_log, status), name="clock"),
            tasks.create_task(journal.watch(), name="journal"),
            tasks.create_task(gang.watch(), name="ranks"),
            tasks.create_task(loop.publisher.run(), name="publish"),
        ]
        parity = await loop.train()
        for other in others:
            other.cancel()
    await loop.run_log.write_end(parity)  # again: now nothing is taken in any more


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
