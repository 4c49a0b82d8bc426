"""The messages between an actor and the process of its SGLang, over a private pair of sockets.

    actor                 engine's process
    Start            ->
                     <-   Serving, or Failed
    Draw             ->
                     <-   Began, where it was asked for, with the first token
                     <-   Drew, or Refused
    Abort            ->                      its Draw ends with Drew
    Prepare          ->
                     <-   Prepared                while tokens are drawn
    Load             ->
                     <-   Loaded

A message is msgpack of a tagged record; arrays are raw bytes in it.
"""

import asyncio
from typing import Any

import msgspec

from mage_async.inference.receipts.receipt import Accepted
from mage_async.protocol.messages import Fields
from mage_services.processes import paired_process


class Start(Fields):
    """What to serve, and how."""

    directory: str
    arguments: dict[str, Any]
    """For SGLang's `ServerArgs`, by its names."""
    version: int
    """Version of the weights in the directory."""


class Serving(Fields):
    """The engine takes requests."""

    facts: str
    """What serves, in one line."""


class Failed(Fields):
    """The engine cannot be started, or has broken; the process ends."""

    reason: str


class Draw(Fields):
    """One request."""

    rid: str
    """32 hex digits: SGLang aborts every request whose id begins with a given one."""
    tokens: bytes
    """int32 [T]"""
    key: str
    """Cached keys are found under this name only."""
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    """0: no limit."""
    stop_tokens: tuple[int, ...]
    seed: int
    says_when_it_began: bool = False


class Began(Fields):
    """The request's prompt is computed, so others can read its keys."""

    rid: str


class Drew(Fields):
    """A request has ended.

    Shapes: `n` tokens drawn.
    """

    rid: str
    tokens: bytes
    """int32 [n]"""
    logprobs: bytes
    """float32 [n]"""
    spans: tuple[tuple[int, int], ...]
    """(start, version), in order."""
    provenance: str
    num_cached: int
    is_aborted: bool


class Refused(Fields):
    """A request cannot be served, now or ever."""

    rid: str
    reason: str


class Abort(Fields):
    """End a request with what it has drawn."""

    rid: str


class Prepare(Fields):
    """Do all of a Load that can be done while tokens are drawn; the Load follows."""

    version: int
    path: str


class Prepared(Fields):
    """The answer to a Prepare; what was wrong, if anything, the Load's answer says."""


class Load(Fields):
    """Draw with other weights from here on."""

    version: int
    path: str
    interrupts: bool
    """Abort every request first; else they are paused, and go on over the keys they have."""


class Loaded(Fields):
    """The answer to a Load."""

    version: int
    """Version of the weights that draw now."""
    error: str = ""
    """Why these are not the ones asked for."""
    stall_s: float = 0.0
    """From the pause to its end: nothing was drawn."""
    receipt: Accepted | None = None
    """The receipt of these weights; None of a model directory, or where there is an error."""
    is_refused: bool = False
    """Whether the error is of the receipt, or of what could not be read: twice."""


Message = (
    Start
    | Serving
    | Failed
    | Draw
    | Began
    | Drew
    | Refused
    | Abort
    | Prepare
    | Prepared
    | Load
    | Loaded
)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
packed = _ENCODER.encode
unpacked = _DECODER.decode


def write(writer: asyncio.StreamWriter, message: Message) -> None:
    """Send a message; it waits in memory while the other side does not read."""
    paired_process.write(writer, packed(message))


async def read(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None where the other side has ended, be it within a message.

    Cancellation may lose the message under way, so it is for ending only.
    """
    body = await paired_process.read(reader)
    return None if body is None else unpacked(body)
