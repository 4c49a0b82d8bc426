"""Sample one completion within its deadline; the part of an engine that a trial needs.

This module imports no torch, because processes that call users' environments load it too.
"""

import asyncio
import math
from typing import Protocol

from mage_async.completion import Completion, Prompt
from mage_async.errors import TurnOverdue


class Sampler(Protocol):
    """The part of an engine that a trial needs."""

    async def complete(self, prompt: Prompt) -> Completion:
        """Sample a completion."""
        ...

    def release(self, context: str) -> None:
        """Forget a sequence."""
        ...


async def complete_in_time(prompt: Prompt, engine: Sampler) -> Completion:
    """Sample a completion within the deadline of its prompt. Cancellation aborts it.

    Raises:
        TurnOverdue: it was not sampled by then, and was aborted.
    """
    try:
        async with asyncio.timeout(None if math.isinf(prompt.deadline_s) else prompt.deadline_s):
            return await engine.complete(prompt)
    except TimeoutError:
        raise TurnOverdue(f"a turn was not drawn within {prompt.deadline_s:g} s") from None
