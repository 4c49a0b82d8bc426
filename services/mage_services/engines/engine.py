"""Define the base class of engines, which sample an actor's completions, and choose an engine."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from hashlib import blake2s
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mage_async.completion import Completion, Prompt
from mage_async.config.schema import Config, Embedded
from mage_async.errors import RunError

# The supervisor imports this module, and starts a second earlier without torch.
if TYPE_CHECKING:
    from mage_async.inference.scheduler import Statistics
    from mage_async.inference.weight_fingerprint import AcceptedWeights


class Engine(ABC):
    """Samples completions, with weights that may change between any two tokens.

    An engine is used as an async context manager, inside which its tasks run. A failure of a task
    fails every waiting call and ends the block.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []
        self._promises: set[asyncio.Future[Any]] = set()
        """Results that callers wait for."""

    @abstractmethod
    async def complete(self, prompt: Prompt) -> Completion:
        """Sample a completion. Cancellation aborts it; the sequence keeps its keys and values."""

    @abstractmethod
    async def load(self, version: int, path: Path) -> "AcceptedWeights | None":
        """Load weights; return when the next token will be sampled with them, or with newer ones.

        Cancellation leaves either the old weights or the new ones.

        Returns:
            The receipt that agreed with the learner's; None for a model directory, which has none.

        Raises:
            WeightsRefused: they are not the weights that the learner published.
            PolicyError: the file cannot be used; the old weights stay.
        """

    @abstractmethod
    async def load_past(self, version: int, path: Path) -> None:
        """Keep a past version in memory, for prompts that name it as `rival`.

        It stays until `release_past`, which must be called as often. Cancellation changes nothing.

        Raises:
            MageError: its weights cannot be used, or this engine serves one version only.
        """

    @abstractmethod
    def release_past(self, version: int) -> None:
        """Release a past version; return at once."""

    @abstractmethod
    def release(self, context: str) -> None:
        """Forget a sequence; return at once."""

    @abstractmethod
    def statistics(self) -> "Statistics":
        """Return the statistics up to now."""

    @abstractmethod
    async def describe(self) -> str:
        """Wait until the engine serves, and describe model and memory in one line."""

    @abstractmethod
    def _work(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines that run until the engine ends, as a task each."""

    def _check_runs(self) -> None:
        if not self._tasks or any(task.done() for task in self._tasks):
            raise RunError("the engine does not run: use it inside its `async with`")

    def _promise(self) -> asyncio.Future[Any]:
        """Return a future, which fails if the engine ends before the future is settled.

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
        """Stop. A failure of the block is raised as it is, a failure of the engine as a group."""
        for task in self._tasks:
            task.cancel()
        # The task group would wrap a failure of the block in a group of exceptions, but has to know
        # of a cancellation.
        is_cancelled = isinstance(failure[1], asyncio.CancelledError)
        await self._group.__aexit__(*(failure if is_cancelled else (None,) * 3))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Fail every waiting call: the engine has ended."""
        error = None if task.cancelled() else task.exception()
        for future in self._promises:
            settle(future, error or RunError("the engine was closed"))


def settle(future: asyncio.Future[Any], error: BaseException | None, result: object = None) -> None:
    """Settle a future with a result or a failure, unless it is done."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def make_engine(config: Config, directory: Path, name: str, base: Path | None = None) -> Engine:
    """Make the configured engine, which is not yet running.

    Args:
        directory: model directory; its weights are version 0.
        name: name of the process that uses the engine, for errors and seeds.
        base: model directory that the run began from, below published adapters; None: `directory`.

    Raises:
        ConfigError: a library is not installed, or it has no such argument.
        PolicyError: the engine cannot serve the model; the text says what can.
    """
    # Imported here because both modules import this one.
    from mage_services.engines.embedded import EmbeddedEngine
    from mage_services.engines.sglang.engine import SglangEngine

    if isinstance(config.engine, Embedded):
        return EmbeddedEngine(directory, config.engine, name, base)
    # Not imported at the top: the supervisor imports this module, and needs no torch.
    import torch

    own = blake2s(f"{config.seed}/{name}".encode(), digest_size=4).digest()
    return SglangEngine(
        directory,
        config.engine,
        dtype=config.policy.dtype,
        seed=int.from_bytes(own, "little"),
        has_gpu=torch.cuda.is_available(),
        max_deaths=config.supervision.max_restarts,
        silence_s=config.supervision.silence_s,
        name=name,
    )
