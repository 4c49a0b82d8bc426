"""One child process, as the supervisor sees it: started, listened to, ended.

A child lives in a session of its own (Ctrl-C reaches the supervisor alone) and inherits the write
end of a pipe. A child has ended when the pipe closes; a child that stays silent is killed,
which closes the pipe too.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mage_services.processes.process import EXIT_DETERMINISTIC

FIRST_WORD_S = 180.0
"""Imports take a while on a busy machine; after a child's first line, `silence_s` counts."""
NOTICE_S = 4.0
"""A child beats every second; it is said to be silent after so long, long before it is killed."""
STALL_S = 1.0
"""A wait that took so much longer than it was to: it was the supervisor that did not run."""
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Spec:
    """What to run, and under which name."""

    name: str
    module: str
    arguments: tuple[str, ...]
    log: Path
    threads: int
    devices: tuple[int, ...] = ()
    """The only GPUs it sees; (): all there are."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of its environment, beside those of every child."""
    asks: bool = False
    """It asks for files of the run, and reads the answers on its standard input."""


class Running(Protocol):
    """A process of a run as the supervisor sees it, on whatever machine; `Child` explains it."""

    spec: Spec
    node: str
    """Where it runs; "" is this machine."""
    was_silent: bool

    def events(self, silence_s: float) -> AsyncIterator[dict[str, Any]]: ...

    async def wait(self) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def epitaph(self, code: int) -> str: ...


class Child:
    """A running process of this machine, and its status lines."""

    node = ""

    def __init__(
        self,
        spec: Spec,
        process: asyncio.subprocess.Process,
        pipe: asyncio.StreamReader,
        transport: asyncio.ReadTransport,
    ) -> None:
        self.spec = spec
        self._process, self._pipe, self._transport = process, pipe, transport
        self.failure = ""
        """The reason it gave, if it failed with one."""
        self.was_silent = False

    @staticmethod
    async def start(spec: Spec, environment: dict[str, str]) -> "Child":
        """Start it. Cancellation in here leaves at most a child that ends with the supervisor."""
        reading, writing = os.pipe()  # not inheritable: a sibling would hold it open, too
        try:
            with spec.log.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    spec.module,
                    *spec.arguments,
                    stdin=asyncio.subprocess.PIPE if spec.asks else asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(writing,),
                    start_new_session=True,
                    env=environment | _own(spec, writing),
                )
        finally:
            os.close(writing)
        pipe = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(pipe), os.fdopen(reading, "rb", buffering=0)
        )
        return Child(spec, process, pipe, transport)

    @property
    def pid(self) -> int:
        """Process id; the process leads a process group of its own."""
        return self._process.pid

    async def events(self, silence_s: float) -> AsyncIterator[dict[str, Any]]:
        """Its status lines until it ends; killed when it has said nothing for `silence_s`, which is
        noted after `NOTICE_S`. Time in which this process itself did not run does not count, nor
        does time in which the child was ready to run and had no processor.

        Cancellation leaves the child running: end it with `terminate` or `kill`.
        """
        loop = asyncio.get_running_loop()
        allowed, silent_s, is_noted = FIRST_WORD_S, 0.0, False
        while True:
            began, starved_s = loop.time(), self.starved_s()
            patience = min(NOTICE_S, max(allowed - silent_s, allowed / 10))
            try:
                async with asyncio.timeout(patience):
                    line = await self._pipe.readline()
            except TimeoutError:
                if loop.time() - began > patience + STALL_S:
                    continue  # what it said meanwhile has not been read
                silent_s += max(0.0, patience - (self.starved_s() - starved_s))
                if silent_s >= allowed:
                    self.was_silent = True
                    self.kill()
                    return
                if patience == NOTICE_S and allowed == silence_s and not is_noted:
                    is_noted = True
                    yield {"event": "note", "text": f"silent for {NOTICE_S:g} s", "at": loop.time()}
                continue
            silent_s, is_noted = 0.0, False
            if not line.endswith(b"\n"):  # nothing, or what a killed process left of a line
                return
            allowed = silence_s
            event = json.loads(line)
            if event["event"] == "failed":
                self.failure = event["reason"]
            yield event | {"at": loop.time()}

    def starved_s(self) -> float:
        """Seconds of the child's life in which its main thread could have run and had no processor;
        0 where the system does not say.
        """
        try:
            running_and_waiting = Path(f"/proc/{self.pid}/schedstat").read_text()
        except OSError:
            return 0.0
        return int(running_and_waiting.split()[1]) / 1e9

    async def wait(self) -> int:
        """Its exit code; negative for a signal. Cancellation leaves the child as it is."""
        code = await self._process.wait()
        self._transport.close()  # the end of the pipe does not close it
        return code

    def answer(self, document: dict[str, str]) -> None:
        """Answer what a child asked that does; one that has ended does not read it."""
        assert self._process.stdin is not None, f"{self.spec.name} asks for nothing"
        self._process.stdin.write(json.dumps(document).encode() + b"\n")

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, with whatever it started."""
        self._signal(signal.SIGKILL)

    def epitaph(self, code: int) -> str:
        """One line: which process failed and why."""
        if code == EXIT_DETERMINISTIC:
            how = "cannot go on"
        elif self.was_silent:
            how = "said nothing for too long and was killed"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        reason = self.failure or _last_line(self.spec.log)
        return f"{self.spec.name} {how}" + (f": {reason}" if reason else f"; see {self.spec.log}")

    def _signal(self, number: int) -> None:
        """Signal its whole process group; one that has ended is no error."""
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return


def _own(spec: Spec, pipe: int) -> dict[str, str]:
    numbers = ",".join(map(str, spec.devices))
    devices = {"CUDA_VISIBLE_DEVICES": numbers} if spec.devices else {}
    return {**devices, **spec.variables} | {
        "MAGE_STATUS_FD": str(pipe),
        "MAGE_PARENT": str(os.getpid()),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(spec.threads),
    }


def _last_line(log: Path) -> str:
    lines: Sequence[str] = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else ""
