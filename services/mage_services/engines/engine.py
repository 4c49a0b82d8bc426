"""Define what engines, which sample completions, have in common, and make the configured engine.

This module does not import torch, because processes that call users' environments import it, and so
does the supervisor, which starts a second faster without torch.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from mage_async.completion import Completion, Prompt
from mage_async.config.schema import Config, Embedded
from mage_async.errors import RunError, TurnOverdue
from mage_services.processes.child_process import settle

if TYPE_CHECKING:
    from mage_async.inference.scheduler import Statistics
    from mage_async.inference.weight_fingerprint import AcceptedWeights


class Sampler(Protocol):
    """Sample completions: the part of an engine that a trial needs; protocol."""

    async def complete(self, prompt: Prompt) -> Completion:
        """Sample the completion of a prompt."""

    def release(self, context: str) -> None:
        """Forget a sequence, by the `context` of its prompts."""


async def complete_in_time(prompt: Prompt, engine: Sampler) -> Completion:
    """Sample a completion within the deadline of its prompt. Cancellation aborts it.

    Raises:
        TurnOverdue: it was not complete after `prompt.deadline_s` seconds, and was aborted.
    """
    try:
        async with asyncio.timeout(None if math.isinf(prompt.deadline_s) else prompt.deadline_s):
            return await engine.complete(prompt)
    except TimeoutError:
        raise TurnOverdue(f"a completion was not sampled within {prompt.deadline_s:g} s") from None


class Engine(ABC):
    """Sample completions, with weights that may change between any two tokens.

    An engine is used as an async context manager: its tasks run inside the `async with` block. If a
    task fails, every call that waits raises the failure, and the block ends with it.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []
        self._promises: set[asyncio.Future[Any]] = set()
        """Futures of the calls that wait for a result."""

    @abstractmethod
    async def complete(self, prompt: Prompt) -> Completion:
        """Sample the completion of a prompt.

        Cancellation aborts it; the keys and values of its sequence stay cached.

        Raises:
            ContextFull: the prompt leaves no room for a completion.
            RunError: the prompt cannot be served, or the engine does not run.
        """

    @abstractmethod
    async def load(self, version: int, path: Path) -> "AcceptedWeights | None":
        """Load weights; return when the next token will be sampled with them, or with newer ones.

        Cancellation leaves either the old weights or the new ones.

        Args:
            path: a file of weights, a manifest of weights that the learner sends on request
                (`process_group.py`), or a model directory.

        Returns:
            A report that the engine's fingerprint of the weights agrees with the learner's; None
            for a model directory, which has no fingerprint.

        Raises:
            WeightsRefused: the file holds other weights than the learner published.
            PolicyError: the file cannot be used; the old weights stay.
        """

    @abstractmethod
    async def load_past(self, version: int, path: Path) -> None:
        """Load a past version in addition to the current one, for prompts that name it as `rival`.

        It stays until `release_past` has been called as often as this method. Cancellation changes
        nothing.

        Raises:
            MageError: its weights cannot be used, or this engine serves one version only.
        """

    @abstractmethod
    def release_past(self, version: int) -> None:
        """End one use of a past version, which `load_past` began; return at once."""

    @abstractmethod
    def release(self, context: str) -> None:
        """Forget a sequence, by the `context` of its prompts; return at once."""

    @abstractmethod
    def trim(self) -> None:
        """Give memory that no sequence needs back to the system; return at once."""

    @abstractmethod
    def statistics(self) -> "Statistics":
        """Return the statistics up to now."""

    @abstractmethod
    async def describe(self) -> str:
        """Wait until the engine can sample, and describe model and memory in one line."""

    @abstractmethod
    def _work(self) -> list[Coroutine[Any, Any, None]]:
        """Return coroutines that run until the engine ends; each of them becomes a task."""

    def _check_runs(self) -> None:
        """Raise a RunError unless all tasks of the engine run."""
        if not self._tasks or any(task.done() for task in self._tasks):
            raise RunError("the engine does not run: use it inside its `async with`")

    def _promise(self) -> asyncio.Future[Any]:
        """Return a new future. If the engine ends before the future has a result, it gets an error.

        Raises:
            RunError: the engine does not run.
        """
        self._check_runs()
        future = asyncio.get_running_loop().create_future()
        self._promises.add(future)
        future.add_done_callback(self._promises.discard)
        return future

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._tasks = [self._group.create_task(each, name="engine") for each in self._work()]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        return self

    async def __aexit__(self, *failure: Any) -> None:
        """End the tasks. A failure of the block is raised as it is, that of a task in an exception
        group.
        """
        for task in self._tasks:
            task.cancel()
        # A failure of the block is not passed to the task group, which would wrap it in an
        # exception group. A cancellation is passed, because the task group cancels the block when
        # one of its tasks fails, and has to see that cancellation again.
        is_cancelled = isinstance(failure[1], asyncio.CancelledError)
        await self._group.__aexit__(*(failure if is_cancelled else (None,) * 3))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Fail every waiting call: the engine has ended."""
        error = None if task.cancelled() else task.exception()
        for future in self._promises:
            settle(future, error or RunError("the engine was closed"))


def make_engine(config: Config, directory: Path, name: str, base: Path | None = None) -> Engine:
    """Make the configured engine, which is not yet running.

    Args:
        directory: model directory; its weights are version 0.
        name: name of the process that uses the engine, for errors and seeds.
        base: model directory that the run began from, to whose weights published adapters (LoRA)
            are added; None: `directory`.

    Raises:
        ConfigError: no supported SGLang is installed, or `engine.server` sets an argument that
            follows from other keys.
        PolicyError: the engine cannot serve the model. The message has the reason and a remedy.
    """
    # Imported here because both modules import this one.
    from mage_services.engines.embedded import EmbeddedEngine
    from mage_services.engines.sglang.engine import SglangEngine

    if isinstance(config.engine, Embedded):
        return EmbeddedEngine(directory, config.engine, name, base)
    return SglangEngine(directory, config, name)
