"""The messages between an actor and a worker process, over a private pair of sockets.

    actor                 worker process
                     <-   Ready
    Make             ->
                     <-   Made, or Failed
    Abandon          ->                      its Make is answered no more
                     <-   Abandoned

A message is msgpack of a tagged record. What a user's class returned was made plain before it is
sent, so nothing but text, numbers and lists crosses.
"""

from typing import Any

import msgspec

from mage_async.environments.hosted.user_object import Answered, Request
from mage_async.protocol.messages import Fields


class Ready(Fields):
    """The process takes calls."""


class Make(Fields):
    """Make a call."""

    number: int
    """Of the call; no two under way have the same."""
    play: int
    """Of the episode whose object is called."""
    name: str
    """Of the environment, as the configuration says it."""
    options: dict[str, Any]
    request: Request


class Made(Fields):
    """What a call returned."""

    number: int
    answered: Answered


class Failed(Fields):
    """A call raised, or returned what it may not."""

    number: int
    sentence: str
    is_for_room: bool = False
    """A `reset` found no room for another object."""


class Abandon(Fields):
    """Nobody waits for a call any more: a coroutine is cancelled, a thread left alone."""

    number: int


class Abandoned(Fields):
    """The answer to an Abandon: the process is not stuck."""

    number: int


Message = Ready | Make | Made | Failed | Abandon | Abandoned
packed = msgspec.msgpack.Encoder().encode
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
unpacked = _DECODER.decode
