"""One rollout that runs elsewhere: what it asks of the policy, and how it ended.

The rollout sends the whole conversation with every request. Our context only grows, so what it says
since our last answer is the next observation; a conversation that was rewritten is a fault.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from mage_async.errors import EnvironmentFault

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """The rollout waits for a completion."""

    said: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The rollout is over."""

    reward: float


class Rollout:
    """Between the endpoint that is asked and the play that answers."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Asked | Ended | EnvironmentFault] = asyncio.Queue()
        self._known: list[tuple[str, str]] = []
        """Roles and texts up to our last answer."""
        self._answer: asyncio.Future[str] | None = None
        self.is_over = False

    async def next(self) -> Asked | Ended:
        """What happens next.

        Raises:
            EnvironmentFault: the rollout failed.
        """
        event = await self._events.get()
        if isinstance(event, EnvironmentFault):
            raise event
        return event

    def reply(self, text: str) -> None:
        """Answer the request that the rollout waits for."""
        assert self._answer is not None, "nothing was asked"
        self._known.append(("assistant", text))
        self._answer.set_result(text)

    def end(self, event: Ended | EnvironmentFault) -> None:
        """The rollout is over; a request that still waits is given up."""
        self.is_over = True
        self._events.put_nowait(event)
        if self._answer is not None:
            self._answer.cancel()

    async def completion(self, messages: list[Message]) -> str:
        """The answer to a request; a request that is sent again is given the same.

        Raises:
            EnvironmentFault: nothing in our context could follow.
        """
        texts = [(str(message.get("role")), _text(message)) for message in messages]
        if self._answer is not None and texts == self._known[: len(texts)]:
            return await asyncio.shield(self._answer)
        if self._answer is not None and not self._answer.done():
            raise EnvironmentFault("the rollout asks for two completions at once")
        new = texts[len(self._known) :]
        if texts[: len(self._known)] != self._known or not new:
            raise EnvironmentFault("the rollout has rewritten its conversation")
        self._known = texts
        self._answer = asyncio.get_running_loop().create_future()
        self._events.put_nowait(Asked("\n\n".join(text for _, text in new)))
        return await asyncio.shield(self._answer)


def _text(message: Message) -> str:
    """The text of a message.

    Raises:
        EnvironmentFault: it has anything else in it, such as an image or a call of a tool.
    """
    content = message.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if message.get("tool_calls") or any(part.get("type") != "text" for part in parts):
        raise EnvironmentFault("the rollout's messages have more than text in them")
    return "\n".join(part["text"] for part in parts)
