"""Load `verifiers:TASKSET`: a taskset of the library `verifiers` as an environment.

A rollout of the library is a program that calls the policy over HTTP (`mage_services/gateway/`).
Rollouts run in a child process with a Python interpreter of its own, in which verifiers is
installed.
"""

import asyncio
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from mage_async.environments.agent import AgentProgram
from mage_async.environments.environment import HELDOUT_EVERY, check_whole
from mage_async.environments.loaders.loader import TURNS, NumberedTasks, episode_class
from mage_async.errors import ConfigError, EnvironmentFault, WireError
from mage_services.processes.child_process import ChildProcess, settle, waiting_notice

IDLE_S = 120.0
"""Seconds without a rollout after which the process is ended; the next rollout starts another."""
PROGRAM = Path(__file__).parent / "child" / "rollout_worker.py"
"""Program that the other interpreter runs."""


# The child tells the two requests apart by the field `cancel`: messages are JSON without a tag.


class BeginRollout(msgspec.Struct, frozen=True):
    """Ask the process to begin a rollout."""

    run: str
    """Key of the rollout."""
    task: int
    """Index in the taskset."""
    base_url: str
    """Address at which the program calls the policy."""


class CancelRollout(msgspec.Struct, frozen=True):
    """Ask the process to cancel a rollout."""

    cancel: str
    """Key of the rollout."""


class Report(msgspec.Struct, frozen=True):
    """Say that the process is ready, that it cannot load the taskset, or that a rollout ended."""

    ready: bool = False
    refused: str = ""
    """Why the taskset cannot be loaded; empty if it can."""
    key: str = ""
    """Key of the rollout that has ended."""
    reward: float = 0.0
    failed: str = ""
    """Why the rollout has no reward; empty if it has one."""


class VerifiersProcess:
    """Start rollouts, and receive their results; created by `start`."""

    def __init__(self, process: ChildProcess[Report]) -> None:
        self._process = process
        self._rollouts: dict[str, asyncio.Future[float]] = {}
        """Future reward of each rollout that has not ended, by its key."""
        self._listening = asyncio.create_task(self._listen(), name="verifiers")
        self._ending: asyncio.TimerHandle | None = None
        """Timer that ends the process while no rollout is open."""

    @classmethod
    async def start(cls, python: str, job: dict[str, Any]) -> Self:
        """Start the process, and wait until the taskset is loaded.

        Args:
            python: an interpreter that can import verifiers.
            job: arguments of `child/rollout_worker.py`.

        Raises:
            ConfigError: there is no such interpreter, or the taskset cannot be loaded.
        """
        path = os.pathsep.join((str(Path(python).parent), os.environ.get("PATH", os.defpath)))
        try:
            # The messages are JSON because the other interpreter need not have msgspec.
            process = await ChildProcess[Report].start(
                [python, str(PROGRAM), json.dumps(job)],
                Report,
                variables={"PATH": path},
                codec=msgspec.json,
            )
        except OSError as error:
            raise ConfigError(f"verifiers: {python} cannot be run: {error.strerror}") from error
        with waiting_notice(f"verifiers to load {job['taskset']}"):
            first = await process.receive()
        if first is None or first.refused:
            process.kill()
            await process.wait()
            reason = first.refused if first else "its process ended; its log says why"
            raise ConfigError(f"verifiers: {reason}")
        return cls(process)

    @property
    def is_alive(self) -> bool:
        """Whether the process can begin rollouts."""
        return self._process.is_running and not self._process.channel.is_closing

    def end(self) -> None:
        """End the process."""
        self._process.channel.close()

    async def play(self, task: int, base_url: str) -> float:
        """Run a rollout of a task; return its reward. Cancellation cancels the rollout.

        Args:
            base_url: address of the policy.

        Raises:
            EnvironmentFault: the rollout failed, or the process ended.
        """
        if self._ending is not None:
            self._ending.cancel()
        key = secrets.token_hex(8)
        reward: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._rollouts[key] = reward
        try:
            self._process.send(BeginRollout(key, task, base_url))
            return await reward
        finally:
            del self._rollouts[key]
            if reward.cancelled() and self.is_alive:
                self._process.send(CancelRollout(key))
            self._end_if_idle()

    def _end_if_idle(self) -> None:
        """End the process after `IDLE_S` if no rollout is open and none begins until then."""
        if self._ending is not None:
            self._ending.cancel()
        if not self._rollouts:
            loop = asyncio.get_running_loop()
            self._ending = loop.call_later(IDLE_S, self.end)

    async def _listen(self) -> None:
        """Resolve the futures of rollouts as they end, until the process ends. If the process sends
        a message that cannot be read, end it: its later messages could not be trusted.
        """
        reason = "the process of verifiers has ended"
        try:
            async for report in self._process.channel.messages():
                if (reward := self._rollouts.get(report.key)) is not None:
                    fault = EnvironmentFault(report.failed) if report.failed else None
                    settle(reward, fault, report.reward)
        except WireError as error:
            reason = f"the process of verifiers sent a message that cannot be read: {error}"
            self.end()
        for reward in self._rollouts.values():
            settle(reward, EnvironmentFault(reason))
        await self._process.wait()


class _Processes:
    """Keep one process of verifiers for each event loop, started when it is first needed.

    A `VerifiersProcess` has tasks and futures, which belong to the event loop that created them.

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
        # Shielded, because other episodes wait for the same start.
        return await asyncio.shield(task)


class Program(NumberedTasks, AgentProgram):
    """Play rollouts of a taskset, one per episode; a task is an index of the taskset."""

    processes: _Processes

    async def check(self) -> None:
        """Check that the taskset can be loaded, in a process that is ended afterwards."""
        (await self.processes.here()).end()

    async def run(self, task: int, episode: int, seed: int, base_url: str, api_key: str) -> float:
        """Run a rollout of the task; return its reward.

        The library takes no seed: episodes of a task differ by the policy's samples alone, so
        `episode` and `seed` are not used.

        The rollout calls the policy at `base_url`, which has the key in it, so `api_key` is not
        needed.
        """
        process = await self.processes.here()
        return await process.play(task, base_url)


def load(
    taskset: str,
    /,
    *,
    python: str,
    size: int,
    turns: int = TURNS,
    environment: Mapping[str, Any] | None = None,
) -> type:
    """Return an environment class whose episodes are rollouts of a taskset.

    Args:
        taskset: id of the taskset, as verifiers imports it.
        python: an interpreter that can import verifiers and the taskset.
        size: number of tasks of the taskset that are played, in both splits together.
        turns: largest number of completions of a rollout; a rollout that requests more fails.
        environment: verifiers' own configuration: `taskset` holds the taskset's settings, and a key
            with the name of a seat (an agent of the environment) holds the settings of that seat.

    Raises:
        ConfigError: an option is out of its range.
    """
    name = f"verifiers:{taskset}"
    check_whole(name, "size", size, HELDOUT_EVERY, 10_000_000)
    if not isinstance(python, str):
        raise ConfigError(f"environment {name!r}: `python` must be a path, got {python!r}")
    job = {"taskset": taskset, "size": size, "environment": dict(environment or {})}
    processes = _Processes(python, job)
    return episode_class(Program, name, turns, processes=processes, num_tasks=size)
