"""Prepare a new run's policy, or resume a run from its newest checkpoint and its journal.

The journal's steps after the checkpoint are trained again, and must give the weights that were
committed. Meanwhile the ledger, the league and the states of methods are filled from the journal.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mage_async.admission.ledger import DroppedGroup, Ledger
from mage_async.admission.replay import (
    CLASS_EDITED,
    CONFIG_CHANGED,
    Committed,
    RecordsWithConfig,
    plays_the_same,
    replay,
)
from mage_async.assembly import edited, own_sources
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import DeterministicFailure, first_line
from mage_async.methods.method import Methods
from mage_async.policy.initial_policy import cached_policy, prepare_policy
from mage_async.policy.warm_start import Progress
from mage_async.protocol.journal_records import Segment, first_needed, first_segment_header
from mage_async.results.run_directory import checkpoints
from mage_async.results.run_files import write_whole
from mage_async.tasks.league import League
from mage_async.trajectory import Group
from mage_services.journal.reader import JournalOnDisk, open_journal
from mage_services.journal.writer import make_durable
from mage_services.learner.rank_processes import RankProcesses
from mage_services.learner.trainer_thread import Training, is_on_gpu, limited_memory
from mage_services.processes.process import Startup, in_time, unless_a_call_hangs
from mage_services.processes.run_lock import holding

NOTE_S = 20.0
"""Least number of seconds between two notes about steps that are trained again."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """Describe a step that was trained again, for the run's records."""

    groups: list[Group]
    metrics: dict[str, Any]
    version: int
    time_s: float
    """Training time of the run when the step was first trained, in seconds."""
    elapsed_s: float
    """Training time since the step before, in seconds."""
    drops: list[DroppedGroup]
    """Groups dropped between the step before and this one."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Hold what a learner has loaded or computed before it begins to train."""

    training: Training
    origin: str
    """Where the weights came from, in a few words."""
    segments: list[Segment]
    """Segment files of the journal that are on disk."""
    replayed: list[ReplayedStep]
    """Steps after the checkpoint, which were trained again."""
    lost_bytes: int
    """Bytes of incomplete records at the journal's end, which were cut off. No peer had received a
    message that depends on them."""
    sources: dict[str, str] = field(default_factory=dict)
    """Digests of the sources of the user's own classes (`own_sources`)."""

    def checkpoint_version(self) -> int:
        """Return the version of the newest checkpoint; 0 if there is none."""
        return self.training.trainer.version - len(self.replayed)


def prepare(
    startup: Startup,
    report: Callable[[Progress], None],
    note: Callable[[str], None],
    ledger: Ledger,
    league: League,
    methods: Methods,
    ranks: RankProcesses,
) -> Prepared:
    """Load the newest checkpoint of the run or, if it has none, its policy, which a new run
    prepares first. Then train the journal's steps after the checkpoint again.

    Args:
        report: called with the progress of a warm start.
        note: called with sentences about a call of the environment that does not return, steps that
            are trained again, and groups that are dropped.
        ledger: a new ledger, which is filled from the journal; so are `league` and `methods`.
        ranks: the other ranks of the learner.

    Raises:
        DeterministicFailure: as `recover`, or the memory does not suffice (`limited_memory`).
        RunError: the checkpoint is not whole, or the journal is damaged.
    """
    config, run = startup.config, startup.run
    run.journal.mkdir(exist_ok=True)
    origin, newest = "as prepared before", next(reversed(checkpoints(run.checkpoints)), None)
    is_new = not run.policy.exists()
    what = "the warm start" if is_new and config.warm_start else "the policy"
    # `is_first`: no step is trained yet, so a restarted learner would lack the memory too.
    with limited_memory(what, config, run, is_first=True):
        if is_new:
            deadline_s = config.environment.step_deadline_s
            watch = partial(unless_a_call_hangs, deadline_s=deadline_s, say=note)
            with _warm_start_lock(config, note):
                origin = prepare_policy(config, run.policy, report, in_time, watch)
        training = Training.of(run, config, newest, ranks.begin(config, newest))
    if newest:
        origin = f"from checkpoint {newest.name}"
    journal, sources = open_journal(run.journal), own_sources(config)
    lost_bytes = make_durable(journal)
    steps = recover(training, journal, ledger, league, methods, note, sources)
    if steps:
        origin += f" and {len(steps)} step{'s' * (len(steps) > 1)} of the journal"
        origin += f" ({training.difference})" if training.difference else ""
    _remove_lines_after(run.metrics, "step", training.trainer.version)
    _remove_lines_after(run.curve, "version", training.trainer.version)
    # The lines of the current version go too: the training loop writes the states of methods again
    # before its first step.
    _remove_lines_after(run.memory, "version", training.trainer.version - 1)
    return Prepared(training, origin, journal.segments, steps, lost_bytes, sources)


@contextmanager
def _warm_start_lock(config: Config, note: Callable[[str], None]) -> Iterator[None]:
    """Keep other processes from making the same warm start while the block makes it; they then find
    the result in the cache. If another process makes it already, wait for that process before the
    block.

    If the other process fails or is killed, its lock becomes free, and the block makes the warm
    start.
    """
    cached = cached_policy(config)
    with ExitStack() as held:
        if cached is not None and not cached.exists():
            what = "another process that makes the same warm start, to take it from the cache"
            try:
                cached.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(holding(cached.with_suffix(".lock"), what, note))
            except OSError as error:
                note(
                    "the cache of warm starts cannot be locked, so runs with the same warm start "
                    f"may make it at the same time: {first_line(error)}"
                )
        yield


def recover(
    training: Training,
    journal: JournalOnDisk,
    ledger: Ledger,
    league: League,
    methods: Methods,
    note: Callable[[str], None],
    sources: Mapping[str, str],
) -> list[ReplayedStep]:
    """Fill ledger, league and methods from the journal, and train the steps after the checkpoint.

    Args:
        note: called at the first of these steps, and then at most every `NOTE_S` seconds, because
            the run waits for them.
        sources: digests of the sources of the user's own classes, now.

    Raises:
        DeterministicFailure: the journal lacks records, or a step gives other weights than were
            committed. On a GPU, or with another number of ranks than before, such a difference is
            only noted in `training.difference`, because numbers are then added in another order.
    """
    version = training.trainer.version
    if not journal.segments:
        ledger.begin(first_segment_header(version, training.counters.get("next_grant", 0)))
        methods.begin({}, version)  # all methods begin anew
        return []
    first = first_needed(journal.segments, version)
    if first is None:
        raise DeterministicFailure(
            f"{training.run.journal}: the journal begins after the newest checkpoint, step "
            f"{version}; restore the segments before {journal.files[0].name}"
        )
    records = RecordsWithConfig(journal.records(first))
    steps: list[ReplayedStep] = []
    time_before_s, noted_s = 0.0, -NOTE_S
    for committed in replay(records, ledger, league, methods):
        commit = committed.commit
        training.digests[commit.version] = commit.digest
        if commit.version > version:
            if time.monotonic() - noted_s >= NOTE_S:
                noted_s = time.monotonic()
                note(
                    f"trains step {commit.version} again, from the trials in the journal: the "
                    f"newest checkpoint is of step {version}"
                )
            metrics = _train_again(training, committed, edited(records.sources, sources))
            elapsed_s = max(1e-6, commit.time_s - time_before_s)  # rates are divided by it
            groups = committed.groups or []
            step = ReplayedStep(
                groups, metrics, commit.version, commit.time_s, elapsed_s, committed.drops
            )
            steps.append(step)
        time_before_s = commit.time_s
    if ledger.version < version:
        raise DeterministicFailure(
            f"{training.run.journal} ends at step {ledger.version}, the newest checkpoint is of "
            f"step {version}: restore the journal, or remove it to go on without its trials"
        )
    # Replay has set the configuration of each journaled step. From here on, use the run's own.
    training.adopt(training.config)
    methods.adopt(training.config)
    # Groups in flight were granted under the old configuration, with other tasks or sampling, or
    # some of their trials were played with the old class, which may pay other rewards.
    reason = ""
    if not plays_the_same(config_file.loads(records.config), training.config):
        reason, what = CONFIG_CHANGED, "the configuration of tasks, trials or sampling was changed"
    elif names := edited(records.sources, sources):
        reason, what = CLASS_EDITED, f"{', '.join(names)} was edited"
    if reason:
        num_groups, num_trials = ledger.drop_all(reason)
        if num_groups:
            note(
                f"{what}, so the groups in flight are dropped: {num_groups}, with {num_trials} "
                "trials that had arrived"
            )
    return steps


def _train_again(training: Training, committed: Committed, names: Sequence[str]) -> dict[str, Any]:
    """Train a step of the journal, compare the weights, and return its metrics.

    Args:
        names: the user's own classes that were edited since the step was trained.
    """
    metrics, difference = training.redo(committed, names)
    if difference and _sums_in_same_order(committed, training.config):
        raise DeterministicFailure(difference)
    training.difference = training.difference or difference
    return metrics


def _sums_in_same_order(committed: Committed, own: Config) -> bool:
    """Return whether a step adds floating-point numbers in the same order as the first time."""
    has_as_many_ranks = config_file.loads(committed.config).learner.ranks == own.learner.ranks
    return has_as_many_ranks and not is_on_gpu(own)


def _remove_lines_after(file: Path, key: str, version: int) -> None:
    """Remove the lines of JSON whose `key` is above `version`, the version from which the run
    continues.

    Damaged lines are removed too: a crash may have cut a line off, and a later one may have been
    appended to it.
    """
    if not file.is_file():
        return
    text = file.read_bytes()
    lines = text.split(b"\n")[:-1]
    kept = b"".join(line + b"\n" for line in lines if _value(line, key) <= version)
    if kept != text:
        write_whole(file, kept)


def _value(line: bytes, key: str) -> float:
    """Return the value of a key in a line of JSON; infinity if the line is damaged."""
    try:
        return float(json.loads(line)[key])
    except ValueError:  # not JSON, or not UTF-8
        return math.inf
