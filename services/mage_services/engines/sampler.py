"""Define `Sampler`, the part of an engine that a trial needs, and sample within a deadline.

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
        """Sample the completion of a prompt."""
        ...

    def release(self, context: str) -> None:
        """Forget a sequence, by the `context` of its prompts."""
        ...


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
