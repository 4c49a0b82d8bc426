"""Write the journal: one thread appends and syncs records; the event loop learns which are durable.

All records that wait while the thread is busy are written together and synced once (group commit).
Nothing is promised to a peer before the callback of its record, which runs after the sync. Before
a learner goes on with a journal, `make_durable` cuts off a half-written last record (a torn tail).
"""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mage_async.errors import RunError
from mage_async.policy.full_disk import lacks_space
from mage_async.protocol.journal_records import Record, Segment, SegmentHeader, to_delete
from mage_async.protocol.trial_arrays import Frame
from mage_async.results.run_files import sync
from mage_services.journal.reader import JournalOnDisk
from mage_services.journal.record_bytes import MAGIC, encode_record

#     queue             filled by   emptied by   bound                        when it is full
#     pending records   `append`    the thread   trials of groups in flight   cannot happen
#
# On a full disk the thread keeps its records, reports the reason, and tries again every `RETRY_S`
# seconds. It first cuts off a record that was written in part.
#
# The headers that are durable already decide which segments may be deleted. So a deletion never
# waits for a write, which might itself be waiting for the space.

RETRY_S = 1.0
"""Seconds between two attempts to write on a full disk."""
Callback = Callable[[], None]


def segment_file(folder: Path, number: int) -> Path:
    """Return the path of a segment."""
    return folder / f"{number:08d}.log"


def make_durable(journal: JournalOnDisk) -> int:
    """Cut off a torn tail and sync the rest; return the number of bytes that were cut off.

    A crash between writing and syncing leaves whole records that may not be durable. No peer has
    received an acknowledgement of them. But a resumed learner goes on from them and acknowledges
    their trials, so they are synced before anything else happens.
    """
    lost = 0
    if journal.torn is not None:
        lost = journal.torn.stat().st_size - journal.torn_at
        if journal.torn in journal.files:
            os.truncate(journal.torn, journal.torn_at)
        else:  # not even the segment's header is whole
            journal.torn.unlink()
            sync(journal.torn.parent)
    # Only the last segment may lack a sync: the writer syncs a segment before it begins the next.
    for last in journal.files[-1:]:
        sync(last)
        sync(last.parent)
    return lost


@dataclass(slots=True)
class _Item:
    """Describe one item of work for the thread. The thread writes items in order; it deletes the
    files in `deletes` of all waiting items before it writes.
    """

    pieces: Sequence[Frame] = ()
    """Bytes to append to the segment, in pieces."""
    opens: Path | None = None
    """The segment file that is begun before the pieces are written; None to go on in the current
    one.
    """
    deletes: Sequence[Path] = ()
    """Files to delete, even if there is no space for the pieces."""
    then: Callback | None = None
    """Called on the event loop when the pieces, and everything before them, are durable."""


class JournalFile:
    """Append records to the journal of a run. Create the object on the event loop.

    Args:
        folder: Folder of the journal's segments.
        segments: The segments on disk, oldest first; a new segment is begun after them.
        header: State of the run with which the new segment begins.
        max_bytes: If the whole journal has this size or more, no more trials are accepted.
        segment_bytes: If a segment has this size or more, `roll` begins a new one; None: 64 MiB, or
            an eighth of `max_bytes` if that is less, because only whole segments are deleted.
    """

    def __init__(
        self,
        folder: Path,
        segments: list[Segment],
        header: SegmentHeader,
        max_bytes: int,
        segment_bytes: int | None = None,
    ) -> None:
        self.folder, self.segments = folder, segments
        self.max_bytes = max_bytes
        self.segment_bytes = segment_bytes or min(1 << 26, max_bytes // 8)
        self.num_syncs = 0
        # The next attributes belong to the event loop.
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        """Gets the error with which the thread ended, or which a callback has raised."""
        self._no_space_reason = ""
        """Why the last attempt to write failed for lack of space; "" if it did not."""
        self._checkpoint_version = -1
        """Version of the newest checkpoint that was passed to `compact`; -1 before the first."""
        self._newest_durable = segments[-1].number if segments else 0
        """Number of the newest segment whose header is durable."""
        # The next ones are shared with the thread, which needs the lock of the condition.
        self._condition = threading.Condition()
        self._queue: list[_Item] = []
        self._is_closing = False
        # The next ones belong to the thread.
        self._file = -1
        self._durable_bytes = 0
        """Bytes of the current segment that are durable."""
        self._begin_segment(header)
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    def append(self, record: Record, then: Callback | None = None) -> None:
        """Write a record after all earlier ones; `then` is called on the loop once it is durable.

        Raises:
            WireError: the record cannot be encoded.
        """
        pieces = encode_record(record)
        last = self.segments[-1]
        self.segments[-1] = replace(last, num_bytes=last.num_bytes + sum(map(len, pieces)))
        self._put(_Item(pieces, then=then))

    def after(self, then: Callback) -> None:
        """Call `then` on the loop once all records appended so far are durable."""
        self._put(_Item(then=then))

    async def durable(self, record: Record) -> None:
        """Append a record and wait until it is durable; if cancelled, it is still written."""
        self.append(record)
        await self.settled()

    async def settled(self) -> None:
        """Wait until all records appended so far are durable. Safe to cancel."""
        is_durable = asyncio.Event()
        self.after(is_durable.set)
        await is_durable.wait()

    def why_full(self) -> str:
        """Return why no more trials may be accepted; "" if they may."""
        if self._no_space_reason:
            return self._no_space_reason
        if not self.is_over_budget():
            return ""
        return (
            f"the journal has {self._num_bytes():,} bytes and journal.max_bytes is "
            f"{self.max_bytes:,}; waiting for a checkpoint to free some of them"
        )

    def is_over_budget(self) -> bool:
        """Return whether the journal has `max_bytes` or more."""
        return self._num_bytes() >= self.max_bytes

    def _num_bytes(self) -> int:
        """Return the size of the journal, including records that are not durable yet."""
        return sum(segment.num_bytes for segment in self.segments)

    def roll(self, header: Callable[[], SegmentHeader]) -> None:
        """Begin a new segment if the current one is long enough.

        Call it between two steps, because a header cannot describe a batch that is in training.

        Args:
            header: Returns the state of the run with which the new segment begins.
        """
        if self.segments[-1].num_bytes >= self.segment_bytes:
            self._begin_segment(header())

    def compact(self, checkpoint_version: int) -> None:
        """Delete segments that a durable checkpoint has made unnecessary, if space is short.

        Segments are deleted now, and when later headers become durable.
        """
        self._checkpoint_version = checkpoint_version
        self._delete_unneeded()

    async def watch(self) -> None:
        """Wait for a failure of the disk other than a lack of space, or of a callback. Safe to
        cancel.

        Raises:
            RunError: the disk has failed.
            Exception: a callback has raised it.
        """
        await asyncio.shield(self._failure)

    def close(self) -> None:
        """Write the pending records, up to the first one that there is no space for, and stop."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self._thread.join()
        self._failure.cancel()

    def _begin_segment(self, header: SegmentHeader) -> None:
        """Queue a new segment, whose first record is `header`."""
        number = self.segments[-1].number + 1 if self.segments else 1
        pieces = [MAGIC, *encode_record(header)]
        size = sum(map(len, pieces))
        self.segments.append(Segment(number, header.version, header.oldest_version(), size))
        file = segment_file(self.folder, number)
        self._put(_Item(pieces, opens=file, then=partial(self._segment_is_durable, number)))

    def _segment_is_durable(self, number: int) -> None:
        """Note that a segment's header is durable; older segments may have become unneeded."""
        self._newest_durable = number
        self._delete_unneeded()

    def _delete_unneeded(self) -> None:
        """Delete segments that a durable checkpoint has made unnecessary, if space is short."""
        # Unnecessary segments are kept for `mage replay` while the journal has at most half of
        # `max_bytes`; on a full disk none is kept.
        most = 0 if self._no_space_reason else self.max_bytes // 2
        durable = [segment for segment in self.segments if segment.number <= self._newest_durable]
        numbers = to_delete(durable, self._checkpoint_version, most)
        self.segments = [segment for segment in self.segments if segment.number not in numbers]
        if numbers:
            self._put(_Item(deletes=[segment_file(self.folder, number) for number in numbers]))

    def _put(self, item: _Item) -> None:
        with self._condition:
            self._queue.append(item)
            self._condition.notify()

    # The methods below run in the thread.

    def _work(self) -> None:
        """Do the items of the queue until `close`, or until there is no space."""
        try:
            while items := self._take():
                _delete_files(items)
                if not all(self._write(part) for part in _split_at_segments(items)):
                    return  # `close` came while there was no space: no later record may be written
        except OSError as error:
            failure = RunError(f"{self.folder} cannot be written: {error}")
            self._call_on_loop(self._fail, failure)
        finally:
            if self._file >= 0:
                os.close(self._file)

    def _take(self) -> list[_Item]:
        """Wait for items, and return all of them; none once `close` was called and none is left."""
        with self._condition:
            self._condition.wait_for(lambda: self._queue or self._is_closing)
            items, self._queue = self._queue, []
        return items

    def _write(self, items: list[_Item]) -> bool:
        """Make items durable and report it; only the first of them may open a segment.

        Waits while there is no space. Returns False if there was none until `close`.
        """
        while not self._try_to_write(items):
            with self._condition:
                if self._condition.wait_for(lambda: self._is_closing, RETRY_S):
                    return False
                later = list(self._queue)
            _delete_files(later)  # deletions must not wait for this write: they make space for it
        self._call_on_loop(self._report_durable, items)
        return True

    def _try_to_write(self, items: list[_Item]) -> bool:
        """Write and sync items; return False if there is no space."""
        try:
            if items[0].opens is not None:
                self._open(items[0].opens)
            data = b"".join(piece for item in items for piece in item.pieces)
            if data:
                _write_all(self._file, data)
                os.fdatasync(self._file)
                self.num_syncs += 1
                self._durable_bytes += len(data)
        except OSError as error:
            if not lacks_space(error):
                raise
            if self._file >= 0:
                # A part may have been written: cut it off, so that the next attempt begins there.
                os.ftruncate(self._file, self._durable_bytes)
                os.lseek(self._file, self._durable_bytes, os.SEEK_SET)
            self._call_on_loop(self._report_no_space, f"{self.folder}: {error.strerror}")
            return False
        return True

    def _open(self, file: Path) -> None:
        """Begin a segment file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._durable_bytes = 0
        sync(self.folder)  # the file's name has to be durable too

    def _call_on_loop(self, call: Callable[..., None], *args: object) -> None:
        """Call a function on the event loop, unless the loop has been closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    # The methods below run on the event loop, called by the thread.

    def _report_durable(self, items: list[_Item]) -> None:
        """Call the callbacks of items that are durable."""
        self._no_space_reason = ""
        for item in items:
            if item.then is not None:
                try:
                    item.then()
                except Exception as error:  # raised again by `watch`; later callbacks must not wait
                    self._fail(error)

    def _report_no_space(self, reason: str) -> None:
        """Note that there is no space, and delete segments that are not needed."""
        self._no_space_reason = reason
        self._delete_unneeded()

    def _fail(self, error: Exception) -> None:
        """Let `watch` raise a failure of the disk or of a callback: the first one."""
        if not self._failure.done():
            self._failure.set_exception(error)


def _split_at_segments(items: list[_Item]) -> list[list[_Item]]:
    """Split items into lists of which only the first item may open a segment."""
    parts: list[list[_Item]] = [[]]
    for item in items:
        if item.opens is not None and parts[-1]:
            parts.append([])
        parts[-1].append(item)
    return parts


def _delete_files(items: list[_Item]) -> None:
    """Delete the files that items name; some may be gone already, deleted while a write waited."""
    for item in items:
        for file in item.deletes:
            file.unlink(missing_ok=True)


def _write_all(file: int, data: bytes) -> None:
    """Write all bytes; `os.write` may write only a part of them."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
