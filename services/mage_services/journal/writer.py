"""The journal on disk: one thread appends and syncs, the loop hears what has become durable.

    queue             filled by   emptied by        bound                     when it is full
    pending records   `append`    the thread        trials that hold a slot   cannot be: no slot

All records that wait when the thread comes back are written together and synced once (group
commit). On a full disk the thread keeps its records, gives the reason, and tries again every
`RETRY_S`; a half-written record is cut off first.

Which segments may be deleted is decided by heads that are durable, so that no deletion has to wait
for a write: a write may be waiting for the space.
"""

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mage_async.errors import RunError
from mage_async.protocol.journal_records import MAGIC, Head, Record, write
from mage_async.protocol.journal_segments import Segment, to_delete
from mage_async.protocol.trial_header import Frame
from mage_async.results.durable_files import sync

RETRY_S = 1.0
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
Then = Callable[[], None]


@dataclass(slots=True)
class _Item:
    """Something for the thread to do, in order."""

    pieces: Sequence[Frame] = ()
    opens: Path | None = None
    """Begin this segment first."""
    deletes: Sequence[Path] = ()
    """Delete these, whatever has been written."""
    then: Then | None = None


@dataclass(slots=True, eq=False)
class JournalFile:
    """Appends records to the journal of a run; made inside the loop that hears of durability.

    Raises: RunError: from `watch`, where the disk fails for another reason than space.
    """

    folder: Path
    segments: list[Segment]
    """What is there, oldest first; a new segment is begun behind it."""
    head: Head
    max_bytes: int
    segment_bytes: int
    _reason: str = field(default="", init=False)
    _checkpoint: int = field(default=-1, init=False)
    """Version of the newest one that `compact` was told of."""
    _begun: int = field(default=0, init=False)
    """Number of the newest segment whose head is durable."""
    _queue: list[_Item] = field(default_factory=list, init=False)
    _condition: threading.Condition = field(default_factory=threading.Condition, init=False)
    _is_closing: bool = field(default=False, init=False)
    _loop: asyncio.AbstractEventLoop = field(init=False)
    _failure: asyncio.Future[None] = field(init=False)
    _thread: threading.Thread = field(init=False)
    _file: int = field(default=-1, init=False)
    _good: int = field(default=0, init=False)
    """Bytes of the current segment that are durable; the thread's own."""
    num_syncs: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._failure = self._loop.create_future()
        self._begun = self.segments[-1].number if self.segments else 0
        self._begin(self.head)
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    def append(self, record: Record, then: Then | None = None) -> None:
        """Write a record behind all earlier ones; `then` is called on the loop when it is durable.

        Raises:
            WireError: the record cannot be written.
        """
        pieces = write(record)
        self._grow(sum(map(len, pieces)))
        self._put(_Item(pieces, then=then))

    def after(self, then: Then) -> None:
        """Call `then` on the loop when all that was appended so far is durable."""
        self._put(_Item(then=then))

    async def durable(self, record: Record) -> None:
        """Append a record and wait until it is durable. Cancellation leaves it to be written."""
        self.append(record)
        await self.settled()

    async def settled(self) -> None:
        """Wait until all that was appended so far is durable. Cancellation leaves nothing."""
        is_durable = asyncio.Event()
        self.after(is_durable.set)
        await is_durable.wait()

    def why_full(self) -> str:
        """Why no more trials may be taken in; empty while they may."""
        if self._reason:
            return self._reason
        if self._num_bytes() < self.max_bytes:
            return ""
        return (
            f"the journal has {self._num_bytes():,} bytes and journal.max_bytes is "
            f"{self.max_bytes:,}; waiting for a checkpoint to free some of them"
        )

    def roll(self, head: Callable[[], Head]) -> None:
        """Begin a new segment if this one is long enough; between two steps."""
        if self.segments[-1].num_bytes >= self.segment_bytes:
            self._begin(head())

    def compact(self, checkpoint_version: int) -> None:
        """Delete what a durable checkpoint has made unnecessary, where space is short: now, when
        later heads are durable, and, all of it, when the disk is full.
        """
        self._checkpoint = checkpoint_version
        self._free()

    async def watch(self) -> None:
        """Wait for a failure of the disk, and raise it. Cancellation leaves nothing behind."""
        await asyncio.shield(self._failure)

    def close(self) -> None:
        """Write what is pending, up to the first that there is no space for, and end the thread."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self._thread.join()
        self._failure.cancel()

    def _begin(self, head: Head) -> None:
        number = self.segments[-1].number + 1 if self.segments else 1
        pieces = [MAGIC, *write(head)]
        size = sum(map(len, pieces))
        self.segments.append(Segment(number, head.version, head.oldest_version(), size))
        file = segment_file(self.folder, number)
        self._put(_Item(pieces, opens=file, then=partial(self._has_begun, number)))

    def _has_begun(self, number: int) -> None:
        self._begun = number
        self._free()

    def _free(self) -> None:
        most = 0 if self._reason else self.max_bytes // 2
        begun = [segment for segment in self.segments if segment.number <= self._begun]
        doomed = to_delete(begun, self._checkpoint, most)
        self.segments = [segment for segment in self.segments if segment.number not in doomed]
        if doomed:
            self._put(_Item(deletes=[segment_file(self.folder, number) for number in doomed]))

    def _grow(self, num_bytes: int) -> None:
        last = self.segments[-1]
        self.segments[-1] = Segment(
            last.number, last.version, last.oldest_version, last.num_bytes + num_bytes
        )

    def _num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)

    def _put(self, item: _Item) -> None:
        with self._condition:
            self._queue.append(item)
            self._condition.notify()

    # The thread's side.

    def _work(self) -> None:
        try:
            while items := self._take():
                _delete(items)
                if not all(self._write(part) for part in _parts(items)):
                    return  # what follows rests on it
        except OSError as error:
            self._tell(self._fail, f"{self.folder} cannot be written: {error}")
        finally:
            if self._file >= 0:
                os.close(self._file)

    def _take(self) -> list[_Item]:
        with self._condition:
            self._condition.wait_for(lambda: self._queue or self._is_closing)
            items, self._queue = self._queue, []
        return items

    def _write(self, items: list[_Item]) -> bool:
        """Make some items durable, and tell; only the first may open a segment. False where there
        was no space until the end.
        """
        while not self._try_to_write(items):
            with self._condition:
                if self._condition.wait_for(lambda: self._is_closing, RETRY_S):
                    return False
                later = list(self._queue)
            _delete(later)
        self.num_syncs += 1
        self._tell(self._settle, items)
        return True

    def _try_to_write(self, items: list[_Item]) -> bool:
        """Whether there was space."""
        try:
            if items[0].opens is not None:
                self._open(items[0].opens)
            data = b"".join(piece for item in items for piece in item.pieces)
            if data:
                _write_all(self._file, data)
                os.fdatasync(self._file)
                self._good += len(data)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            if self._file >= 0:
                os.ftruncate(self._file, self._good)
                os.lseek(self._file, self._good, os.SEEK_SET)
            self._tell(self._say, f"{self.folder}: {error.strerror}")
            return False
        return True

    def _open(self, file: Path) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._good = 0
        sync(self.folder)

    def _tell(self, what: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what, *args)

    # The loop's side of what the thread tells.

    def _settle(self, items: list[_Item]) -> None:
        self._reason = ""
        for item in items:
            if item.then is not None:
                item.then()

    def _say(self, reason: str) -> None:
        self._reason = reason
        self._free()

    def _fail(self, reason: str) -> None:
        if not self._failure.done():
            self._failure.set_exception(RunError(reason))


def segment_file(folder: Path, number: int) -> Path:
    """Where a segment lies."""
    return folder / f"{number:08d}.log"


def _parts(items: list[_Item]) -> list[list[_Item]]:
    """Cut before each item that opens a segment."""
    parts: list[list[_Item]] = [[]]
    for item in items:
        if item.opens is not None and parts[-1]:
            parts.append([])
        parts[-1].append(item)
    return parts


def _delete(items: list[_Item]) -> None:
    """Delete what they name; some of it may be gone, deleted while a write before them waited."""
    for item in items:
        for file in item.deletes:
            file.unlink(missing_ok=True)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
