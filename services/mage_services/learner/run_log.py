"""What a learner writes down of its run: a line a step, trials to read, and its end.

Everything is read here on the loop, where nothing changes meanwhile, and written by the worker.
"""

import json
import shutil
import time
from typing import Any

import msgspec

from mage_async.assembly import environment_of
from mage_async.graph_memory.listing import listed
from mage_async.results.durable_files import write_whole
from mage_async.results.metrics import batch_metrics, batch_totals, check_names, trial_counts
from mage_async.results.run_files import read_lines
from mage_async.results.warning_metrics import (
    Seconds,
    idle_share,
    over_bound_by_actor,
    truncated_share,
)
from mage_async.tasks.population import League
from mage_async.trajectory import Group
from mage_services.learner.coordinator import Coordinator
from mage_services.learner.resume import Replayed
from mage_services.learner.training import Training
from mage_services.learner.worker import Worker
from mage_services.processes.startup import Startup
from mage_services.processes.time_accounting import TimeAccounting


class RunLog:
    """One learner's; those of earlier lives of the run are gone on with."""

    def __init__(
        self,
        startup: Startup,
        coordinator: Coordinator,
        league: League,
        training: Training,
        worker: Worker,
        warm_start_s: float,
        time_accounting: TimeAccounting,
    ) -> None:
        self._run, self._config = startup.run, startup.config
        self._coordinator, self._league = coordinator, league
        self._training, self._worker, self._warm_start_s = training, worker, warm_start_s
        self._environment = environment_of(startup.config)
        self._began = time.monotonic() - training.counters.get("train_s", 0.0)
        self._last = time.monotonic()
        self._heard: Seconds = {}
        self._totals: dict[str, float] = dict(training.counters.get("totals", {}))
        self.time = time_accounting

    def elapsed_s(self) -> float:
        """Since training began, in all lives of the run."""
        return time.monotonic() - self._began

    def waited_s(self) -> float:
        """Since the last step was written down."""
        return time.monotonic() - self._last

    async def complete(self, replayed: list[Replayed]) -> None:
        """Add steps that were committed and perhaps not written down."""
        known = {record["step"] for record in read_lines(self._run.metrics)}
        for step in replayed:
            record = self._record(
                step.version, step.groups, step.metrics, 0.0, step.elapsed_s, step.time_s
            )
            if step.version not in known:
                await self._worker.call(self._training.record, self._run.metrics, record)
            self._began = time.monotonic() - step.time_s

    async def step(
        self, groups: list[Group], metrics: dict[str, Any], waited_s: float
    ) -> dict[str, Any]:
        """Write down a step that has been trained and committed; its line is returned."""
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        version = self._training.trainer.version
        record = self._record(version, groups, metrics, waited_s, elapsed, now - self._began)
        disk = await self._worker.call(shutil.disk_usage, self._run.root)
        record |= {"disk_free_bytes": disk.free, **self._of_peers(groups, version)}
        check_names(record)
        await self._worker.call(self._training.record, self._run.metrics, record)
        return record

    async def keep_memory(self) -> None:
        """Write down what the graph memory holds at this version, where there is a memory."""
        memory = self._coordinator.memory
        if memory.is_on:
            await self._worker.call(self._training.record, self._run.memory, listed(memory))

    async def keep_sample(self, groups: list[Group]) -> None:
        """One trial of the batch as text, ten times a run, for people to read."""
        version, steps = self._training.trainer.version, self._config.learner.steps
        if version % max(1, steps // 10) == 0:
            await self._worker.call(self._training.sample, groups, version)

    def counters(self) -> dict[str, Any]:
        """What a checkpoint has to remember."""
        return {
            "next_grant": self._coordinator.ledger.next_grant,
            "train_s": self.elapsed_s(),
            "totals": self._totals,
        }

    async def write_end(self, parity: dict[str, float]) -> None:
        """What only the learner knows of the run so far; written at checkpoints and at the end."""
        counts = self._coordinator.counts()
        end = {
            "version": self._training.trainer.version,
            "warm_start_s": self._warm_start_s,
            "train_s": self.elapsed_s(),
            "totals": self._totals,
            "parity": parity,
            "trials": trial_counts(counts),
            "dropped_by_reason": dict(counts.dropped_by_reason),
            "granted_again": counts.granted_again,
            "fates": self._coordinator.arrivals.fates(),
            "blocked_s": self.shares(),
        }
        if self._league.is_on:
            end["population"] = msgspec.to_builtins(self._league.table())
        await self._worker.call(write_whole, self._run.learner, json.dumps(end, indent=2))

    def shares(self) -> dict[str, dict[str, float]]:
        """Seconds by state, of the learner and of every actor."""
        return {"learner": self.time.seconds(), **self._coordinator.registry.shares()}

    def view(self) -> dict[str, Any]:
        """What the terminal shows beside a step's metrics."""
        return {
            "trials": trial_counts(self._coordinator.counts()),
            "blocked_s": self.shares(),
            "faults": self._coordinator.faults[-3:],
        }

    def _of_peers(self, groups: list[Group], version: int) -> dict[str, Any]:
        """What a step says of the actors and of groups that were given up, where it says any."""
        coordinator, rules = self._coordinator, self._config.admission
        before, self._heard = self._heard, coordinator.registry.shares()
        receipts = coordinator.registry.take_receipts()
        apart = [each.difference for each in receipts]
        found = {
            "actors_idle_share": idle_share(before, self._heard),
            "receipts": len(receipts) or None,
            "receipt_retries": sum(each.num_retries for each in receipts) if receipts else None,
            "receipt_difference": max(filter(None, apart), default=None),
            "dropped_by_member": coordinator.ledger.take_drops(),
            "over_bound_by_actor": over_bound_by_actor(
                groups,
                coordinator.arrivals.take_actors(),
                version=version - 1,
                bound=rules.max_staleness + rules.lag,
            ),
        }
        return {name: value for name, value in found.items() if value not in (None, {})}

    def _record(
        self,
        step: int,
        groups: list[Group],
        metrics: dict[str, Any],
        waited_s: float,
        elapsed_s: float,
        time_s: float,
    ) -> dict[str, Any]:
        """A step's line; the totals grow by it."""
        shape, transcript = self._config.trial, self._config.transcript
        is_closed = transcript.forced_tags == "both"
        record = {
            "step": step,
            "time_s": time_s,
            **batch_metrics(groups, self._environment, elapsed_s, shape.episodes),
            "truncated_action_share": truncated_share(
                groups, None if is_closed else transcript.max_action_tokens
            ),
            **metrics,
            "waiting_s": waited_s,
            "groups_in_flight": self._coordinator.counts().groups.in_flight,
        }
        check_names(record)
        for name, value in {**batch_totals(groups), "train_s": record["train_s"]}.items():
            self._totals[name] = self._totals.get(name, 0) + value
        return record
