"""The learner: an inbox on the event loop, a trainer in a thread, and the desk between them.

    task      consumes                waits for              unblocks
    inbox     peers' messages         the socket             train, by `desk.arrived`
    clock     -                       half a second          lapsed grants, the supervisor's view
    train     batches of groups       `desk.arrived`         actors, by publishing weights

The trainer never waits for an actor but for the batch itself: weights are written by the same
thread that trained them, announced by the loop, and the next batch is usually complete by then.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from mage_async.admission import SlotLedger
from mage_async.admission_rules import RULES
from mage_async.assembly import environment_of
from mage_async.concurrency import Concurrency
from mage_async.config import Config
from mage_async.environments.environment import Environment
from mage_async.learning.warm_start import Progress
from mage_async.metrics import batch_metrics, check_names, trial_counts
from mage_async.task_stream import TaskStream
from mage_async.trajectory import Group
from mage_services.blocked import TimeBook
from mage_services.channel import LearnerChannel
from mage_services.desk import Desk, DeskRules
from mage_services.process import Status, run_process, ticks
from mage_services.startup import Startup, read_startup
from mage_services.training import Training

TICK_S = 0.5
PARITY_PATIENCE_S = 5.0
"""How long to wait, after the last step, for groups drawn by the last weights."""


class Learner:
    """One learner's life, from the first batch to the goodbye."""

    def __init__(
        self,
        startup: Startup,
        status: Status,
        desk: Desk,
        training: Training,
        worker: "Worker",
        warm_start_s: float,
    ) -> None:
        self._startup, self._status, self._desk = startup, status, desk
        self._training, self._worker, self._warm_start_s = training, worker, warm_start_s
        self._units = environment_of(startup.config).facts.units
        self._began = time.monotonic() - training.counters.get("train_s", 0.0)
        self._last = time.monotonic()
        self._totals: dict[str, float] = dict(training.counters.get("totals", {}))
        self.time = TimeBook("batch not full")

    async def train(self) -> None:
        """Train until the configured version, then measure parity and say goodbye."""
        config = self._startup.config
        self._desk.open(await self._worker.call(self._training.write_weights))
        while self._training.trainer.version < config.learner.steps:
            await self._step()
        parity = await self._parity()
        await self._worker.call(self._training.checkpoint, self._counters())
        await self._worker.call(self._write_end, parity)
        self._desk.dismiss("the run is complete")

    async def _step(self) -> None:
        groups = await self._batch()
        waited, began = time.monotonic() - self._last, time.monotonic()
        self.time.enter("training")
        metrics = await self._worker.call(self._training.step, groups)
        self.time.enter("publishing")
        publication = await self._worker.call(self._training.write_weights)
        self._desk.keep_pace(time.monotonic() - began)
        self._desk.trained(publication.version)
        self._desk.publish(publication)
        record = self._record(groups, metrics, waited)
        await self._worker.call(self._training.record, self._startup.run.metrics, record)
        if publication.version % self._startup.config.learner.checkpoint_every == 0:
            self.time.enter("checkpoint")
            await self._worker.call(self._training.checkpoint, self._counters())
            await self._worker.call(self._write_end, {})
        await self._keep_sample(groups)
        self.time.enter("batch not full")
        self._status.send("step", metrics=record, **self.view())

    async def _batch(self) -> list[Group]:
        """The next batch in order of grant. Cancellation leaves it in the ledger."""
        while (groups := self._desk.take_batch()) is None:
            self._desk.arrived.clear()
            await self._desk.arrived.wait()
        return groups

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
        record = {
            "step": self._training.trainer.version,
            "time_s": now - self._began,
            **batch_metrics(groups, self._units, elapsed),
            **metrics,
            "waiting_s": waited,
            "groups_in_flight": self._desk.counts().groups.in_flight,
        }
        check_names(record)
        self._add_totals(groups, record)
        return record

    def _add_totals(self, groups: list[Group], record: dict[str, Any]) -> None:
        trials = [trial for group in groups for trial in group.trials]
        for name, value in {
            "trials": len(trials),
            "generated_tokens": sum(trial.num_sampled() for trial in trials),
            "trained_tokens": sum(trial.num_tokens() for trial in trials),
            "prompt_tokens": sum(trial.num_prompt_tokens for trial in trials),
            "reused_tokens": sum(trial.num_reused_tokens for trial in trials),
            "repeated_tokens": sum(trial.num_repeated_tokens for trial in trials),
            "invalid_actions": sum(trial.num_invalid() for trial in trials),
            "extension_faults": sum(trial.num_extension_faults for trial in trials),
            "train_s": record["train_s"],
        }.items():
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

    def _write_end(self, parity: dict[str, float]) -> None:
        """What only the learner knows of the run so far; written at checkpoints and at the end."""
        end = {
            "version": self._training.trainer.version,
            "warm_start_s": self._warm_start_s,
            "train_s": time.monotonic() - self._began,
            "totals": self._totals,
            "parity": parity,
            "trials": trial_counts(self._desk.counts()),
            "dropped_by_reason": dict(self._desk.counts().dropped_by_reason),
            "granted_again": self._desk.counts().granted_again,
            "blocked_s": self.shares(),
        }
        self._startup.run.learner.write_text(json.dumps(end, indent=2))

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


async def _inbox(channel: LearnerChannel, desk: Desk) -> None:
    """Hand every message to the desk. Cancellation loses none."""
    while True:
        desk.take(*await channel.receive())


async def _clock(desk: Desk, learner: Learner, status: Status) -> None:
    async for _ in ticks(TICK_S):
        desk.tick()
        status.send("view", **learner.view())


def _ledger(config: Config, version: int, next_grant: int) -> SlotLedger:
    rules = config.admission
    return SlotLedger(
        rules.groups_per_step,
        rules.max_staleness,
        rules.trials_per_group,
        version=version,
        next_grant=next_grant,
        rule=RULES[rules.rule],
        lag=rules.lag,
        concurrency=rules.max_groups_in_play,
    )


def _pace(config: Config) -> Concurrency:
    rules = config.admission
    return Concurrency(
        rules.max_groups_in_play, rules.groups_per_step, rules.max_staleness, rules.over_age_target
    )


def _desk(channel: LearnerChannel, startup: Startup, environment: Environment) -> Desk:
    config = startup.config
    rules = DeskRules(
        config.trial.episodes,
        config.admission.grant_deadline_s,
        config.admission.max_drops_in_a_row,
        config.evaluation.every,
        config.learner.steps,
        config.admission.lag,
    )
    tasks = TaskStream(environment, config.seed)
    return Desk(channel, _ledger(config, 0, 0), tasks, rules, time.monotonic, pace=_pace(config))


async def main(startup: Startup, status: Status) -> None:
    """Bind, prepare the policy while peers arrive, train, and end."""
    worker = Worker()
    with LearnerChannel(
        startup.address, build=startup.build, config_digest=startup.config_digest
    ) as channel:
        desk = _desk(channel, startup, environment_of(startup.config))
        async with asyncio.TaskGroup() as tasks:
            inbox = tasks.create_task(_inbox(channel, desk), name="inbox")
            began = time.monotonic()
            _announce(startup, status)
            training, origin = await worker.call(Training.begin, startup, _reporter(status))
            warm_start_s = time.monotonic() - began
            status.send("fact", text=training.describe())
            status.send("policy", origin=origin, warm_start_s=warm_start_s)
            desk.ledger = _ledger(
                startup.config, training.trainer.version, training.counters.get("next_grant", 0)
            )
            learner = Learner(startup, status, desk, training, worker, warm_start_s)
            clock = tasks.create_task(_clock(desk, learner, status), name="clock")
            await learner.train()
            inbox.cancel()
            clock.cancel()
        worker.close()
        channel.close(linger_s=2.0)
    status.send("done", reason="the run is complete")


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
