"""Run the learner process: receive trials, train on them, and publish weights.

`main` resumes the run from its checkpoint and journal, and then runs five tasks on one event loop.
The ledger (`mage_async/admission/ledger.py`) records the groups in flight: those that an actor was
granted and that no step has trained. Training itself runs in a thread of its own
(`trainer_thread.py`).
"""

import asyncio
import math
import time
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial

from mage_async.admission.concurrent_groups import Concurrency
from mage_async.admission.ledger import Ledger
from mage_async.admission.policies import POLICIES
from mage_async.assembly import cut_length, environment_of
from mage_async.config.schema import Config
from mage_async.errors import DeterministicFailure
from mage_async.learning.packing import has_advantage
from mage_async.methods.method import Methods
from mage_async.policy.warm_start import Progress
from mage_async.protocol.journal_records import SegmentHeader
from mage_async.results.run_files import read_document, sync
from mage_async.tasks.league import League
from mage_async.tasks.task_stream import MatchedTasks
from mage_services.journal.writer import JournalFile
from mage_services.learner.coordinator import Coordinator, segment_header
from mage_services.learner.rank_processes import RankProcesses
from mage_services.learner.resume import Prepared, prepare
from mage_services.learner.run_log import RunLog
from mage_services.learner.trainer_thread import TrainerThread
from mage_services.learner.training_loop import TrainingLoop
from mage_services.processes.process import Startup, Status, read_startup, run_process, ticks
from mage_services.processes.time_accounting import TimeAccounting
from mage_services.transport.access_control import keys_in, learner_keys
from mage_services.transport.channels import LearnerChannel
from mage_services.weights.weight_store import WeightStore

#     task      waits for                  then
#     inbox     a message of a peer        lets the coordinator answer it, and set `arrived` if a
#                                          batch may be complete
#     clock     half a second              lets the coordinator look at deadlines; refreshes the
#                                          terminal
#     journal   a failure of the disk      ends the learner
#     ranks     the end of another rank    ends the learner
#     publish   a copy of new weights      writes it, and announces the version to the peers
#
# Besides these tasks, `TrainingLoop.train` waits for `arrived`, takes a batch of groups and trains
# on it.
# Until the last step this is its only wait for actors: after a step it copies the weights and goes
# on, and the task `publish` writes and announces the copy.
#
# A step is committed durably to the journal before its version is announced to any peer. So a
# learner that was killed can compute every announced version again.

TICK_S = 0.5
"""Seconds between two ticks of the coordinator, which also refresh the terminal."""


async def main(startup: Startup, status: Status) -> None:
    """Bind the socket, prepare the policy and the ledger, train, and end.

    Peers may connect at once: until the ledger is ready, their messages wait in the socket.
    """
    config, time_accounting = startup.config, TimeAccounting("preparing")
    trainer_thread = TrainerThread()
    environment = environment_of(config)
    ledger = _new_ledger(config)
    methods = Methods(config, environment)
    # The league: past versions of the policy that play as opponents.
    league = League(config.population, environment.facts, methods.self_play_share())
    with (
        LearnerChannel(
            startup.address,
            build=startup.build,
            config_digest=startup.config_digest,
            keys=keys_in(learner_keys, startup.keys),
        ) as channel,
        RankProcesses(startup.run, config) as ranks,
    ):
        began = time.monotonic()
        is_resumed = startup.run.policy.exists()
        prepared = await _prepare(startup, status, trainer_thread, ledger, league, methods, ranks)
        warm_start_s: float | None = time.monotonic() - began
        if is_resumed:  # then `_prepare` made no warm start, but trained steps of the journal again
            warm_start_s = read_document(startup.run.learner).get("warm_start_s")
        header = segment_header(ledger, config, league, methods, prepared.sources)
        journal = open_journal_file(startup, prepared, header)
        ledger.restart_timers(time.monotonic())  # of the groups in flight, read from the journal
        weights = WeightStore(
            config.transport.weights.open(startup.run, config),
            lag=config.admission.lag,
            digests=prepared.training.digests,
        )
        tasks = MatchedTasks(environment, league, config)
        coordinator = Coordinator(
            channel,
            ledger,
            journal,
            tasks,
            config,
            time.monotonic,
            weights,
            league,
            methods,
            _new_concurrency(config),
            partial(has_advantage, config=config),
            cut_length=cut_length(config),
            sources=prepared.sources,
        )
        check_rivals(coordinator.rivals(), weights)
        status.send("fact", text=weights.describe())
        run_log = RunLog(
            startup, coordinator, prepared.training, trainer_thread, warm_start_s, time_accounting
        )
        loop = TrainingLoop(startup, status, coordinator, prepared, trainer_thread, run_log)
        try:
            await loop.run_log.write_replayed(prepared.replayed)
            await _run_tasks(coordinator, loop, ranks, status)
        finally:
            journal.close()
            weights.close()
        trainer_thread.close()
        channel.close(linger_s=2.0)  # the goodbyes may not have left this process yet
    status.send("done", reason="the run is complete")


async def _prepare(
    startup: Startup,
    status: Status,
    trainer_thread: TrainerThread,
    ledger: Ledger,
    league: League,
    methods: Methods,
    ranks: RankProcesses,
) -> Prepared:
    """Prepare the policy, or resume the run from its checkpoint and journal.

    If cancelled, files that were written stay.
    """

    num_skipped = 0

    def report(progress: Progress) -> None:
        nonlocal num_skipped
        num_skipped = progress.num_skipped
        status.send("warm_start", **asdict(progress))

    began, warm_start = time.monotonic(), startup.config.warm_start
    is_new = not startup.run.policy.exists()
    if warm_start and is_new:
        # Shown at once, because a warm start collects its data before its first step. Its loss, and
        # its gate, the measure that decides when it ends, are not known yet (NaN).
        report(Progress(0, warm_start.steps, math.nan, math.nan))
    arguments = startup, report, status.note, ledger, league, methods, ranks
    prepared: Prepared = await trainer_thread.call(prepare, *arguments)
    if startup.run.checkpoints.exists():
        # A learner that was killed may have written a checkpoint without making its name durable.
        await trainer_thread.call(sync, startup.run.checkpoints)
    status.send("fact", text=prepared.training.trainer.describe())
    status.send("policy", origin=prepared.origin, prepared_s=time.monotonic() - began)
    if num_skipped:
        text = "steps were skipped, because their gradients were not finite"
        status.note(f"warm start: {num_skipped} {text}")
    if warm_start and is_new and (recorded := read_document(startup.run.warm_start)).get("fault"):
        status.note(f"warm start: {recorded['fault']}. {recorded['cure']}")
    if prepared.lost_bytes:
        status.note(f"journal: a torn tail of {prepared.lost_bytes} bytes was cut")
    return prepared


async def _run_tasks(
    coordinator: Coordinator, loop: TrainingLoop, ranks: RankProcesses, status: Status
) -> None:
    """Train to the last step, concurrently with the other tasks. Cancellation ends all of them."""
    async with asyncio.TaskGroup() as tasks:
        others = [
            tasks.create_task(_inbox(coordinator), name="inbox"),
            tasks.create_task(_clock(coordinator, loop.run_log, status), name="clock"),
            tasks.create_task(coordinator.journal.watch(), name="journal"),
            tasks.create_task(ranks.watch(), name="ranks"),
            tasks.create_task(loop.publisher.run(), name="publish"),
        ]
        # `parity`: differences between the log-probs of engine and learner after the last step.
        parity = await loop.train()
        for other in others:
            other.cancel()
    # `train` has written this summary too, but until now the tasks could change its counts.
    await loop.run_log.write_learner_summary(parity)


async def _inbox(coordinator: Coordinator) -> None:
    """Hand every message to the coordinator. If cancelled, no message is lost."""
    while True:
        coordinator.take(*await coordinator.channel.receive())


async def _clock(coordinator: Coordinator, run_log: RunLog, status: Status) -> None:
    """Tick the coordinator and refresh the terminal. If cancelled, nothing is lost."""
    async for _ in ticks(TICK_S):
        coordinator.tick()
        status.send("view", **run_log.view())


def _new_ledger(config: Config) -> Ledger:
    """Return an empty ledger of groups in flight, with the run's bound on staleness."""
    admission = config.admission
    return Ledger(
        admission.groups_per_step,
        admission.max_staleness,
        admission.trials_per_group,
        policy=POLICIES[admission.rule],
        lag=admission.lag,
        max_concurrent_groups=admission.max_groups_in_play,
    )


def _new_concurrency(config: Config) -> Concurrency:
    """Return the controller that limits how many groups may be incomplete at once."""
    admission = config.admission
    return Concurrency(
        admission.max_groups_in_play,
        admission.groups_per_step,
        admission.max_staleness,
        admission.over_age_target,
    )


def open_journal_file(startup: Startup, prepared: Prepared, header: SegmentHeader) -> JournalFile:
    """Begin a new segment of the journal, after those of earlier processes of the run."""
    limits = startup.config.journal
    journal = JournalFile(startup.run.journal, prepared.segments, header, limits.max_bytes)
    # An earlier process may have been killed between a checkpoint and the deletion of segments.
    journal.compact(prepared.checkpoint_version())
    return journal


def check_rivals(versions: Iterable[int], weights: WeightStore) -> None:
    """Check that the weights of all past versions that the journal names as opponents are there.

    Raises:
        DeterministicFailure: weights are missing.
    """
    files = [weights.path(version) for version in sorted(versions)]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise DeterministicFailure(
            "the journal names past versions of the policy as opponents whose weights are gone: "
            f"{', '.join(map(str, missing))}; restore these files, or begin a new run"
        )


if __name__ == "__main__":
    run_process(lambda status: main(read_startup("The learner of a run.", status), status))
