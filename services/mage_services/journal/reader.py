"""Read a journal from disk: its segments and their records. No function here changes a file.

A journal is a folder of segments, files that are numbered in order; a segment's first record is a
header with the state of the run at that point. A crash may leave an unfinished record at the end of
the last segment, the torn tail.
"""

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mage_async.errors import RunError, WireError
from mage_async.protocol.journal_records import Commit, Record, Segment, SegmentHeader
from mage_async.results.run_directory import RunDirectory
from mage_services.journal.record_bytes import decode_record, find_record, first_record, scan


@dataclass(frozen=True, slots=True)
class JournalOnDisk:
    """Hold the segments of a run that have a header, oldest first."""

    files: list[Path]
    segments: list[Segment]
    """The segments, one for each of `files`."""
    torn: Path | None
    """The last file if a crash damaged its end, else None. If not even its header is whole, the
    file is not in `files`.
    """
    torn_at: int
    """Offset in `torn` of the first byte after the whole records."""

    def records(self, first: int = 0) -> Iterator[Record]:
        """Yield all records of the segments with the number `first` or a higher one, by default of
        all segments, reading one segment at a time.

        Raises:
            RunError: a segment other than the last is damaged, or another build wrote it.
        """
        for file, segment in zip(self.files, self.segments, strict=True):
            if segment.number >= first:
                # If not even the header of the torn file is whole, the file is not in `files`. Then
                # none of `files` is the last segment.
                is_last = file == self.files[-1] and self.torn in (None, file)
                yield from _records(file, is_last=is_last)


def open_journal(folder: Path) -> JournalOnDisk:
    """Read the headers of all segments, and look for a torn tail in the last one.

    Raises:
        RunError: a header is damaged, or another build wrote it; or whole records follow a damaged
            one in the last segment, which is no torn tail.
    """
    files = sorted(folder.glob("*.log"))
    segments: list[Segment] = []
    for file in files[:-1]:
        if (header := first_record(_map(file))) is None:
            raise RunError(f"{file} is damaged at its start, and later segments follow: restore it")
        segments.append(_segment(file, header, file.stat().st_size))
    if not files:
        return JournalOnDisk([], [], None, 0)
    data = files[-1].read_bytes()
    whole = scan(data)
    if whole.bodies:
        segments.append(_segment(files[-1], whole.bodies[0], whole.good_bytes))
    # A process that is killed while it writes leaves a prefix of its records, and nothing after it.
    # Records after any other damage may have been acknowledged: a cut would lose them.
    follows = find_record(data, whole.good_bytes)
    if follows is not None:
        raise RunError(
            f"{files[-1]} is damaged at byte {whole.good_bytes}, and whole records follow from "
            f"byte {follows} on: they may hold acknowledged trials and steps; restore the file. To "
            f"give them up, cut the file: truncate --size={whole.good_bytes} {files[-1]}"
        )
    is_torn = whole.good_bytes < len(data) or not whole.bodies
    torn = files[-1] if is_torn else None
    return JournalOnDisk(files[: len(segments)], segments, torn, whole.good_bytes)


def _segment(file: Path, body: memoryview, good_bytes: int) -> Segment:
    """Return the data of a segment's header; `body` is the segment's first record."""
    header = _decode(file, body)
    if not isinstance(header, SegmentHeader):
        raise RunError(f"{file} does not begin with a header: it is no journal of this build")
    return Segment(int(file.stem), header.version, header.oldest_version(), good_bytes)


def _map(file: Path) -> mmap.mmap | bytes:
    """Map a file into memory, so that only those pages are read that are used."""
    with file.open("rb") as source:
        size = os.fstat(source.fileno()).st_size
        # An empty file cannot be mapped.
        return mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) if size else b""


def _records(file: Path, *, is_last: bool) -> Iterator[Record]:
    """Yield the records of a segment; only the last segment may have a damaged end."""
    data = _map(file)
    whole = scan(data)
    for body in whole.bodies:
        yield _decode(file, body)
    if whole.good_bytes < len(data) and not is_last:
        raise RunError(
            f"{file} is damaged at byte {whole.good_bytes}, and later segments follow: the run "
            "needs the records after the damage; restore the file"
        )


def _decode(file: Path, body: memoryview) -> Record:
    """Return the record that `body` encodes.

    Raises:
        RunError: another build of this program wrote it; `file` is named.
    """
    try:
        return decode_record(body)
    except WireError as fault:
        raise RunError(f"{file}: {fault}") from fault


def steps_in_words(journal: JournalOnDisk) -> str:
    """Return which steps a journal has, as "steps 1 to 60" or "no step"."""
    steps = [record.version for record in journal.records() if isinstance(record, Commit)]
    return f"steps {steps[0]} to {steps[-1]}" if steps else "no step"


def check_journal(run: RunDirectory) -> None:
    """Check that a directory is a run with a journal.

    Raises:
        RunError: the directory has no configuration, or no journal.
    """
    run.check()
    if not any(run.journal.glob("*.log")):
        raise RunError(f"{run.root}: the run has no journal yet")
