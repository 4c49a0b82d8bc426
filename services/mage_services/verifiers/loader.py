"""`verifiers:TASKSET`: a taskset of the library `verifiers` as a class with `reset` and `step`. The
library runs the rollouts in a process of its own Python.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from mage_async.environments.loaders.loader import (
    HELDOUT_SHARE,
    TURNS,
    NumberedTasks,
    declared,
    library,
)
from mage_async.environments.options import check_whole
from mage_async.errors import ConfigError, EnvironmentFault
from mage_services.verifiers.process import CompletionRequest, Ended, Rollout, VerifiersProcess


class _Processes:
    """The process of verifiers for each event loop, started when it is needed.

    Args:
        python: an interpreter that can import verifiers.
        job: arguments of `child/rollout_worker.py`.
    """

    def __init__(self, python: str, job: dict[str, Any]) -> None:
        self._python, self._job = python, job
        self._started: dict[asyncio.AbstractEventLoop, asyncio.Task[VerifiersProcess]] = {}

    async def here(self) -> VerifiersProcess:
        """Return the process of this event loop; start it if there is none."""
        loop = asyncio.get_running_loop()
        task = self._started.get(loop)
        if task is None or (task.done() and (task.exception() or not task.result().is_alive)):
            task = loop.create_task(VerifiersProcess.start(self._python, self._job))
            self._started[loop] = task
        # Shielded: other episodes wait for the same start.
        return await asyncio.shield(task)


class Episode(NumberedTasks):
    """One rollout; a task is an index of the taskset."""

    processes: _Processes

    def __init__(self) -> None:
        self._process: VerifiersProcess | None = None
        self._key, self._rollout = "", Rollout()

    async def reset(self, seed: int, task: int) -> str:
        """Start a rollout of the task; return its first request."""
        self._process = await self.processes.here()
        self._key, self._rollout = self._process.begin(task)
        event = await self._rollout.next()
        if isinstance(event, Ended):
            raise EnvironmentFault("the rollout ended before it asked for a completion")
        return event.text

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Answer with a completion; return the rollout's next request, or its reward."""
        self._rollout.reply(action)
        event = await self._rollout.next()
        if isinstance(event, CompletionRequest):
            return event.text, 0.0, False
        return f"The episode is over. Reward: {event.reward:g}", event.reward, True

    async def close(self) -> None:
        """Cancel the rollout if it is not over."""
        if self._process is not None:
            self._process.cancel(self._key)


def load(
    taskset: str,
    /,
    *,
    python: str,
    size: int,
    turns: int = TURNS,
    rules: str = "You are given a task, and maybe asked again. Your answer is all that is read.",
    environment: Mapping[str, Any] | None = None,
) -> type:
    """Return a class of rollouts.

    Args:
        taskset: its id, as verifiers imports it.
        python: an interpreter that can import verifiers and the taskset.
        size: number of its tasks that are played, in both splits.
        turns: largest number of completions of a rollout; a rollout that requests more earns
            nothing.
        rules: in words.
        environment: configuration of verifiers' environment, such as `taskset` and the seats.

    Raises:
        ConfigError: an option is out of its range, or aiohttp is missing.
    """
    name = f"verifiers:{taskset}"
    check_whole(name, "size", size, HELDOUT_SHARE, 10_000_000)
    if not isinstance(python, str):
        raise ConfigError(f"environment {name!r}: `python` must be a path, got {python!r}")
    library("aiohttp", "verifiers")
    job = {"taskset": taskset, "size": size, "environment": dict(environment or {})}
    processes = _Processes(python, job)
    return declared(Episode, name, turns, processes=processes, num_tasks=size, rules=rules)
