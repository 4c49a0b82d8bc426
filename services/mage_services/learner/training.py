"""The learner's worker thread: prepare the policy, train a step, copy weights, write checkpoints.

Nothing here waits for a peer. Every call runs in one thread, one after the other, so no lock is
needed.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mage_async.admission.ledger import SlotLedger
from mage_async.admission.recovery import (
    REPLAYED_DIFFERENTLY,
    Committed,
    LastConfig,
    first_difference,
    plays_alike,
    replay,
)
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import RunError
from mage_async.inference.chat_files import load_chat
from mage_async.learning.forward import backend_report
from mage_async.learning.trainer import Trainer
from mage_async.learning.training_sequences import training_sequences
from mage_async.policy.checkpoint import (
    checkpoints,
    restore_checkpoint,
    save_checkpoint,
    writing,
)
from mage_async.policy.load import load_frozen
from mage_async.policy.lora import load_trained
from mage_async.policy.prepare import prepare_policy
from mage_async.policy.snapshot import Snapshot
from mage_async.policy.warm_start import Progress
from mage_async.policy.weight_digest import overall, tensor_digests
from mage_async.protocol.journal_records import Commit, Segment, first_head, first_needed
from mage_async.results.durable_files import write_whole
from mage_async.results.run_directory import RunDirectory
from mage_async.tasks.population import League
from mage_async.trajectory import Group, Trial
from mage_async.trials.trial_as_dict import trial_as_dict
from mage_services.journal.reader import JournalOnDisk, make_durable, open_journal
from mage_services.processes.json_lines import append_lines
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


class Training:
    """The trainer of a run and its files."""

    def __init__(
        self, trainer: Trainer, run: RunDirectory, config: Config, counters: dict[str, Any]
    ) -> None:
        self.trainer = trainer
        self.counters = counters
        """What a checkpoint remembered: `next_grant`, `train_s`, `totals`."""
        self.digests: dict[int, str] = {}
        """Digests of the weights after each step that was read from the journal."""
        self.difference = ""
        """On a GPU: the first difference of steps that were computed again."""
        self._run, self._own, self._config = run, config, config

    @staticmethod
    def begin(
        startup: Startup,
        report: Callable[[Progress], None],
        ledger: SlotLedger,
        league: League,
    ) -> "Begun":
        """The policy as it was when the run ended, and what its journal says of groups.

        The newest checkpoint, or else the policy, and then the steps of the journal behind it,
        computed again: their digests must agree. `ledger` and `league` are new, and filled.
        """
        config, run = startup.config, startup.run
        run.journal.mkdir(exist_ok=True)
        origin = "as prepared before"
        if not run.policy.exists():
            origin = _prepare(startup, report)
        found = checkpoints(run.checkpoints)
        training = Training.of(run, config, found[-1] if found else None)
        if found:
            origin = f"from checkpoint {found[-1].name}"
        journal = open_journal(run.journal)
        lost_bytes = make_durable(journal)
        steps = training.recover(journal, ledger, league)
        if steps:
            origin += f" and {len(steps)} steps of the journal"
            origin += f" ({training.difference})" if training.difference else ""
        _forget_after(run.metrics, "step", training.trainer.version)
        _forget_after(run.curve, "version", training.trainer.version)
        return Begun(training, origin, journal.segments, steps, lost_bytes)

    @staticmethod
    def of(run: RunDirectory, config: Config, checkpoint: Path | None) -> "Training":
        """A trainer at a checkpoint, or where the run began."""
        torch.set_num_threads(config.learner.threads)
        if is_on_gpu(config):
            torch.cuda.set_device(config.learner.device)  # where this thread's kernels are launched
        model = load_trained(config, run.policy, checkpoint, device=config.learner.device)
        bound = _bound(config)
        learner, temperature = config.learner, config.sampling.temperature
        trainer = Trainer(model, learner, temperature, config.seed, max_staleness=bound)
        counters = restore_checkpoint(trainer, checkpoint) if checkpoint else {}
        training = Training(trainer, run, config, counters)
        training.adopt(config)
        return training

    def recover(self, journal: JournalOnDisk, ledger: SlotLedger, league: League) -> list[Replayed]:
        """Fill ledger and league from the journal, and train its steps behind this version again.

        Raises:
            RunError: a step comes out otherwise than it did, or cannot be found. (On a GPU sums
                have no fixed order: there it is said in `difference`, and the run goes on.)
        """
        version = self.trainer.version
        if not journal.segments:
            ledger.begin(first_head(version, self.counters.get("next_grant", 0)))
            return []
        first = first_needed(journal.segments, version)
        if first is None:
            raise RunError(
                f"{self._run.journal}: the journal begins after the newest checkpoint, step "
                f"{version}; restore the segments before {journal.files[0].name}"
            )
        steps: list[Replayed] = []
        before_s = 0.0
        records = LastConfig(journal.records(first))
        for committed in replay(records, ledger, league):
            self.digests[committed.commit.version] = committed.commit.digest
            if committed.commit.version > version:
                metrics, difference = self.redo(committed)
                if difference and not is_on_gpu(self._own):
                    raise RunError(difference)
                self.difference = self.difference or difference
                steps.append(_replayed(committed, metrics, before_s))
            before_s = committed.commit.time_s
        if ledger.version < version:
            raise RunError(
                f"{self._run.journal} ends at step {ledger.version}, the newest checkpoint is of "
                f"step {version}: restore the journal, or remove it to go on without what it held"
            )
        self.adopt(self._own)
        if not plays_alike(config_file.loads(records.config), self._own):
            ledger.drop_all(REPLAYED_DIFFERENTLY)
        return steps

    def redo(self, committed: Committed) -> tuple[dict[str, Any], str]:
        """Train a step of the journal again; its metrics, and where other weights come out than
        were committed, a sentence with the first tensor that differs.

        Raises:
            RunError: trials of the step are gone.
        """
        commit = committed.commit
        if committed.groups is None:
            raise RunError(f"step {commit.version}: the journal lacks trials that it trained")
        self.adopt(config_file.loads(committed.config))
        metrics = self.step(committed.groups)
        tensors = tensor_digests(self.trainer.model)
        if overall(tensors) == commit.digest:
            return metrics, ""
        return metrics, (
            f"step {commit.version} computed again gives other weights, first in "
            f"{first_difference(commit, tensors)}: {overall(tensors)} instead of "
            f"{commit.digest}; another machine, library or number of threads computes otherwise"
        )

    def adopt(self, config: Config) -> None:
        """Train under another configuration from here on: a resumed run may change it."""
        self._config = config
        temperature, bound = config.sampling.temperature, _bound(config)
        needs_reference = config.learner.kl and not config.policy.lora
        if needs_reference and self.trainer.reference is None:
            began = (self._run.policy, config.policy.dtype, config.learner.device)
            self.trainer.reference = load_frozen(*began)
        self.trainer.adopt(
            config.learner,
            temperature,
            config.seed,
            max_staleness=bound,
            strategy_temperature=config.sampling.strategy_temperature,
        )

    def commit(self, groups: Sequence[Group], time_s: float) -> Commit:
        """What the journal has to say of the step just trained."""
        tensors = tensor_digests(self.trainer.model)
        return Commit(
            version=self.trainer.version,
            grants=tuple(group.grant for group in groups),
            digest=overall(tensors),
            tensors=tensors,
            time_s=time_s,
        )

    def describe(self) -> str:
        """Model and kernels in one line."""
        return f"{self.trainer.describe()}; {backend_report()}"

    def step(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Train one batch and publish nothing yet; returns the trainer's metrics."""
        began = time.monotonic()
        metrics = self.trainer.step(training_sequences(groups, self._config))
        return metrics | {"train_s": time.monotonic() - began}

    def parity(self, groups: Sequence[Group]) -> dict[str, float]:
        """How far the engine's log-probs are from the learner's, at equal version."""
        return self.trainer.parity(training_sequences(groups, self._config))

    def snapshot(self) -> Snapshot:
        """A copy of the current weights, to be published while the next step is trained."""
        return Snapshot.of(self.trainer.model, self.trainer.version)

    def digest(self) -> str:
        """Digest of the current weights, as a commit records it."""
        return overall(tensor_digests(self.trainer.model))

    def checkpoint(self, counters: dict[str, Any]) -> Path:
        """Write a checkpoint of the current version."""
        with writing(f"a checkpoint to {self._run.checkpoints}"):
            return save_checkpoint(
                self.trainer,
                self._run.policy,
                self._run.checkpoints,
                counters,
                self._own.learner.keep_checkpoints,
                is_last=self.trainer.version == self._own.learner.steps,
            )

    def record(self, file: Path, line: dict[str, Any]) -> None:
        """Append one line of JSON."""
        with writing(f"a line to {file}"):
            append_lines(file, [line])

    def sample(self, trial: Trial, version: int) -> None:
        """Write a trial down as text, for people to read."""
        self.record(self._run.samples, trial_as_dict(trial, load_chat(self._run.policy), version))


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


def is_on_gpu(config: Config) -> bool:
    """Whether the learner computes on one."""
    return torch.device(config.learner.device).type == "cuda"


def _replayed(committed: Committed, metrics: dict[str, Any], before_s: float) -> Replayed:
    commit = committed.commit
    elapsed_s = max(1e-6, commit.time_s - before_s)
    return Replayed(committed.groups or [], metrics, commit.version, commit.time_s, elapsed_s)


def _bound(config: Config) -> int:
    """The largest staleness that the rule of admission means to allow, in steps."""
    return config.admission.max_staleness + config.admission.lag


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
