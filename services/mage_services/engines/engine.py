"""The protocol of an engine, which serves the policy of an actor."""

from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from mage_async.completion import Completion, Prompt
from mage_async.inference.receipts.receipt import Accepted
from mage_async.inference.statistics import Statistics


class Engine(Protocol):
    """Draws completions, with weights that can change between any two tokens.

    Used as an async context manager; a failure of the engine fails every waiting call, and ends
    the block.
    """

    async def complete(self, prompt: Prompt) -> Completion:
        """Draw a completion. Cancellation aborts it; the context keeps what was computed."""
        ...

    async def load(self, version: int, path: Path) -> Accepted | None:
        """Draw with other weights; returns when the next token will be drawn by them.

        Cancellation leaves the old weights or the new ones, whole.

        Returns:
            The receipt that agreed with the learner's; None of a model directory, which has none.

        Raises:
            WeightsRefused: they are not what the learner published.
        """
        ...

    async def hold(self, version: int, path: Path) -> None:
        """Hold a version beside the current one until `let_go`: prompts whose `rival` it is are
        drawn by it. Held twice, it is to be let go twice.

        Cancellation leaves it as it was.

        Raises:
            MageError: its weights cannot be used, or this engine holds one version only.
        """
        ...

    def let_go(self, version: int) -> None:
        """Release a held version; returns at once."""
        ...

    def release(self, context: str) -> None:
        """Forget a context; returns at once."""
        ...

    def statistics(self) -> Statistics:
        """A snapshot of what was done so far."""
        ...

    async def describe(self) -> str:
        """What is served and what memory it takes, in one line, once it is served.

        Cancellation leaves nothing.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
