"""Reading a journal from disk: which segments there are, their records, and cutting a torn tail."""

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mage_async.errors import RunError, WireError
from mage_async.protocol.journal_records import Head, Record, read, scan
from mage_async.protocol.journal_segments import Segment
from mage_async.results.durable_files import sync


@dataclass(frozen=True, slots=True)
class JournalOnDisk:
    """The whole segments of a run, oldest first, and what was torn at the end."""

    files: list[Path]
    segments: list[Segment]
    torn: Path | None
    torn_at: int
    """Good bytes of `torn`."""

    def records(self, first: int) -> Iterator[Record]:
        """All records from segment `first` on; reads one segment at a time."""
        for file, segment in zip(self.files, self.segments, strict=True):
            if segment.number >= first:
                yield from _records(file, is_last=file == self.files[-1])


def open_journal(folder: Path) -> JournalOnDisk:
    """Look at the heads of all segments, and for a torn tail in the last one. Changes nothing.

    Raises:
        RunError: a head is damaged, or another build wrote it.
    """
    files = sorted(folder.glob("*.log"))
    segments: list[Segment] = []
    for file in files[:-1]:
        heads = scan(_map(file), 1).bodies
        if not heads:
            raise RunError(f"{file} is damaged at its start, and later segments follow: restore it")
        segments.append(_segment(file, heads[0], file.stat().st_size))
    if not files:
        return JournalOnDisk([], [], None, 0)
    data = files[-1].read_bytes()
    found = scan(data)
    if found.bodies:
        segments.append(_segment(files[-1], found.bodies[0], found.good_bytes))
    is_torn = found.good_bytes < len(data) or not found.bodies
    torn = files[-1] if is_torn else None
    return JournalOnDisk(files[: len(segments)], segments, torn, found.good_bytes)


def make_durable(journal: JournalOnDisk) -> int:
    """Have on the disk itself what was read, and nothing behind it; returns how many bytes of a
    torn tail, or of a segment that never got its head, were cut off.

    A learner killed between writing and syncing had told no peer; one that goes on from what was
    written acknowledges it as held.
    """
    lost = 0
    if journal.torn is not None:
        lost = journal.torn.stat().st_size - journal.torn_at
        if journal.torn in journal.files:
            os.truncate(journal.torn, journal.torn_at)
        else:
            journal.torn.unlink()
            sync(journal.torn.parent)
    for last in journal.files[-1:]:  # before another segment is begun, the one before is synced
        sync(last)
        sync(last.parent)
    return lost


def _segment(file: Path, body: memoryview, good_bytes: int) -> Segment:
    head = _read(file, body)
    if not isinstance(head, Head):
        raise RunError(f"{file} does not begin with a head: it is no journal of this build")
    return Segment(int(file.stem), head.version, head.oldest_version(), good_bytes)


def _map(file: Path) -> mmap.mmap | bytes:
    """A file's bytes, read where they are looked at; an empty file cannot be mapped."""
    with file.open("rb") as source:
        size = os.fstat(source.fileno()).st_size
        return mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) if size else b""


def _records(file: Path, *, is_last: bool) -> Iterator[Record]:
    data = _map(file)
    found = scan(data)
    for body in found.bodies:
        yield _read(file, body)
    if found.good_bytes < len(data) and not is_last:
        raise RunError(
            f"{file} is damaged at byte {found.good_bytes}, and later segments follow: what was "
            "acknowledged after it is needed; restore the file"
        )


def _read(file: Path, body: memoryview) -> Record:
    try:
        return read(body)
    except WireError as fault:
        raise RunError(f"{file}: {fault}") from fault
