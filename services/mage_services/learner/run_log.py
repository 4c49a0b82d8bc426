"""Write the files of a run: metrics of each step, sample trials, a summary.

All values are collected on the event loop, so that they belong together, and written to disk in the
trainer's thread.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from mage_async.admission.ledger import OVER_AGE, DroppedGroup
from mage_async.assembly import environment_of
from mage_async.policy.full_disk import writing
from mage_async.results.dropped_bias import Kinds, dropped_groups, trained_groups
from mage_async.results.metrics import (
    Seconds,
    batch_metrics,
    batch_totals,
    check_names,
    idle_share,
    over_bound_by_actor,
    trial_counts,
    truncated_share,
)
from mage_async.results.progress import Progress, Signal
from mage_async.results.run_files import each_line, write_whole
from mage_async.trajectory import Group
from mage_services.learner.coordinator import Coordinator
from mage_services.learner.resume import ReplayedStep
from mage_services.learner.trainer_thread import TrainerThread, Training
from mage_services.processes.process import Startup, until_there_is_space
from mage_services.processes.time_accounting import TimeAccounting

NUM_SAMPLES = 10
"""Number of steps for which one trial of the batch is written as text."""


def has_sample(version: int, steps: int) -> bool:
    """Return whether a trial of the step that made a version is written as text.

    `NUM_SAMPLES` steps have one, at equal distances up to the last step of the run. In a run of
    fewer steps, every step has one.

    Args:
        steps: number of steps of the run.
    """
    return NUM_SAMPLES * version // steps > NUM_SAMPLES * (version - 1) // steps


class RunLog:
    """Write the run's files; they continue those of earlier processes of the run."""

    def __init__(
        self,
        startup: Startup,
        coordinator: Coordinator,
        training: Training,
        trainer_thread: TrainerThread,
        warm_start_s: float | None,
        time_accounting: TimeAccounting,
    ) -> None:
        self._run, self._config = startup.run, startup.config
        self._coordinator, self._training = coordinator, training
        self._thread, self._warm_start_s = trainer_thread, warm_start_s
        self._environment = environment_of(startup.config)
        self._kinds = Kinds(self._environment, coordinator.note)
        self._signal = Signal(startup.config, self._environment)
        self._began = time.monotonic() - training.counters.get("train_s", 0.0)
        """When training would have begun if all processes of the run had run without a break."""
        self._last_step = time.monotonic()
        """When the last step was written."""
        self._last_blocked_s: Seconds = {}
        """Seconds of each actor in each state, at the last step."""
        self._totals: dict[str, float] = dict(training.counters.get("totals", {}))
        """Sums over all steps of the run, by name."""
        self.time = time_accounting
        """Seconds of the learner in each state."""

    def elapsed_s(self) -> float:
        """Return the seconds since training began, over all processes of the run."""
        return float(time.monotonic() - self._began)

    def waited_s(self) -> float:
        """Return the seconds since the last step was written."""
        return time.monotonic() - self._last_step

    async def write_replayed(self, replayed: list[ReplayedStep]) -> None:
        """Write the steps that were trained again, except those that were written before."""
        known = {record["step"] for record in each_line(self._run.metrics)}
        for step in replayed:
            # `_record` is called for every step, because it also adds the step to the totals. The
            # trainer did not wait for trials (0.0): all of them were in the journal.
            record = self._record(
                step.version, step.groups, step.metrics, 0.0, step.elapsed_s, step.time_s
            )
            record |= self._drop_metrics(step.drops)
            if step.version not in known:
                await self._write(self._training.record, self._run.metrics, record)
            self._began = time.monotonic() - step.time_s

    async def write_step(
        self, groups: list[Group], metrics: dict[str, Any], waited_s: float
    ) -> dict[str, Any]:
        """Write the metrics of a step that was committed, and return them."""
        now = time.monotonic()
        elapsed, self._last_step = now - self._last_step, now
        version = self._training.trainer.version
        record = self._record(version, groups, metrics, waited_s, elapsed, now - self._began)
        disk = await self._thread.call(shutil.disk_usage, self._run.root)
        record |= {"disk_free_bytes": disk.free, **self._peer_metrics(groups, version)}
        # `write_replayed` does not check names: a step of the journal may have metrics of a method
        # that the resumed run leaves out.
        check_names(record, self._coordinator.methods.metric_names())
        await self._write(self._training.record, self._run.metrics, record)
        return record

    async def write_method_states(self) -> None:
        """Write the present states of the methods that keep a record of their states."""
        for line in self._coordinator.methods.records():
            await self._write(self._training.record, self._run.memory, line)

    async def write_sample(self, groups: list[Group]) -> None:
        """Write one trial of the batch as text, if `has_sample`."""
        version = self._training.trainer.version
        if has_sample(version, self._config.learner.steps):
            await self._write(self._training.sample, groups, version)

    def counters(self) -> dict[str, Any]:
        """Return the counters that a checkpoint keeps."""
        return {
            "next_grant": self._coordinator.ledger.next_grant,
            "train_s": self.elapsed_s(),
            "totals": self._totals,
        }

    async def write_learner_summary(self, parity: dict[str, float]) -> None:
        """Write `learner.json`, the learner's summary of the run so far; called at checkpoints and
        at the end.

        Args:
            parity: Differences between the log-probs of engine and learner; empty before the end.
        """
        counts = self._coordinator.ledger.counts()
        summary = {
            "version": self._training.trainer.version,
            "warm_start_s": self._warm_start_s,
            "train_s": self.elapsed_s(),
            "totals": self._totals,
            "parity": parity,
            "trials": trial_counts(counts),
            "dropped_by_reason": dict(counts.dropped_by_reason),
            "granted_again": counts.granted_again,
            "blocked_s": self.blocked_s(),
        }
        if self._coordinator.league.is_on:
            summary["population"] = msgspec.to_builtins(self._coordinator.league.state())
        await self._write(_replace, self._run.learner, json.dumps(summary, indent=2))

    async def _write(self, work: Callable[..., None], *args: Any) -> None:
        """Write in the trainer's thread; while the disk is full, wait for space."""
        write = partial(self._thread.call, work, *args)
        await until_there_is_space(write, self._coordinator.note)

    def blocked_s(self) -> dict[str, dict[str, float]]:
        """Return the seconds that the learner and every actor spent in each state."""
        return {"learner": self.time.seconds(), **self._coordinator.blocked_s()}

    def view(self) -> dict[str, Any]:
        """Return what the terminal shows in addition to the metrics of a step."""
        return {
            "trials": trial_counts(self._coordinator.ledger.counts()),
            "blocked_s": self.blocked_s(),
            "faults": self._coordinator.faults[-3:],
            "progress": asdict(self.progress()),
        }

    def progress(self) -> Progress:
        """Return the progress of the next step, and the number of groups dropped so far."""
        coordinator, ledger = self._coordinator, self._coordinator.ledger
        counts = ledger.counts()
        return coordinator.progress.snapshot(
            time.monotonic(),
            self._config,
            self._environment,
            version=self._training.trainer.version,
            doing=self.time.current(),
            actors=coordinator.present_actors(),
            groups_in_flight=counts.groups.in_flight,
            trials=ledger.trials_of_next_batch(),
            under_way=ledger.under_way(),
            dropped_by_reason=counts.dropped_by_reason,
        )

    def note_if_nothing_to_learn(self, groups: list[Group]) -> None:
        """Add a note to the faults if the first batches hold nothing to learn from."""
        text = self._signal.batch(self._training.trainer.version, groups)
        if text is not None:
            self._coordinator.note(text)

    def _peer_metrics(self, groups: list[Group], version: int) -> dict[str, Any]:
        """Return the metrics of actors and dropped groups; those without a value are left out."""
        coordinator, admission = self._coordinator, self._config.admission
        before, self._last_blocked_s = self._last_blocked_s, coordinator.blocked_s()
        # In the names of metrics, a receipt is the report of an engine that it has loaded a version
        # with the learner's fingerprint.
        loaded = coordinator.take_load_records()
        # 0.0 in a record: the version was published without log-probs of the learner.
        differences = [record.difference for record in loaded if record.difference > 0.0]
        metrics = {
            "actors_idle_share": idle_share(before, self._last_blocked_s),
            "receipts": len(loaded) or None,
            "receipt_retries": sum(record.num_retries for record in loaded) if loaded else None,
            "receipt_difference": max(differences, default=None),
            **self._drop_metrics(coordinator.ledger.take_drops()),
            "over_bound_by_actor": over_bound_by_actor(
                groups,
                coordinator.take_actors(),
                version=version - 1,  # the version of the weights that the step began with
                bound=admission.nominal_most_stale,
            ),
        }
        return {name: value for name, value in metrics.items() if value not in (None, {})}

    def _drop_metrics(self, drops: Sequence[DroppedGroup]) -> dict[str, Any]:
        """Return the metrics of the groups dropped since the last step; none if there are none."""
        members = Counter(drop.member for drop in drops if drop.reason != OVER_AGE)
        metrics = {
            "dropped_by_member": dict(sorted(members.items())),
            "dropped_groups": dropped_groups(drops, self._kinds),
        }
        return {name: value for name, value in metrics.items() if value}

    def _record(
        self,
        step: int,
        groups: list[Group],
        metrics: dict[str, Any],
        waited_s: float,
        elapsed_s: float,
        time_s: float,
    ) -> dict[str, Any]:
        """Return all metrics of a step, and add the step to the totals."""
        episodes = self._config.trial.episodes
        record = {
            "step": step,
            "time_s": time_s,
            **batch_metrics(groups, self._environment, elapsed_s, episodes),
            "truncated_action_share": truncated_share(groups, self._coordinator.cut_length),
            **metrics,
            "trained_groups": trained_groups(groups, self._kinds),
            "waiting_s": waited_s,
            "groups_in_flight": self._coordinator.ledger.counts().groups.in_flight,
        }
        for name, value in {**batch_totals(groups), "train_s": record["train_s"]}.items():
            self._totals[name] = self._totals.get(name, 0) + value
        return record


def _replace(file: Path, content: str) -> None:
    """Replace the content of a file.

    Raises:
        RunError: the file cannot be written.
    """
    with writing(str(file)):
        write_whole(file, content)
