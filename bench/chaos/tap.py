"""A tap on the sockets of a run under attack: what the learner told its peers, seen from outside.

Peers connect to the tap, the tap to the learner, a connection for a connection, and bytes go
through as they are. It reads ZMTP 3 (a greeting of 64 bytes, then frames), so it knows every
message: what was acknowledged, granted and published is written down before it goes on. With
`Mischief` it also harms messages, either way: sends them twice, in another order, cut short, with
a bit flipped, or ends the connection.
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
MORE, LONG, COMMAND = 1, 2, 4
LOOK_S = 0.05
WAYS = ("twice", "late", "short", "flipped", "cut")


@dataclass
class Mischief:
    """Harms a share of all messages but the first of a connection, which no peer repeats."""

    share: float
    source: random.Random
    done: Counter[str] = field(default_factory=Counter)
    _late: dict[int, list[bytes]] = field(default_factory=dict)
    _seen: Counter[int] = field(default_factory=Counter)

    def harm(self, line: int, message: list[bytes]) -> Iterator[list[bytes]]:
        """What goes on instead of a message of one line; the line ends where it raises.

        Raises: ConnectionError
        """
        late = self._late.pop(line, None)
        self._seen[line] += 1
        is_harmed = self._seen[line] > 1 and self.source.random() < self.share
        way = self.source.choice(WAYS) if is_harmed else ""
        self.done[way or "none"] += 1
        match way:
            case "late" if late is None:
                self._late[line] = message
                return
            case "cut":
                raise ConnectionError("cut")
            case "short":
                yield _short(message, self.source)
            case "flipped":
                yield _flipped(message, self.source)
            case "twice":
                yield message
                yield message
            case _:
                yield message
        if late is not None:
            yield late


class Tap:
    """Listens at `here` for the peers of the learner at `there`, in a thread of its own."""

    def __init__(self, here: Path, there: Path, mischief: Mischief | None = None) -> None:
        self.here, self.there, self.mischief = here, there, mischief
        self.acknowledged: set[tuple[int, int]] = set()
        self.granted: set[tuple[int, int]] = set()
        self.published: set[int] = set()
        self.sent: set[tuple[int, int]] = set()
        """Trials that some peer sent."""
        self.num_messages = 0
        self._num_lines = 0
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    def _run(self, ready: threading.Event) -> None:
        async def serve() -> None:
            ready.set()
            server: asyncio.Server | None = None
            async for _ in ticks(LOOK_S):  # listen while the learner does: no dead ends
                if server is None and _listens(self.there):
                    server = await asyncio.start_unix_server(self._join, self.here)
                elif server is not None and not _listens(self.there):
                    server.close()
                    server = None

        asyncio.run(serve())

    async def _join(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        """One peer's connection, to the learner's if there is one."""
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
        with suppress(asyncio.IncompleteReadError, ConnectionError, BrokenPipeError):
            left = GREETING_BYTES
            while left and (greeting := await reader.read(left)):
                left -= len(greeting)
                writer.write(greeting)  # each side waits for the other's first bytes
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
    """Whether a process listens at a socket, by the kernel's table: no connection is made."""
    lines = Path("/proc/net/unix").read_text().split("\n")
    return any(line.endswith(f" {path}") and " 00010000 " in line for line in lines)


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[list[bytes] | bytes]:
    """Messages as lists of frames; commands as the bytes they are."""
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
    out = bytearray()
    for number, body in enumerate(message):
        more = MORE if number < len(message) - 1 else 0
        is_long = len(body) > 255
        out += bytes([more | (LONG if is_long else 0)])
        out += len(body).to_bytes(8 if is_long else 1, "big") + body
    return bytes(out)


def _short(message: list[bytes], source: random.Random) -> list[bytes]:
    harmed = list(message)
    place = source.randrange(len(harmed))
    harmed[place] = harmed[place][: source.randint(0, max(0, len(harmed[place]) - 1))]
    return harmed


def _flipped(message: list[bytes], source: random.Random) -> list[bytes]:
    harmed = list(message)
    place = source.choice([n for n, body in enumerate(harmed) if body])
    bit = source.randrange(8 * len(harmed[place]))
    body = bytearray(harmed[place])
    body[bit // 8] ^= 1 << bit % 8
    harmed[place] = bytes(body)
    return harmed
