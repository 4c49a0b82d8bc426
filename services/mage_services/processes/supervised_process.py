"""Start and watch a process of a run, for the supervisor, to which it sends status events.

A process that sends no event for too long, a *silent* process, is killed. A healthy one sends at
least a heartbeat every second. `supervisor.py` decides whether and when a process is restarted. The
environment of a process sets the number of threads that torch uses at first (`OMP_NUM_THREADS`);
the code that trains and the code that samples set their own numbers later (`learner.threads`,
`engine.threads`).
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import ConfigError
from mage_services.processes.child_process import (
    MAX_LOG_BYTES,
    SHOW_STACKS,
    ChildProcess,
    bound_log,
    end_in_words,
    log_bytes,
    members,
    module_command,
    place_in_foreign_code,
)
from mage_services.processes.process import EXIT_DETERMINISTIC, EXIT_TERMINATED, Begin

FIRST_EVENT_S = 180.0
"""Seconds without a first event after which a process is killed: imports take a while on a busy
machine.
"""
NOTICE_S = 4.0
"""Seconds of silence after which the user is informed, long before the process is killed."""
STALL_S = 1.0
"""Seconds by which a wait has to exceed its timeout before the supervisor itself counts as stopped.
"""
GRACE_S = 0.5
"""Seconds that the children of a process may outlive it, and in which a blocked process has to
print its stacks."""

CHANNEL_CLOSED = (
    "it lost its channel to the supervisor: the environment may close descriptors that it did not "
    "open (os.close, os.closerange)"
)
"""Reason for the failure of a process that still runs after its channel was closed."""
OWN_PROCESS = (
    ". With environment.workers = 1 a class with `reset` and `step` plays in a process of its own, "
    "whose end costs a trial and no actor; so does an agent's program that is reached by "
    "--agent-url"
)
"""Advice on an actor or evaluator that foreign code blocks or ends."""
PRINT_LESS = (
    f"has printed over {MAX_LOG_BYTES / 1e6:g} MB: its log keeps the newest lines. Let the "
    "environment print less"
)
"""Note on a process whose log was cut."""
UNREQUESTED = " without an exception, and the run did not end it: the environment may call os._exit"
"""Explanation of the end of a process that exited without having finished or failed."""
END_THEM = "If the environment started them, end them in its `close()`."
"""Advice in a note on processes that an ended process left running."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Describe a process that is to be started."""

    name: str
    """Such as "actor-0"."""
    module: str
    """Module that the process runs."""
    arguments: tuple[str, ...]
    log: Path
    """File to which the process prints."""
    threads: int
    """Number of threads that share one computation (`OMP_NUM_THREADS`)."""
    devices: tuple[int, ...] = ()
    """Indices of the only GPUs that the process sees, among those that the supervisor sees; () for
    all."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to those of every process of a run."""
    config: Config | None = None
    """The resolved configuration, which is sent to the process; None to send nothing."""


class RunningProcess(Protocol):
    """Describe a running process, on whatever machine; `SupervisedProcess` explains the methods."""

    spec: ProcessSpec
    node: str
    """The node it runs on; "" for this machine."""

    @property
    def was_silent(self) -> bool: ...

    def events(self, silence_s: float) -> AsyncIterator[dict[str, Any]]: ...

    async def wait(self) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def failure_line(self, code: int) -> str: ...


def visible_devices(devices: Sequence[int]) -> str:
    """Return the value of `CUDA_VISIBLE_DEVICES` with which a process sees only some of the GPUs
    that this process sees.

    Args:
        devices: Indices among the GPUs that this process sees, as in `learner.device`.

    Raises:
        ConfigError: this process does not see as many GPUs.
    """
    # A scheduler or a user may have set the variable, to numbers or to UUIDs.
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    if own is None:
        return ",".join(map(str, devices))
    names = [name.strip() for name in own.split(",") if name.strip()]
    if max(devices) >= len(names):
        raise ConfigError(
            f"engine.devices names GPU {max(devices)}, and CUDA_VISIBLE_DEVICES = {own!r} shows "
            f"{len(names)} GPUs, counted from 0: name these in engine.devices, or change the "
            "variable"
        )
    return ",".join(names[device] for device in devices)


class SupervisedProcess(ChildProcess[dict[str, Any]]):
    """Start and watch a process on this machine."""

    spec: ProcessSpec
    node = ""
    failure = ""
    """The reason that the process gave for its failure."""
    has_spoken = False
    """Whether it has sent an event. From then on it reports its exceptions (`run_process`)."""
    was_silent = False
    """Whether the process was killed because it was silent for too long."""
    has_cut_log = False
    """Whether its log was too long, and has been cut (`bound_log`)."""
    left_behind: Sequence[str] = ()
    """Processes that this one had started and left running; they are killed."""
    _ending: asyncio.Task[None]
    """Task that waits for the end of the process, and ends the processes that it left running."""
    _log_bytes = 0
    """Number of bytes in the log when the process, silent for `NOTICE_S`, was asked to print its
    stacks."""

    @classmethod
    async def start(cls, spec: ProcessSpec) -> Self:  # type: ignore[override]
        """Start a process. If this call is cancelled, none is left."""
        variables = {**spec.variables, "OMP_NUM_THREADS": str(spec.threads)}
        if spec.devices:
            variables["CUDA_VISIBLE_DEVICES"] = visible_devices(spec.devices)
        command = module_command(spec.module, *spec.arguments)
        child = await super().start(command, dict[str, Any], variables=variables, log=spec.log)
        child.spec = spec
        if spec.config is not None:
            child.send(Begin(config_file.as_tables(spec.config)))
        child._ending = asyncio.create_task(child._end_group(), name=f"end of {spec.name}")
        return child

    async def _end_group(self) -> None:
        """Wait for the end of the process, and kill the processes that it left running. A child
        that it forked holds the process's channel and memory.
        """
        await self._process.wait()
        if members(self.pid):
            await asyncio.sleep(GRACE_S)
            self.left_behind = [f"{name} ({pid})" for pid, name in members(self.pid).items()]
            self.kill()

    async def events(self, silence_s: float) -> AsyncIterator[dict[str, Any]]:
        """Yield the status events of the process until it ends, each with the time it came ("at").

        A process that sends nothing for `silence_s` is killed; after `NOTICE_S` of silence a note
        is yielded, and after twice as long another one, if the process is in foreign code, such as
        a user's environment. Time in which the process waited for a core is not silence.
        Cancellation leaves the process running: end it by `terminate` or `kill`.
        """
        loop = asyncio.get_running_loop()
        # `allowed` and `silent_s`: seconds of silence that are allowed, and that have passed.
        allowed, silent_s, num_notes = FIRST_EVENT_S, 0.0, 0
        while True:
            began, starved_before_s = loop.time(), self.starved_s()
            # At least a tenth of `allowed`: a process without a core is not looked at in a busy
            # loop when little of its allowed silence is left.
            timeout_s = min(NOTICE_S, max(allowed - silent_s, allowed / 10))
            try:
                async with asyncio.timeout(timeout_s):
                    event = await self.receive()
            except TimeoutError:
                if self._ending.done():  # a child in a session of its own holds the channel open
                    break
                if loop.time() - began > timeout_s + STALL_S:
                    continue  # the supervisor was stopped, and has not read what came meanwhile
                # The difference may be negative: `starved_s` is 0 once the process has ended.
                starved_s = max(0.0, self.starved_s() - starved_before_s)
                silent_s += max(0.0, timeout_s - starved_s)
                if silent_s >= allowed:
                    self.was_silent = True
                    self._show_stacks()
                    await asyncio.wait([self._ending], timeout=GRACE_S)
                    self.kill()
                    return
                # No note before the first event, because imports may take long, and none after a
                # shorter wait than `NOTICE_S`, because the process is about to be killed. Also no
                # note if the process had no core for most of this time: it is only slow, and a note
                # would alarm a user whose machine is busy.
                is_noted = timeout_s == NOTICE_S and silent_s >= NOTICE_S / 2
                if is_noted and self.has_spoken and num_notes < 2:
                    text = self._silence_note(silence_s) if num_notes == 0 else self._place_note()
                    num_notes += 1
                    if text:
                        yield {"event": "note", "text": text, "at": loop.time()}
                continue
            if event is None:
                break
            allowed, silent_s, num_notes, self.has_spoken = silence_s, 0.0, 0, True
            if event["event"] == "failed":
                self.failure = event["reason"]
            yield event | {"at": loop.time()}
            if bound_log(self.spec.log) and not self.has_cut_log:
                self.has_cut_log = True
                yield {"event": "note", "text": PRINT_LESS, "at": loop.time()}
        # The channel is closed. If the process has not ended, it has lost its channel.
        if not (await asyncio.wait([self._ending], timeout=silence_s))[0]:
            self.failure = self.failure or CHANNEL_CLOSED
            self.was_silent = True
            self.kill()
            await self._ending
        if self.left_behind:
            names = ", ".join(self.left_behind)
            text = f"left processes behind, which are killed: {names}. {END_THEM}"
            yield {"event": "note", "text": text, "at": loop.time()}

    def _show_stacks(self) -> None:
        """Let the process print the stacks of its threads into its log."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, SHOW_STACKS)

    def _silence_note(self, silence_s: float) -> str:
        """Return the first note on a silent process, and let the process print its stacks."""
        # The stacks are printed long before the kill, after which `failure_line` names the place
        # too: on a busy machine minutes may pass until then, because waiting for a core is not
        # silence.
        self._log_bytes = log_bytes(self.spec.log)
        self._show_stacks()
        return (
            f"silent for {NOTICE_S:g} s; after supervision.silence_s = {silence_s:g} s it is "
            "killed, and started again if supervision.max_restarts allows it"
        )

    def _place_note(self) -> str:
        """Return a note on where the process is, from the stacks that it printed since the first
        note; "" if it is not in foreign code.
        """
        if log_bytes(self.spec.log) == self._log_bytes:  # it is stopped, and printed nothing
            return ""
        place = place_in_foreign_code(self.spec.log)
        cure = "" if self.spec.name == "learner" else OWN_PROCESS
        return place and f"still silent: it is at {place}, and does nothing else{cure}"

    def starved_s(self) -> float:
        """Return the seconds in which the main thread of the process was ready to run and had no
        core; 0 if the system does not record it.
        """
        try:
            running_and_waiting = Path(f"/proc/{self.pid}/schedstat").read_text()
        except OSError:
            return 0.0
        return int(running_and_waiting.split()[1]) / 1e9  # in nanoseconds

    def failure_line(self, code: int) -> str:
        """Return one line that says which process failed, and why.

        Args:
            code: Exit code of the process, negative for a signal.
        """
        how = end_in_words(code)
        if code == EXIT_DETERMINISTIC:
            how = "cannot go on"
        elif self.was_silent:
            how = "sent no heartbeat for too long and was killed"
        elif self.has_spoken and not self.failure and code >= 0 and code != EXIT_TERMINATED:
            cure = "" if self.spec.name == "learner" else OWN_PROCESS
            return f"{self.spec.name} {how}{UNREQUESTED}{cure}"
        # A process that was killed from outside printed no stacks; those in the log are older.
        has_stacks = self.was_silent or (code < 0 and code != -signal.SIGKILL)
        place = place_in_foreign_code(self.spec.log) if has_stacks else ""
        reason = self.failure or (f"it was at {place}" if place else self.last_line())
        return f"{self.spec.name} {how}" + (f": {reason}" if reason else f"; see {self.spec.log}")
