"""Record all messages between a learner and its peers, as a proxy between their sockets.

Peers connect to the tap, which opens one connection to the learner for each, and passes all bytes
on. It reads ZMTP 3 (a greeting of 64 bytes, then frames), and so sees every message: what is
acknowledged, granted and published is recorded before it is passed on. `Mischief` damages messages
in both directions: sends them twice or later, cuts them short, flips a bit, or closes the
connection.
"""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mage_async.errors import WireError
from mage_async.protocol.codec import decode
from mage_async.protocol.messages import Acknowledge, GroupGrant, Publication, TrialResult, Welcome
from mage_services.processes.process import ticks

GREETING_BYTES = 64
"""Bytes with which each side of a ZMTP connection begins, before its first frame."""
MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a ZMTP frame: more frames of its message follow; its size has 8 bytes, not 1; it is a
command, no part of a message.
"""
LOOK_S = 0.05
"""Seconds between two looks whether the learner listens."""
DAMAGES = ("twice", "late", "short", "flipped", "cut")
"""What happens to a message: it is sent twice, after the next one, without the end of a frame, with
one bit flipped, or not at all because the connection is closed."""


@dataclass
class Mischief:
    """Damage a share of all messages but the first of a connection, which no peer sends again."""

    share: float
    source: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    _late: dict[int, list[bytes]] = field(default_factory=dict)
    """The message that is held back until the next one has passed, by connection and direction."""
    _seen: Counter[int] = field(default_factory=Counter)
    """Number of messages so far, by connection and direction."""

    def harm(self, line: int, message: list[bytes]) -> Iterator[list[bytes]]:
        """Yield what is passed on in place of a message.

        Args:
            line: Number of the connection and direction.

        Raises:
            ConnectionError: the connection is to be closed.
        """
        late = self._late.pop(line, None)
        self._seen[line] += 1
        is_harmed = self._seen[line] > 1 and self.source.random() < self.share
        damage = self.source.choice(DAMAGES) if is_harmed else ""
        self.counts[damage or "none"] += 1
        match damage:
            case "late" if late is None:
                self._late[line] = message
                return
            case "cut":
                raise ConnectionError("cut")
            case "short":
                yield _cut_short(message, self.source)
            case "flipped":
                yield _with_flipped_bit(message, self.source)
            case "twice":
                yield message
                yield message
            case _:
                yield message
        if late is not None:
            yield late


class Tap:
    """Listen at socket `here`, in a thread, and connect peers to the learner's socket `there`."""

    def __init__(self, here: Path, there: Path, mischief: Mischief | None = None) -> None:
        self.here, self.there, self.mischief = here, there, mischief
        self.acknowledged: set[tuple[int, int]] = set()
        """Grant and index of the trials that the learner acknowledged."""
        self.granted: set[tuple[int, int]] = set()
        """Number and epoch of the groups that the learner granted."""
        self.published: set[int] = set()
        self.sent: set[tuple[int, int]] = set()
        """Grant and index of the trials that peers sent."""
        self.num_messages = 0
        self._num_lines = 0
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    def _run(self, ready: threading.Event) -> None:
        """Run the event loop of the tap's thread."""

        async def serve() -> None:
            ready.set()
            server: asyncio.Server | None = None
            async for _ in ticks(LOOK_S):  # listen only while the learner does, so peers find it
                if server is None and _listens(self.there):
                    server = await asyncio.start_unix_server(self._join, self.here)
                elif server is not None and not _listens(self.there):
                    server.close()
                    server = None

        asyncio.run(serve())

    async def _join(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        """Connect a peer to the learner, or close its connection if there is no learner."""
        try:
            far, far_out = await asyncio.open_unix_connection(self.there)
        except OSError:
            near_out.close()
            return
        self._num_lines += 2
        lines = [
            asyncio.ensure_future(self._pump(self._num_lines, near, far_out)),
            asyncio.ensure_future(self._pump(self._num_lines + 1, far, near_out)),
        ]
        await asyncio.wait(lines, return_when=asyncio.FIRST_COMPLETED)
        for out in (near_out, far_out):
            out.close()
        for line in lines:
            line.cancel()
        await asyncio.wait(lines)

    async def _pump(
        self, line: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass on all that one side of a connection sends.

        Args:
            line: Number of the connection and direction.
        """
        with suppress(asyncio.IncompleteReadError, ConnectionError, BrokenPipeError):
            left = GREETING_BYTES
            while left and (greeting := await reader.read(left)):
                left -= len(greeting)
                writer.write(greeting)  # at once: each side waits for the other's first bytes
            async for frames in _messages(reader):
                if isinstance(frames, bytes):
                    writer.write(frames)
                    continue
                self._note(frames)
                self.num_messages += 1
                harmed = [frames] if self.mischief is None else self.mischief.harm(line, frames)
                for message in harmed:
                    writer.write(_bytes_of(message))
                await writer.drain()

    def _note(self, frames: list[bytes]) -> None:
        """Record what a message says; one that cannot be decoded says nothing."""
        with suppress(WireError):
            match message := decode(frames):
                case Acknowledge():
                    self.acknowledged.add((message.grant, message.trial))
                case GroupGrant():
                    self.granted.add((message.grant, message.epoch))
                case Publication() | Welcome():
                    self.published.add(message.version)
                case TrialResult():
                    self.sent.add((message.grant, message.trial.index))


def _listens(path: Path) -> bool:
    """Return whether a process listens at a socket, by the kernel's table, without connecting."""
    lines = Path("/proc/net/unix").read_text().split("\n")
    # Flag 00010000 marks a listening socket (__SO_ACCEPTCON).
    return any(line.endswith(f" {path}") and " 00010000 " in line for line in lines)


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[list[bytes] | bytes]:
    """Yield messages as lists of frames, and commands as bytes."""
    parts: list[bytes] = []
    while True:
        flags = (await reader.readexactly(1))[0]
        size = await reader.readexactly(8 if flags & LONG else 1)
        body = await reader.readexactly(int.from_bytes(size, "big"))
        if flags & COMMAND:
            yield bytes([flags]) + size + body
            continue
        parts.append(body)
        if not flags & MORE:
            yield parts
            parts = []


def _bytes_of(message: list[bytes]) -> bytes:
    """Return the bytes of a message's frames, as ZMTP writes them."""
    out = bytearray()
    for number, body in enumerate(message):
        more = MORE if number < len(message) - 1 else 0
        is_long = len(body) > 255
        out += bytes([more | (LONG if is_long else 0)])
        out += len(body).to_bytes(8 if is_long else 1, "big") + body
    return bytes(out)


def _cut_short(message: list[bytes], source: random.Random) -> list[bytes]:
    harmed = list(message)
    place = source.randrange(len(harmed))
    harmed[place] = harmed[place][: source.randint(0, max(0, len(harmed[place]) - 1))]
    return harmed


def _with_flipped_bit(message: list[bytes], source: random.Random) -> list[bytes]:
    harmed = list(message)
    place = source.choice([n for n, body in enumerate(harmed) if body])
    bit = source.randrange(8 * len(harmed[place]))
    body = bytearray(harmed[place])
    body[bit // 8] ^= 1 << bit % 8
    harmed[place] = bytes(body)
    return harmed
