"""The protocol of an engine, which samples an actor's completions, and the choice of one."""

from hashlib import blake2s
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from mage_async.completion import Completion, Prompt
from mage_async.config.schema import Config, Embedded
from mage_async.inference.scheduler import Statistics
from mage_async.inference.weight_fingerprint import AcceptedWeights
from mage_services.engines.embedded import EmbeddedEngine
from mage_services.engines.sglang.engine import SglangEngine


class Engine(Protocol):
    """Samples completions, with weights that may change between any two tokens.

    An engine is used as an async context manager. A failure of the engine fails every waiting call
    and ends the block.
    """

    async def complete(self, prompt: Prompt) -> Completion:
        """Sample a completion. Cancellation aborts it; the sequence keeps its keys and values."""
        ...

    async def load(self, version: int, path: Path) -> AcceptedWeights | None:
        """Load weights; return when the next token will be sampled with them.

        Cancellation leaves either the old weights or the new ones.

        Returns:
            The receipt that agreed with the learner's; None for a model directory, which has none.

        Raises:
            WeightsRefused: they are not the weights that the learner published.
        """
        ...

    async def hold(self, version: int, path: Path) -> None:
        """Keep a past version in memory until `let_go`, for prompts that name it as `rival`.

        A version that is held twice must be let go twice. Cancellation changes nothing.

        Raises:
            MageError: its weights cannot be used, or this engine serves one version only.
        """
        ...

    def let_go(self, version: int) -> None:
        """Release a held version; return at once."""
        ...

    def release(self, context: str) -> None:
        """Forget a sequence; return at once."""
        ...

    def statistics(self) -> Statistics:
        """Return the statistics up to now."""
        ...

    async def describe(self) -> str:
        """Wait until the engine serves, and describe model and memory in one line."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def make_engine(config: Config, directory: Path, name: str) -> Engine:
    """Make the configured engine, which is not yet running.

    Args:
        directory: model directory; its weights are version 0.
        name: name of the process that uses the engine, for errors and seeds.

    Raises:
        ConfigError: a library is not installed, or it has no such argument.
        PolicyError: the engine cannot serve the model; the text says what can.
    """
    if isinstance(config.engine, Embedded):
        return EmbeddedEngine(directory, config.engine, name)
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
