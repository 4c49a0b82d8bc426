"""The process in which verifiers runs, and the endpoint that its rollouts ask."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any, Self

from mage_async.errors import ConfigError, EnvironmentFault
from mage_services.verifiers.endpoint import Endpoint
from mage_services.verifiers.rollout import Ended, Rollout

IDLE_S = 120.0
"""A process without a rollout for so long is ended; the next rollout starts another."""
MAX_LINE_BYTES = 1 << 26
"""An error of a taskset may quote whole answers."""
PROGRAM = Path(__file__).parent / "their_process" / "worker.py"


class VerifiersProcess:
    """Begins rollouts, and hears how they ended; made by `start`."""

    def __init__(self, endpoint: Endpoint, process: asyncio.subprocess.Process) -> None:
        self._endpoint, self._process = endpoint, process
        self._hearing: asyncio.Task[None] | None = None
        self._ending: asyncio.TimerHandle | None = None

    @classmethod
    async def start(cls, python: str, given: dict[str, Any]) -> Self:
        """Start, and wait until the taskset is loaded.

        Args:
            python: an interpreter that can import verifiers.
            given: what `worker.py` is told.

        Raises:
            ConfigError: there is no such interpreter, or the taskset cannot be loaded.
        """
        endpoint = Endpoint()
        await endpoint.start()
        path = os.pathsep.join((str(Path(python).parent), os.environ.get("PATH", os.defpath)))
        try:
            process = await asyncio.create_subprocess_exec(
                python,
                str(PROGRAM),
                json.dumps(given),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
                env=os.environ | {"PATH": path},
            )
        except OSError as error:
            await endpoint.close()
            raise ConfigError(f"verifiers: {python} cannot be run: {error.strerror}") from error
        made = cls(endpoint, process)
        first = await made._heard()
        if first is None or "refused" in first:
            await endpoint.close()
            said = first["refused"] if first else "its process ended; its log says why"
            raise ConfigError(f"verifiers: {said}")
        made._hearing = asyncio.create_task(made._hear(), name="verifiers")
        return made

    @property
    def is_alive(self) -> bool:
        """Whether the process can begin rollouts."""
        has_ended = self._process.returncode is not None or self._process.stdout.at_eof()
        return not has_ended and not self._process.stdin.is_closing()

    def begin(self, task: int) -> tuple[str, Rollout]:
        """Begin a rollout of a task; its key, and itself."""
        if self._ending is not None:
            self._ending.cancel()
        key, rollout = self._endpoint.open()
        self._tell({"run": key, "task": task, "base_url": self._endpoint.base_url(key)})
        return key, rollout

    def cancel(self, key: str) -> None:
        """Give up a rollout that is not over."""
        if self._endpoint.rollouts.pop(key, None) is not None and self.is_alive:
            self._tell({"cancel": key})
        self._rest()

    def _rest(self) -> None:
        """End in a while, where no rollout is open and none begins."""
        if self._ending is not None:
            self._ending.cancel()
        if not self._endpoint.rollouts:
            self._ending = asyncio.get_running_loop().call_later(IDLE_S, self._process.stdin.close)

    def _tell(self, line: dict[str, Any]) -> None:
        self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _heard(self) -> dict[str, Any] | None:
        line = await self._process.stdout.readline()
        return json.loads(line) if line else None

    async def _hear(self) -> None:
        """Take the ends of rollouts, until the process ends."""
        while (line := await self._heard()) is not None:
            rollout = self._endpoint.rollouts.pop(line["key"], None)
            if rollout is not None and not rollout.is_over:
                failed = line.get("failed")
                rollout.end(EnvironmentFault(failed) if failed else Ended(line["reward"]))
            self._rest()
        for rollout in self._endpoint.rollouts.values():
            rollout.end(EnvironmentFault("the process of verifiers has ended"))
        self._endpoint.rollouts.clear()
        await self._endpoint.close()
