"""`verifiers:TASKSET`: a taskset of the library `verifiers` as a class with `reset` and `step`. The
library runs the rollouts in a process of its own Python.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mage_async.environments.environment import Split
from mage_async.environments.loaders.loader import HELDOUT_SHARE, TURNS, declared, library
from mage_async.environments.options import check_whole
from mage_async.errors import ConfigError, EnvironmentFault
from mage_services.verifiers.process import CompletionRequest, Ended, Rollout, VerifiersProcess


@dataclass(frozen=True, slots=True)
class _Shared:
    """Data shared by all episodes."""

    python: str
    given: dict[str, Any]
    size: int
    starting: dict[asyncio.AbstractEventLoop, asyncio.Task[VerifiersProcess]] = field(
        default_factory=dict
    )
    """The process of each event loop."""

    async def process(self) -> VerifiersProcess:
        """Return the process of this event loop; start it if there is none."""
        loop = asyncio.get_running_loop()
        task = self.starting.get(loop)
        if task is None or (task.done() and (task.exception() or not task.result().is_alive)):
            task = loop.create_task(VerifiersProcess.start(self.python, self.given))
            self.starting[loop] = task
        # Shielded: other episodes wait for the same start.
        return await asyncio.shield(task)


class Episode:
    """One rollout."""

    shared: _Shared

    def __init__(self) -> None:
        self._process: VerifiersProcess | None = None
        self._key, self._rollout = "", Rollout()

    def members(self, split: Split) -> range:
        """Return indices of the taskset; the last fifth is held out."""
        num_train = self.shared.size - self.shared.size // HELDOUT_SHARE
        return range(num_train) if split == "train" else range(num_train, self.shared.size)

    async def reset(self, seed: int, task: int) -> str:
        """Start a rollout of the task; return its first request."""
        self._process = await self.shared.process()
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
        """Give the rollout up if it is not over."""
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
    check_whole(name, "turns", turns, 1, 100_000)
    check_whole(name, "size", size, HELDOUT_SHARE, 10_000_000)
    if not isinstance(python, str):
        raise ConfigError(f"environment {name!r}: `python` must be a path, got {python!r}")
    library("aiohttp", "verifiers")
    given = {"taskset": taskset, "size": size, "environment": dict(environment or {})}
    return declared(
        Episode, name, shared=_Shared(python, given, size), max_turns=turns, rules=rules
    )
