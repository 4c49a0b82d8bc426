"""The supervisor: starts, watches, restarts and ends the processes of a run. It imports no torch.

process     ends well when            ends badly: started again within a budget; at once where it
                                      was killed, with back-off where it failed; never where its
                                      error is deterministic
learner     all steps are trained     alone: from checkpoint and journal; its peers wait for it
actor N     the learner's goodbye     alone; its groups are granted again
evaluator   the final sets are played alone

Failures count against the budget until a later life of the process has made progress: a step
committed, a group played, a point of the curve measured. Living long is none: a warm start that
fails after minutes would be started for ever.

The supervisor's own time is accounted to `view` (drawing status lines) and to what it waits for
otherwise: `process starting` (a process has not sent its first line), `back-off` before a restart,
`processes` (all processes live and there is nothing to do), and at the end `ending`.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mage_async.config.schema import Config, Pretrained
from mage_async.doctor import Doctor
from mage_async.errors import DeterministicFailure, Halted, RunError
from mage_async.results.run_directory import RunDirectory
from mage_services.processes.child import Child, Running, Spec
from mage_services.processes.process import EXIT_DETERMINISTIC
from mage_services.processes.time_accounting import TimeAccounting
from mage_services.terminal.view import View

LEAVE_S = 3.0
"""After the learner's end, for actors to end by themselves."""
GRACE_S = 3.0
"""From SIGTERM to SIGKILL, when the run is ended early."""
BACK_OFF_S = (0.0, 0.5, 2.0, 5.0)
HEALTHY_S = 120.0
"""A process that has lived so long, and made progress, failed for a new reason: earlier failures
are forgotten."""
PROGRESS = {"step", "played", "curve"}
"""Events of a process that has made progress."""

LARGE_TENSORS = {"MALLOC_MMAP_THRESHOLD_": "4000000", "MALLOC_TRIM_THRESHOLD_": "1000000000"}
"""For glibc, in bytes, where a pretrained model is trained. Its own thresholds grow with what is
freed: activations, whose sizes change with every pass, then tear holes into a heap that never
shrinks (17 GB where 6 are in use). The first one is what a large activation has, so that each of
them is mapped apart and given back; the second keeps up to 1 GB of smaller ones, because fetching
fresh pages for them took a quarter of a step (`bench/models/step_memory.py`)."""


async def start_here(spec: Spec) -> Running:
    """Start a process on this machine. Cancellation is as of `Child.start`."""
    return await Child.start(spec, dict(os.environ))


@dataclass(frozen=True, slots=True)
class BadEnd:
    """The end of a process that had not done its work."""

    epitaph: str
    """One line that says how."""
    is_from_outside: bool
    """A signal from outside the run killed the process."""
    is_deterministic: bool
    """Started again, the process would end in the same way."""
    made_progress: bool


@dataclass(slots=True)
class Supervisor:
    """The processes of one run."""

    run: RunDirectory
    config: Config
    num_actors: int
    address: str
    view: View
    resume: bool = False
    doctor: Doctor | None = None
    """Asked after every step; None: no step is looked at."""
    start: Callable[[Spec], Awaitable[Running]] = start_here
    """Starts a process, here or on another machine."""
    _children: set[Running] = field(default_factory=set)
    _is_over: bool = False
    """The learner has ended well, and actors had time to do so too."""
    _num_restarts: dict[str, int] = field(default_factory=dict)
    _num_starting: int = 0
    """Processes that have not said a word."""
    _num_backing_off: int = 0
    time: TimeAccounting = field(default_factory=lambda: TimeAccounting("process starting"))

    async def supervise(self) -> None:
        """Run to the end.

        Cancellation ends every process within `GRACE_S` and leaves none.

        Raises:
            DeterministicFailure: a process failed of what would fail again.
            RunError: a process failed more often than its budget allows. Either sentence says
                which process and why.
            Halted: the doctor found what `doctor.halt` names.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                kept = {
                    spec.name: tasks.create_task(self._keep(spec), name=spec.name)
                    for spec in self._specs()
                }
                tasks.create_task(self._end_actors(kept), name="end of actors")
        finally:
            self.time.enter("ending")
            await self._end_all()

    async def _keep(self, spec: Spec) -> None:
        """Start a process, and again while its budget lasts, until it ends well."""
        began = time.monotonic()
        while (end := await self._live(spec)) is not None:
            if self._is_for_nobody(spec):
                return
            if end.is_deterministic:
                raise DeterministicFailure(end.epitaph)
            if end.made_progress and time.monotonic() - began > HEALTHY_S:
                self._num_restarts[spec.name] = 0
            self._num_restarts[spec.name] = count = self._num_restarts.get(spec.name, 0) + 1
            if count > self.config.supervision.max_restarts:
                raise RunError(end.epitaph)
            self._show("supervisor", {"event": "restarting", "text": end.epitaph})
            if not end.is_from_outside:  # what killed it is over; what it failed of may not be
                await self._back_off(count)
            if self._is_for_nobody(spec):
                return
            began = time.monotonic()

    def _is_for_nobody(self, spec: Spec) -> bool:
        """An actor after the learner's end."""
        return self._is_over and spec.name.startswith("actor-")

    async def _end_actors(self, kept: dict[str, asyncio.Task[None]]) -> None:
        """When the learner has ended well, end the actors that have not heard its goodbye, and wait
        no longer for those that no node has had room for.
        """
        await asyncio.wait([kept["learner"]])
        actors = [task for name, task in kept.items() if name.startswith("actor-")]
        await asyncio.wait(actors, timeout=LEAVE_S)
        self._is_over = True
        for child in self._children:
            if child.spec.name.startswith("actor-"):
                child.terminate()
        living = {child.spec.name for child in self._children}
        for name, task in kept.items():
            if name.startswith("actor-") and name not in living:
                task.cancel()

    async def _live(self, spec: Spec) -> BadEnd | None:
        """One life of a process; None where it ended well."""
        self._num_starting += 1
        is_starting, made_progress = True, False
        try:
            child = await self.start(spec)
            self._children.add(child)
            where = {"node": child.node} if child.node else {}
            self._show("supervisor", {"event": "started", "text": spec.name} | where)
            async for event in child.events(self.config.supervision.silence_s):
                self._num_starting -= is_starting
                is_starting = False
                made_progress |= event["event"] in PROGRESS
                self._show(spec.name, event)
                if event["event"] == "step":
                    self._examine(event["metrics"])
            code = await child.wait()
        finally:
            self._num_starting -= is_starting
        self._children.discard(child)
        if code == 0:
            return None
        return BadEnd(
            child.epitaph(code),
            is_from_outside=code == -signal.SIGKILL and not child.was_silent,
            is_deterministic=code == EXIT_DETERMINISTIC,
            made_progress=made_progress,
        )

    async def _back_off(self, count: int) -> None:
        """Wait before a restart. Cancellation cuts it short."""
        self._num_backing_off += 1
        self._book()
        try:
            await asyncio.sleep(BACK_OFF_S[min(count, len(BACK_OFF_S)) - 1])
        finally:
            self._num_backing_off -= 1
            self._book()

    def _show(self, process: str, event: dict[str, Any]) -> None:
        """Draw what happened, and book the time that takes."""
        self.time.enter("view")
        self.view.event(process, event)
        self._book()

    def _examine(self, metrics: dict[str, Any]) -> None:
        """Ask the doctor about a step, and show what is found.

        Raises: Halted: the run is to end of it.
        """
        for finding in self.doctor.step(metrics) if self.doctor else ():
            self._show("doctor", {"event": "finding", "text": finding.sentence()})
            if finding.name in self.config.doctor.halt:
                raise Halted(f"the doctor halted the run: {finding.sentence()}")

    def _book(self) -> None:
        """Say what is waited for from here on."""
        living = "process starting" if self._num_starting else "processes"
        self.time.enter("back-off" if self._num_backing_off else living)

    async def _end_all(self) -> None:
        """End every process that still runs: ask, wait, insist."""
        children, self._children = self._children, set()
        for child in children:
            child.terminate()
        ending = [asyncio.ensure_future(child.wait()) for child in children]
        if ending:
            await asyncio.wait(ending, timeout=GRACE_S)
        for child in children:
            child.kill()
        await asyncio.gather(*ending)

    def _specs(self) -> Sequence[Spec]:
        threads, devices_of = self.config.engine.threads, self.config.engine.devices_of
        specs = [
            self._spec("learner", "mage_services.learner.learner", self.config.learner.threads)
        ]
        for number in range(self.num_actors):
            own = devices_of(number)
            specs.append(self._spec(f"actor-{number}", "mage_services.actor.actor", threads, own))
        own = devices_of(-1)
        specs.append(self._spec("evaluator", "mage_services.actor.evaluator", threads, own))
        return specs

    def _spec(self, name: str, module: str, threads: int, devices: tuple[int, ...] = ()) -> Spec:
        arguments = (str(self.run.root), "--name", name, "--address", self.address)
        if self.resume:
            arguments = (*arguments, "--resume")
        trains_large = name == "learner" and isinstance(self.config.policy, Pretrained)
        variables = LARGE_TENSORS if trains_large else {}
        return Spec(name, module, arguments, self.run.log_of(name), threads, devices, variables)


async def until_signalled(supervisor: Supervisor) -> int | None:
    """Supervise until the end or until SIGINT or SIGTERM, whose number is returned."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    told: list[int] = []

    def tell(number: int) -> None:
        if not told:
            told.append(number)
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, tell, number)
    try:
        await supervisor.supervise()
    except asyncio.CancelledError:
        if not told:
            raise
    return told[0] if told else None
