"""A taskset of verifiers as a class with `reset` and `step`, both of which wait for its process."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mage_async.environments.environment import Split
from mage_async.environments.loaders.loaded import HELDOUT_SHARE, TURNS, declared, library
from mage_async.environments.options import check_whole
from mage_async.errors import ConfigError, EnvironmentFault
from mage_services.verifiers.process import VerifiersProcess
from mage_services.verifiers.rollout import Asked, Ended, Rollout


@dataclass(frozen=True, slots=True)
class _Made:
    """What all episodes share."""

    python: str
    given: dict[str, Any]
    size: int
    starting: dict[asyncio.AbstractEventLoop, asyncio.Task[VerifiersProcess]] = field(
        default_factory=dict
    )

    async def process(self) -> VerifiersProcess:
        """The process of this event loop, started where there is none."""
        loop = asyncio.get_running_loop()
        task = self.starting.get(loop)
        if task is None or (task.done() and (task.exception() or not task.result().is_alive)):
            task = loop.create_task(VerifiersProcess.start(self.python, self.given))
            self.starting[loop] = task
        return await asyncio.shield(task)


class Episode:
    """One rollout; see `load`."""

    made: _Made

    def __init__(self) -> None:
        self._process: VerifiersProcess | None = None
        self._key, self._rollout = "", Rollout()

    def members(self, split: Split) -> range:
        """Indices of the taskset; the last fifth is held out."""
        num_train = self.made.size - self.made.size // HELDOUT_SHARE
        return range(num_train) if split == "train" else range(num_train, self.made.size)

    async def reset(self, seed: int, task: int) -> str:
        """Begin a rollout of the task; what it asks first."""
        self._process = await self.made.process()
        self._key, self._rollout = self._process.begin(task)
        event = await self._rollout.next()
        if isinstance(event, Ended):
            raise EnvironmentFault("the rollout ended before it asked for a completion")
        return event.said

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Answer with a completion; what the rollout asks next, or what it earned."""
        self._rollout.reply(action)
        event = await self._rollout.next()
        if isinstance(event, Asked):
            return event.said, 0.0, False
        return f"The episode is over. Reward: {event.reward:g}", event.reward, True

    async def close(self) -> None:
        """Give the rollout up, where it is not over."""
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
    """A class of rollouts.

    Args:
        taskset: its id, as verifiers imports it.
        python: an interpreter that can import verifiers and the taskset.
        size: how many of its tasks are played, in both splits.
        turns: most completions of a rollout; one that asks for more earns nothing.
        rules: in words.
        environment: the configuration of verifiers' environment, such as `taskset` and the seats.

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
    return declared(Episode, name, made=_Made(python, given, size), max_turns=turns, rules=rules)
