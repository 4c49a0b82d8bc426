"""What a learner begins with: its newest checkpoint, and the steps of the journal behind that.

The steps are computed again and must come out as they were committed; the ledger of groups, the
league and the graph memory are filled from the journal on the way.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mage_async.admission.ledger import SlotLedger
from mage_async.admission.recovery import (
    REPLAYED_DIFFERENTLY,
    Committed,
    LastConfig,
    plays_alike,
    replay,
)
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import DeterministicFailure
from mage_async.graph_memory.graph import Table
from mage_async.graph_memory.memory import GraphMemory
from mage_async.policy.checkpoint import checkpoints
from mage_async.policy.prepare import prepare_policy
from mage_async.policy.warm_start import Progress
from mage_async.protocol.journal_records import first_head
from mage_async.protocol.journal_segments import Segment, first_needed
from mage_async.results.durable_files import write_whole
from mage_async.tasks.population import League
from mage_async.trajectory import Group
from mage_services.journal.reader import JournalOnDisk, make_durable, open_journal
from mage_services.learner.ranks.gang import Gang
from mage_services.learner.training import Training, is_on_gpu
from mage_services.processes.startup import Startup


@dataclass(frozen=True, slots=True)
class Replayed:
    """A step computed again, for the run log."""

    groups: list[Group]
    metrics: dict[str, Any]
    version: int
    time_s: float
    """Training time of the run when it was first computed."""
    elapsed_s: float
    """Training time since the step before."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What a learner begins with."""

    training: Training
    origin: str
    """Where the weights came from, in a few words."""
    segments: list[Segment]
    """Segments of the journal."""
    replayed: list[Replayed]
    """Steps behind the checkpoint."""
    lost_bytes: int
    """Bytes of a torn tail of the journal; no peer had been told of them."""


def begin(
    startup: Startup,
    report: Callable[[Progress], None],
    ledger: SlotLedger,
    league: League,
    memory: GraphMemory,
    gang: Gang,
) -> Begun:
    """The policy as it was when the run ended, and what its journal says of groups.

    The newest checkpoint, or else the policy, and then the steps of the journal behind it,
    computed again: their digests must agree. `ledger`, `league` and `memory` are new,
    and filled.
    """
    config, run = startup.config, startup.run
    run.journal.mkdir(exist_ok=True)
    origin = "as prepared before"
    if not run.policy.exists():
        origin = _prepare(startup, report)
    found = checkpoints(run.checkpoints)
    newest = found[-1] if found else None
    training = Training.of(run, config, newest, gang.begin(config, newest))
    if found:
        origin = f"from checkpoint {found[-1].name}"
    journal = open_journal(run.journal)
    lost_bytes = make_durable(journal)
    steps = recover(training, journal, ledger, league, memory)
    if steps:
        origin += f" and {len(steps)} steps of the journal"
        origin += f" ({training.difference})" if training.difference else ""
    _forget_after(run.metrics, "step", training.trainer.version)
    _forget_after(run.curve, "version", training.trainer.version)
    _forget_after(run.memory, "version", training.trainer.version - 1)  # it is written again
    return Begun(training, origin, journal.segments, steps, lost_bytes)


def recover(
    training: Training,
    journal: JournalOnDisk,
    ledger: SlotLedger,
    league: League,
    memory: GraphMemory,
) -> list[Replayed]:
    """Fill ledger, league and memory from the journal, and train its steps behind this version
    again.

    Raises:
        DeterministicFailure: a step comes out otherwise than it did, or cannot be found. (On a
            GPU, and on another number of ranks than before, sums have another order: there it is
            said in `difference`, and the run goes on.)
    """
    version = training.trainer.version
    if not journal.segments:
        ledger.begin(first_head(version, training.counters.get("next_grant", 0)))
        memory.begin(Table(version=version))
        return []
    records = _records_behind(training, journal)
    steps = _train_again(training, replay(records, ledger, league, memory))
    if ledger.version < version:
        raise DeterministicFailure(
            f"{training.run.journal} ends at step {ledger.version}, the newest checkpoint is of "
            f"step {version}: restore the journal, or remove it to go on without what it held"
        )
    training.adopt(training.own_config)
    memory.adopt(training.own_config)
    if not plays_alike(config_file.loads(records.config), training.own_config):
        ledger.drop_all(REPLAYED_DIFFERENTLY)
    return steps


def _records_behind(training: Training, journal: JournalOnDisk) -> LastConfig:
    """The records by which the newest checkpoint is brought up to date."""
    version = training.trainer.version
    first = first_needed(journal.segments, version)
    if first is None:
        raise DeterministicFailure(
            f"{training.run.journal}: the journal begins after the newest checkpoint, step "
            f"{version}; restore the segments before {journal.files[0].name}"
        )
    return LastConfig(journal.records(first))


def _train_again(training: Training, commits: Iterable[Committed]) -> list[Replayed]:
    """Train the steps behind the checkpoint again, as they are replayed."""
    version, before_s, steps = training.trainer.version, 0.0, []
    for committed in commits:
        commit = committed.commit
        training.digests[commit.version] = commit.digest
        if commit.version > version:
            metrics, difference = training.redo(committed)
            if difference and _sums_alike(committed, training.own_config):
                raise DeterministicFailure(difference)
            training.difference = training.difference or difference
            steps.append(_replayed(committed, metrics, before_s))
        before_s = commit.time_s
    return steps


def _sums_alike(committed: Committed, own: Config) -> bool:
    """Whether a step that is computed again adds in the order in which it did."""
    has_as_many_ranks = config_file.loads(committed.config).learner.ranks == own.learner.ranks
    return has_as_many_ranks and not is_on_gpu(own)


def _replayed(committed: Committed, metrics: dict[str, Any], before_s: float) -> Replayed:
    commit = committed.commit
    elapsed_s = max(1e-6, commit.time_s - before_s)
    return Replayed(committed.groups or [], metrics, commit.version, commit.time_s, elapsed_s)


def _prepare(startup: Startup, report: Callable[[Progress], None]) -> str:
    """Make the policy whole or not at all: a learner may be killed meanwhile."""
    working = startup.run.policy.with_name(f".{startup.run.policy.name}.part")
    if working.is_symlink():
        working.unlink()
    shutil.rmtree(working, ignore_errors=True)
    origin = prepare_policy(startup.config, working, startup.build, report)
    os.replace(working, startup.run.policy)
    return origin


def _forget_after(file: Path, key: str, version: int) -> None:
    """What came after the version that a run goes on from has not happened, nor has half a line,
    behind which somebody may have written on.
    """
    if not file.is_file():
        return
    text = file.read_text()
    lines = text.split("\n")[:-1]
    kept = "".join(f"{line}\n" for line in lines if _number(line, key) <= version)
    if kept != text:
        write_whole(file, kept)


def _number(line: str, key: str) -> float:
    """What a line of JSON has under a key; infinite where it is no such line."""
    try:
        return json.loads(line)[key]
    except json.JSONDecodeError:
        return math.inf
