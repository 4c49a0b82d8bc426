"""Start, watch, restart and end the processes of a run. This module imports no torch.

    process     ends well when              when it fails
    learner     all steps are trained       resumes from checkpoint and journal; its peers wait
    actor N     it receives a goodbye       the learner grants its groups to others
    evaluator   the final sets are played   starts again at the newest version

A process is restarted at once after its first end, and after pauses (`BACK_OFF_S`) if it ends
again soon; a process whose error is deterministic is never restarted. Failures in a row count
against `supervision.max_restarts`. The count begins again once the process has run for `HEALTHY_S`
and made progress: a step was committed, a group played, or a point of the curve measured. It also
begins again if a process is killed from outside while the run makes progress.
"""

import asyncio
import json
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mage_async.config.schema import Config, Pretrained
from mage_async.doctor import Doctor
from mage_async.errors import DeterministicFailure, Halted, RunError
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_document, write_whole
from mage_services.processes import process
from mage_services.processes.child_process import OUT_OF_MEMORY
from mage_services.processes.process import EXIT_DETERMINISTIC, EXIT_FAILED, append_lines
from mage_services.processes.supervised_process import (
    OWN_PROCESS,
    ProcessSpec,
    RunningProcess,
    SupervisedProcess,
)
from mage_services.processes.time_accounting import TimeAccounting
from mage_services.terminal.plain_lines import View

LEAVE_S = 3.0
"""Seconds that actors have to end by themselves after the learner."""
TICK_S = 1.0
"""Seconds between two "beat" events to the view, which lets it show the time that passes while no
process sends events.
"""
GRACE_S = 3.0
"""Seconds from SIGTERM to SIGKILL when a run is ended early."""
KILLED_S = 10.0
"""Seconds after SIGKILL for which a run waits for the end of a process."""
BACK_OFF_S = (0.0, 0.5, 2.0, 5.0)
"""Seconds before the first, second, … restart in a row; the last one for all further restarts."""
HEALTHY_S = 120.0
"""Seconds after which, with progress, a process counts as healthy: its earlier failures are
forgotten, because a later one has another cause.
"""
# Without the condition of progress, a warm start that fails after minutes would be restarted
# endlessly.
PROGRESS = {"step", "played", "curve"}
"""Status events by which a process reports progress."""

# Advice that is appended to the line which says how a process ended.
FEWER_ACTORS = ": start fewer --actors"
"""Continuation of `OUT_OF_MEMORY`."""
SMALLER_STEP = (
    ", or lower learner.max_tokens_per_microbatch, or set learner.activation_checkpointing = true"
)
"""Continuation of `FEWER_ACTORS` for the learner."""

LARGE_TENSORS = {"MALLOC_MMAP_THRESHOLD_": "4000000", "MALLOC_TRIM_THRESHOLD_": "1000000000"}
"""Thresholds of glibc's allocator, in bytes, for a learner that trains a pretrained model."""
# glibc raises its own thresholds as memory is freed. Activations, whose sizes change with every
# micro-batch, then fragment a heap that never shrinks (17 GB, of which 6 are in use). With the
# first threshold each large activation gets a memory mapping of its own, which is returned to the
# system when it is freed. The second threshold keeps up to 1 GB of smaller ones, because fetching
# fresh pages for them took a quarter of a step (`bench/models/step_memory.py`).


@dataclass(frozen=True, slots=True)
class _Failure:
    """Say how a process ended without having finished its work, or why it could not be started."""

    failure_line: str
    """One line that names the process."""
    code: int = EXIT_FAILED
    """Exit code, negative for a signal."""
    was_silent: bool = False
    """Whether the process was killed because it was silent for too long."""


@dataclass(slots=True)
class Supervisor:
    """Supervise the processes of one run."""

    run: RunDirectory
    config: Config
    num_actors: int
    address: str
    """Address at which the learner listens."""
    view: View
    """Shows the events of the processes."""
    doctor: Doctor | None = None
    """Examines every step; None if no step is examined."""
    start: Callable[[ProcessSpec], Awaitable[RunningProcess]] = SupervisedProcess.start
    """Starts a process, on this machine or on another."""
    news: Callable[[], Iterable[str]] = tuple
    """Called each second; returns sentences that are shown as notes."""
    _children: set[RunningProcess] = field(default_factory=set)
    """The processes that run now."""
    _is_over: bool = False
    """Whether the learner has ended well, and the actors have had `LEAVE_S` to end too."""
    _num_restarts: dict[str, int] = field(default_factory=dict)
    """By process: its failures in a row, which count against `supervision.max_restarts`."""
    _num_early_ends: dict[str, int] = field(default_factory=dict)
    """By process: number of its ends before `HEALTHY_S` in a row, not counting the first."""
    _progress: int = 0
    """Number of events in `PROGRESS` so far, of all processes."""
    _starting: set[str] = field(default_factory=set)
    """Names of processes that have not sent an event yet."""
    _num_backing_off: int = 0
    """Number of processes that wait for their restart."""
    time: TimeAccounting = field(default_factory=lambda: TimeAccounting("process starting"))
    """Wall time by state: in `view` the supervisor draws events; in the other states it waits: for
    a process's first event (`process starting`), for a restart (`back-off`), for any event
    (`processes`), or for processes to end (`ending`)."""

    async def supervise(self) -> None:
        """Supervise the run to its end.

        Cancellation ends every process within `GRACE_S` and leaves none, unless the kernel does not
        end one that was killed.

        Raises:
            DeterministicFailure: a process would fail again in the same way.
            RunError: a process failed more often than `supervision.max_restarts`.
            Halted: the doctor found a fault that `doctor.halt` names.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                kept = {
                    spec.name: tasks.create_task(self._keep_running(spec), name=spec.name)
                    for spec in self._specs()
                }
                ending = tasks.create_task(self._end_actors(kept), name="end of actors")
                clock = tasks.create_task(self._tick(), name="clock")
                await asyncio.wait([ending, *kept.values()])
                clock.cancel()
        finally:
            self.time.enter("ending")
            await self._end_all()

    async def _tick(self) -> None:
        """Pass the time to the view, show news, and check the run's folder, until cancelled."""
        async for _ in process.ticks(TICK_S):
            self._show("supervisor", {"event": "beat"})
            for text in self.news():
                self._show("supervisor", {"event": "note", "text": text})
            self._check_folder()

    async def _keep_running(self, spec: ProcessSpec) -> None:
        """Start a process, and restart it until it ends well.

        Raises:
            DeterministicFailure: the process would fail again in the same way.
            RunError: the process failed more often in a row than `supervision.max_restarts`.
        """
        while True:
            began, progress = time.monotonic(), self._progress
            failure, made_progress = await self._run_once(spec)
            if failure is None or self._is_not_needed(spec):
                return
            self._check_folder()
            line = failure.failure_line + _advice(spec, failure)
            if failure.code == EXIT_DETERMINISTIC:  # it would fail again in the same way
                raise DeterministicFailure(line)
            # A kill from outside, such as when a machine is taken away, is not a failure of the
            # process. But if no process of the run made progress since the start, the kernel may
            # have killed it for its memory, and would do so again: then it counts as a failure.
            is_from_outside = failure.code == -signal.SIGKILL and not failure.was_silent
            was_healthy = time.monotonic() - began > HEALTHY_S
            if (made_progress and was_healthy) or (is_from_outside and self._progress > progress):
                self._num_restarts[spec.name] = 0
            # The first early end counts as 0, and the second as 1, after which `_back_off` does not
            # pause yet.
            num_early = 0 if was_healthy else self._num_early_ends.get(spec.name, -1) + 1
            self._num_early_ends[spec.name] = num_early
            self._num_restarts[spec.name] = count = self._num_restarts.get(spec.name, 0) + 1
            most = self.config.supervision.max_restarts
            if count > most:
                raise RunError(
                    f"{line.rstrip('.')}. It failed {count} times in a row (between two "
                    f"failures it ran for less than {HEALTHY_S:g} s or made no progress), and "
                    f"supervision.max_restarts = {most}. Mend the cause, then go on with "
                    f"`{self.run.resume_command}`"
                )
            text = f"{line.rstrip('.')}. It is started again"
            self._show("supervisor", {"event": "restarting", "text": text})
            # A single kill from outside needs no back-off, because its cause is over. The cause of
            # several kills, or of a failure, may last.
            if waits := num_early if is_from_outside else count:
                await self._back_off(waits)
            if self._is_not_needed(spec):
                return

    def _check_folder(self) -> None:
        """Raise a `DeterministicFailure` if somebody has deleted the run's folder."""
        if not self.run.logs.is_dir():
            raise DeterministicFailure(
                f"{self.run.root} was deleted while the run went on, and its trials and weights "
                "with it: start a new run"
            )

    def _is_not_needed(self, spec: ProcessSpec) -> bool:
        """Return whether a process is an actor whose learner has ended."""
        return self._is_over and spec.name.startswith("actor-")

    async def _end_actors(self, kept: dict[str, asyncio.Task[None]]) -> None:
        """After the learner has ended well, end the actors that did not receive its goodbye. Cancel
        the tasks of those that do not run, because they wait for a restart or for a node.

        Args:
            kept: Task of each process, by name; it ends when the process has ended well.
        """
        await asyncio.wait([kept["learner"]])
        actors = {name: task for name, task in kept.items() if name.startswith("actor-")}
        await asyncio.wait(actors.values(), timeout=LEAVE_S)
        self._is_over = True
        living = {child.spec.name: child for child in self._children}
        for name, task in actors.items():
            if child := living.get(name):
                child.terminate()
            else:
                task.cancel()

    async def _run_once(self, spec: ProcessSpec) -> tuple[_Failure | None, bool]:
        """Start a process, and show its events until its end.

        Returns:
            How it failed, None if it reported that its work was finished; and whether it made
            progress.
        """
        self._starting.add(spec.name)
        has_finished = made_progress = False
        try:
            try:
                child = await self.start(spec)
            except OSError as error:  # no room for a process, its log or its socket
                return _Failure(f"{spec.name} could not be started: {error}"), False
            self._children.add(child)
            where = {"node": child.node} if child.node else {}
            self._show("supervisor", {"event": "started", "text": spec.name} | where)
            async for event in child.events(self.config.supervision.silence_s):
                self._starting.discard(spec.name)
                has_finished |= event["event"] == "finished"
                if event["event"] in PROGRESS:
                    made_progress = True
                    self._progress += 1
                self._show(spec.name, event)
                if event["event"] == "step":
                    self._examine(event["metrics"])
            code = await child.wait()
        finally:
            self._starting.discard(spec.name)
        self._children.discard(child)
        # The event decides, not the exit code: on a busy machine a process that has done its work
        # may take so long to exit that it is killed.
        failure = (
            None if has_finished else _Failure(child.failure_line(code), code, child.was_silent)
        )
        return failure, made_progress

    async def _back_off(self, count: int) -> None:
        """Wait before the `count`-th restart in a row."""
        self._num_backing_off += 1
        self._book()
        try:
            await asyncio.sleep(BACK_OFF_S[min(count, len(BACK_OFF_S)) - 1])
        finally:
            self._num_backing_off -= 1
            self._book()

    def _show(self, process: str, event: dict[str, Any]) -> None:
        """Show an event, and account for the time that takes."""
        self.time.enter("view")
        self.view.event(process, event)
        self._book()

    def _examine(self, metrics: dict[str, Any]) -> None:
        """Have the doctor examine a step, and show its findings.

        Raises:
            Halted: a finding is one of `doctor.halt`.
        """
        if self.doctor is None:
            return
        if not self.doctor.last_step:  # the warm start has ended before the first step
            self.doctor.note_warm_start(read_document(self.run.warm_start))
        for finding in self.doctor.step(metrics):
            self._show("doctor", {"event": "finding", "text": finding.sentence()})
            if finding.name in self.config.doctor.halt:
                raise Halted(f"the doctor halted the run: {finding.sentence()}")

    def _book(self) -> None:
        """Record in the time accounting what the supervisor waits for from now on."""
        living = "process starting" if self._starting else "processes"
        self.time.enter("back-off" if self._num_backing_off else living)

    async def _end_all(self) -> None:
        """End every process that still runs: terminate, wait for `GRACE_S`, kill, wait for
        `KILLED_S`. Report those that have not ended then.
        """
        children, self._children = self._children, set()
        if not children:
            return
        for child in children:
            child.terminate()
        ending = {asyncio.ensure_future(child.wait()): child.spec.name for child in children}
        await asyncio.wait(ending, timeout=GRACE_S)
        for child in children:
            child.kill()
        ended, left = await asyncio.wait(ending, timeout=KILLED_S)
        if left:
            names = ", ".join(sorted(ending[each] for each in left))
            text = (
                f"killed, but not ended after {KILLED_S:g} s: {names}. The kernel ends them when "
                "their call of a file system or a driver returns; the run does not wait for them"
            )
            self._show("supervisor", {"event": "note", "text": text})
        for each in left:
            each.cancel()
        await asyncio.gather(*ended)

    def _specs(self) -> Sequence[ProcessSpec]:
        """Return the processes of the run: the learner, the actors and the evaluator."""
        threads, devices_of = self.config.engine.threads, self.config.engine.devices_of
        actor = "mage_services.actor.actor"
        return [
            self._spec("learner", "mage_services.learner.learner", self.config.learner.threads),
            *(
                self._spec(f"actor-{number}", actor, threads, devices_of(number))
                for number in range(self.num_actors)
            ),
            # -1 stands for the evaluator.
            self._spec("evaluator", "mage_services.actor.evaluator", threads, devices_of(-1)),
        ]

    def _spec(
        self, name: str, module: str, threads: int, devices: tuple[int, ...] = ()
    ) -> ProcessSpec:
        """Return the description of one process, with its arguments and environment variables."""
        arguments = (str(self.run.root), "--name", name, "--address", self.address)
        of_weights = self.config.transport.weights.variables.items()
        variables = {key: value for key, value in of_weights if key not in os.environ}
        if name == "learner" and isinstance(self.config.policy, Pretrained):
            variables |= LARGE_TENSORS
        log = self.run.log_of(name)
        return ProcessSpec(
            name, module, arguments, log, threads, devices, variables, config=self.config
        )


def _advice(spec: ProcessSpec, failure: _Failure) -> str:
    """Return what to do about a process that a signal has ended; "" about others."""
    if failure.code == -signal.SIGKILL and not failure.was_silent:
        return OUT_OF_MEMORY + FEWER_ACTORS + (SMALLER_STEP if spec.name == "learner" else "")
    return "" if spec.name == "learner" or failure.code >= 0 else OWN_PROCESS


async def until_signalled(supervisor: Supervisor) -> int | None:
    """Supervise until the end of the run, or until SIGINT, SIGTERM or SIGHUP; return the signal's
    number, or None.
    """
    text = (
        f"the run is being ended: its processes have {GRACE_S:g} s, then they are killed. Ctrl-C "
        "changes nothing until then; afterwards it leaves out the summary and the report"
    )
    return await process.until_signalled(
        supervisor.supervise(),
        *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
        on_signal=lambda: supervisor.view.line(text),
    )


# The code below writes the files in which `mage view` reads the activity of a run's processes.
# `events.jsonl` grows by a line whenever a process starts, ends, fails or sends a note.
# `times.json` says where the learner's time goes.

TIMES_S = 1.0
"""Least number of seconds between two writes of `times.json`."""
RECORDED = {"started", "ready", "done", "failed", "restarting", "note", "policy", "evaluating"}
"""Status events that are written to `events.jsonl`."""
RECORDED_FIELDS = ("event", "text", "reason", "version", "node")
"""Fields of a process's status event that are written to `events.jsonl`."""
MAX_WAITING = 10_000
"""Number of lines above which the oldest are dropped while `events.jsonl` cannot be written."""


class RecordedView:
    """Write the events of a run to files, and pass them to another view. When a file cannot be
    written, for example on a full disk, this is reported, and every later event tries again.
    """

    def __init__(
        self, view: View, run: RunDirectory, clock: Callable[[], float] = time.time
    ) -> None:
        self._view, self._run, self._clock = view, run, clock
        self._known_faults: set[str] = set()
        """Faults that were written already: the learner repeats its latest ones in every event."""
        self._times_at = 0.0
        self._waiting = deque[dict[str, Any]](maxlen=MAX_WAITING)
        """Lines that are not written to `events.jsonl` yet."""
        self._failed = set[Path]()
        """Files that could not be written at the latest try."""

    def event(self, process: str, event: dict[str, Any]) -> None:
        """Write and show a status event of a process."""
        self._record(process, event)
        self._view.event(process, event)

    def line(self, text: str) -> None:
        """Show a sentence that stays on the screen."""
        self._view.line(text)

    def close(self, summary: dict[str, Any] | None) -> None:
        """Close the view."""
        self._view.close(summary)

    def _record(self, process: str, event: dict[str, Any]) -> None:
        """Write an event to `events.jsonl`, or the times in it to `times.json`."""
        whose: dict[str, Any] = {"at": self._clock(), "process": process}
        if event["event"] in RECORDED:
            content = {key: event[key] for key in RECORDED_FIELDS if key in event}
            self._waiting.append(whose | content)
        # Events of the learner that have its time accounting (`blocked_s`) have its faults too.
        elif "blocked_s" in event:
            faults = [fault for fault in event["faults"] if fault not in self._known_faults]
            self._known_faults.update(faults)
            self._waiting += [whose | {"event": "note", "text": fault} for fault in faults]
        if self._waiting:
            self._try(self._write_events, self._run.events)
        # A step is written at once, so that the summary of a stopped run has the counts after its
        # last step. `abs`, because the clock of the machine may be set back.
        is_due = event["event"] == "step" or abs(whose["at"] - self._times_at) >= TIMES_S
        if "blocked_s" in event and is_due:
            self._times_at = whose["at"]
            self._try(partial(self._write_times, event), self._run.times)

    def _try(self, write: Callable[[], None], file: Path) -> None:
        """Write a file, and report the first failure and the first success after it."""
        try:
            write()
        except OSError as error:
            if file not in self._failed:
                self._failed.add(file)
                self.line(f"{file} cannot be written: {error.strerror}. It is tried again")
            return
        if file in self._failed:
            self._failed.remove(file)
            self.line(f"{file} is written again")

    def _write_events(self) -> None:
        """Append the waiting lines to `events.jsonl`."""
        while self._waiting:  # one after the other, so that a retry writes none twice
            append_lines(self._run.events, [self._waiting[0]])
            self._waiting.popleft()

    def _write_times(self, event: dict[str, Any]) -> None:
        """Replace `times.json`."""
        times = {"at": self._times_at}
        times |= {key: event[key] for key in ("trials", "blocked_s", "progress") if key in event}
        # Not synced to the disk: nothing reads the times after a crash of the machine.
        write_whole(self._run.times, json.dumps(times), is_durable=False)
