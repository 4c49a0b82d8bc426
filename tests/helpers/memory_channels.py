"""Channels and a journal in memory, with the interface of the real ones, for tests of services in
one process.

Messages go through the real encoder, decoder and access, so what cannot cross a socket cannot cross
here.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mage_async.errors import PeerRefused
from mage_async.protocol.codec import decode, encode
from mage_async.protocol.journal_records import Record, SegmentHeader
from mage_async.protocol.messages import Hello, Message, Refusal, WhoAreYou
from mage_async.protocol.trial_arrays import Frame
from mage_services.journal.record_bytes import MAGIC, decode_record, encode_record, scan
from mage_services.transport.access_control import AccessControl, Peer
from mage_services.transport.channels import PeerGone
from mage_services.transport.sockets import HIGH_WATER_MESSAGES

if TYPE_CHECKING:
    from mage_async.policy.snapshot import Snapshot


class MemoryJournal:
    """A `JournalFile` without a disk: durable at once, or when told to `sync`."""

    def __init__(self, *, is_instant: bool = True, forgets: bool = False) -> None:
        """`forgets`: write records and throw them away, for long runs."""
        self.is_instant, self._forgets = is_instant, forgets
        self.full = ""
        """The reason `why_full` gives; set it to fill the disk."""
        self._data = bytearray(MAGIC)
        self._num_durable = len(MAGIC)
        self._waiting: list[Callable[[], None] | None] = []

    def append(self, record: Record, then: Callable[[], None] | None = None) -> None:
        """As `JournalFile.append`."""
        pieces = encode_record(record)
        if not self._forgets:
            self._data += b"".join(pieces)
        self._wait(then)

    def after(self, then: Callable[[], None]) -> None:
        """As `JournalFile.after`."""
        self._wait(then)

    def why_full(self) -> str:
        """As `JournalFile.why_full`."""
        return self.full

    def roll(self, head: Callable[[], SegmentHeader]) -> None:
        """A journal in memory is one segment."""

    async def settled(self) -> None:
        """As `JournalFile.settled`. Cancellation leaves nothing."""
        is_durable = asyncio.Event()
        self.after(is_durable.set)
        await is_durable.wait()

    def sync(self) -> None:
        """Make durable what was appended, and tell."""
        self._num_durable = len(self._data)
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            if then is not None:
                then()

    def num_waiting(self) -> int:
        """How many records and calls are not durable yet."""
        return len(self._waiting)

    def durable_records(self) -> list[Record]:
        """What a crash would leave."""
        return [decode_record(body) for body in scan(bytes(self._data[: self._num_durable])).bodies]

    def _wait(self, then: Callable[[], None] | None) -> None:
        self._waiting.append(then)
        if self.is_instant:
            self.sync()


class MemoryWeights:
    """`WeightFiles` without files: it knows which versions there are."""

    def __init__(self, *versions: int) -> None:
        self._versions = list(versions)

    def write(self, snapshot: "Snapshot") -> Path:
        """As `WeightFiles.write`."""
        self._versions.append(snapshot.version)
        return self.announced_path(snapshot.version)

    def announced_path(self, version: int) -> Path:
        """As `WeightFiles.announced_path`."""
        return Path(f"/weights/{version}")

    def versions(self) -> list[int]:
        """As `WeightFiles.versions`."""
        return list(self._versions)

    def remove(self, versions: list[int]) -> None:
        """As `WeightFiles.remove`."""
        self._versions = [each for each in self._versions if each not in versions]

    def describe(self) -> str:
        """As `WeightFiles.describe`."""
        return "weights are nowhere"


class Pipe:
    """Frames in one direction; filled by send, emptied by receive, full for one who asks
    `is_full`."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Peer, list[bytes]]] = deque()
        self._changed = asyncio.Event()

    def is_full(self) -> bool:
        """Whether as many messages wait as a real socket would hold."""
        return len(self._waiting) >= HIGH_WATER_MESSAGES

    def put(self, peer: Peer, frames: list[Frame]) -> None:
        """Add a copy, as a socket would."""
        self._waiting.append((peer, [bytes(frame) for frame in frames]))
        self._changed.set()

    async def take(self) -> tuple[Peer, list[bytes]]:
        """The oldest message. Cancellation leaves it in the pipe."""
        await asyncio.sleep(0)  # as a real socket: a flood must not starve the other tasks
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft()


class MemoryLearnerChannel:
    """A `LearnerChannel` without a socket; peers are made by `connect`."""

    def __init__(
        self,
        address: str = "memory",
        *,
        build: str = "test",
        config_digest: str = "test",
    ) -> None:
        self.address = address
        self.access = AccessControl(build, config_digest)
        self._inbox = Pipe()
        self._outboxes: dict[Peer, Pipe] = {}
        self._num_connected = 0

    def connect(self, hello: Hello) -> "MemoryPeerChannel":
        """A peer's end; it has said hello."""
        peer = f"{hello.name}/{self._num_connected}"
        self._num_connected += 1
        self._outboxes[peer] = Pipe()
        return MemoryPeerChannel(self, peer, hello)

    async def receive(self) -> tuple[Peer, Message]:
        """As `LearnerChannel.receive`. Cancellation leaves every message where it was."""
        while True:
            peer, frames = await self._inbox.take()
            verdict = self.access.receive(peer, frames)
            if verdict.answer is not None and peer in self._outboxes:
                self.send(peer, verdict.answer)
            if verdict.message is not None:
                return peer, verdict.message

    def send(self, peer: Peer, message: Message) -> None:
        """As `LearnerChannel.send`."""
        frames = encode(message)
        if peer not in self._outboxes:
            self.access.forget(peer)
            raise PeerGone(f"{peer} is gone: its connection ended")
        if self._outboxes[peer].is_full():
            raise PeerGone(f"{peer} has stopped reading: {HIGH_WATER_MESSAGES} messages wait")
        self._outboxes[peer].put(peer, frames)
        self.access.sent(peer, message)

    def forget(self, peer: Peer) -> None:
        """As `LearnerChannel.forget`."""
        self.access.forget(peer)

    def take_notes(self) -> list[str]:
        """As `LearnerChannel.take_notes`."""
        return self.access.take_notes()

    def close(self, linger_s: float = 0.0) -> None:
        """Cut every peer off."""
        self._outboxes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class MemoryPeerChannel:
    """A `PeerChannel` without a socket, made by `MemoryLearnerChannel.connect`."""

    def __init__(self, learner: MemoryLearnerChannel, peer: Peer, hello: Hello) -> None:
        self.peer = peer
        self._learner = learner
        self._hello = hello
        self._inbox = learner._outboxes[peer]
        self.put_raw(encode(hello))

    def put_raw(self, frames: list[Frame]) -> None:
        """Send any frames at all, malformed ones among them."""
        self._learner._inbox.put(self.peer, frames)

    async def receive(self) -> Message:
        """As `PeerChannel.receive`. Cancellation leaves every message where it was."""
        while True:
            _, frames = await self._inbox.take()
            message = decode(frames)
            if isinstance(message, Refusal):
                raise PeerRefused(message.reason)
            if not isinstance(message, WhoAreYou):
                return message
            await self.send(self._hello)

    async def send(self, message: Message) -> None:
        """As `PeerChannel.send`, but never waits."""
        await self.send_frames(encode(message))

    async def send_frames(self, frames: list[Frame]) -> None:
        """As `PeerChannel.send_frames`, but never waits."""
        self.put_raw(frames)

    def close(self, linger_s: float = 0.0) -> None:
        """End the connection; the learner's next send to this peer raises PeerGone."""
        self._learner._outboxes.pop(self.peer, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
