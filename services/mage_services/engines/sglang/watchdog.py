"""Start SGLang's process, restart it after its death, and kill it when it hangs.

task     waits for                     then
run      the process's next message    passes it on; after the process's end, starts another
watch    the clock                     kills a process that has not answered in time

A process has `START_S` to start, `engine.turn_deadline_s` to load weights, and
`supervision.silence_s` to answer the abort of a turn.
"""

import asyncio
import time
from collections.abc import Callable

from mage_async.errors import RunError
from mage_services.engines.sglang.messages import Failed, Message, Serving, Start
from mage_services.processes.child_process import ChildProcess, end_in_words, module_command
from mage_services.processes.process import ticks

MODULE = "mage_services.engines.sglang.server"
START_S = 600.0
"""Time limit from the process's start to `Serving`: imports, the model, graphs."""
WATCH_S = 1.0
"""Interval between two looks at the clock."""
BACK_OFF_S = 0.5
"""Pause before the second restart in a row; doubled for each further one, up to a minute."""
START_OR_LOAD = "start or load"
"""Name of the answer to a start or a load. While it is awaited, the deadlines of other answers do
not count, because the process answers nothing else."""


async def start_process(threads: int) -> ChildProcess[Message]:
    """Start SGLang's process. If cancelled, a process that was started ends with this one."""
    variables = {"OMP_NUM_THREADS": str(threads)}
    return await ChildProcess.start(module_command(MODULE), Message, variables=variables)


class EngineWatchdog:
    """Run SGLang's process, and another one after each death.

    Args:
        start: returns the message with which a process begins, by the process's number, from 0.
        on_message: called with each message of the process, except `Failed`.
        on_death: called when the process has ended or is killed; all that it held is lost.
        threads: number of CPU threads of the process.
        max_deaths: largest number of deaths in a row, without `reset_deaths` between them, after
            which another process is started; at one more `run` raises.
    """

    def __init__(
        self,
        start: Callable[[int], Start],
        on_message: Callable[[Message], None],
        on_death: Callable[[], None],
        *,
        threads: int,
        max_deaths: int,
    ) -> None:
        self._start, self._on_message, self._on_death = start, on_message, on_death
        self._threads, self._max_deaths = threads, max_deaths
        self._child: ChildProcess[Message] | None = None
        self._has_served = False
        """Whether any process has sent `Serving`; if the first one dies before, none is started
        after it."""
        self._num_deaths = 0
        """Number of deaths in a row."""
        self._due: dict[str, float] = {}
        """Deadline of each expected answer, by its name."""
        self._missed = ""
        """Why `watch` has killed the process; "" if it has not."""
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        """Process id; None while there is no process."""
        return None if self._child is None else self._child.pid

    def send(self, message: Message) -> None:
        """Send a message to the process; without a process it is discarded."""
        if self._child is not None:
            self._child.send(message)

    def expect(self, name: str, seconds: float) -> None:
        """Set a deadline for an answer of the process.

        Args:
            name: the caller's name for the answer, with which it calls `answered`.
        """
        self._due[name] = time.monotonic() + seconds

    def answered(self, name: str) -> None:
        """Remove the deadline of an answer."""
        self._due.pop(name, None)

    def reset_deaths(self) -> None:
        """Forget the deaths so far: the process has completed something."""
        self._num_deaths = 0

    async def run(self) -> None:
        """Keep a process running. Cancellation kills it.

        Raises:
            RunError: the first process ended before it served, or more than `max_deaths` processes
                ended in a row.
        """
        while True:
            reason = await self._run_once()
            self._num_deaths += 1
            if self._num_deaths > self._max_deaths or not self._has_served:
                raise RunError(f"SGLang's process {reason}; this process's log has its output")
            self.num_restarts += 1
            if self._num_deaths > 1:
                await asyncio.sleep(min(60.0, BACK_OFF_S * 2 ** (self._num_deaths - 2)))

    async def watch(self) -> None:
        """Kill a process that misses a deadline. Cancellation only ends the watch."""
        async for _ in ticks(WATCH_S):
            now, start_or_load = time.monotonic(), self._due.get(START_OR_LOAD)
            deadlines = self._due.values() if start_or_load is None else [start_or_load]
            if self._child is not None and any(deadline < now for deadline in deadlines):
                what = "a request" if start_or_load is None else "a start or a load of weights"
                self._missed = f"did not answer {what} in time, and was killed"
                self._child.kill()

    async def _run_once(self) -> str:
        """Run one process from its start to its end; return why it ended."""
        self._missed = ""
        child = self._child = await start_process(self._threads)
        self.expect(START_OR_LOAD, START_S)
        try:
            child.send(self._start(self.num_restarts))
            reason = await self._receive(child)
        finally:
            child.kill()
            self._child = None
            self._due.clear()
            self._on_death()
            ended = end_in_words(await child.wait())
        return reason or self._missed or ended

    async def _receive(self, child: ChildProcess[Message]) -> str:
        """Pass on the process's messages until its end; return the reason that it gave, if any."""
        reason = ""
        while (message := await child.receive()) is not None:
            match message:
                case Failed():
                    reason = f"failed: {message.reason}"
                    continue
                case Serving():
                    self._has_served = True
                    self.answered(START_OR_LOAD)
            self._on_message(message)
        return reason
