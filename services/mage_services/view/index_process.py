"""Build the indexes of runs in a process of its own, so that no page waits for it.

The server sends the runs whose files have grown. After each slice of work the process sends the
name of the run that it has read, and the reason if it cannot read more of that run.
"""

import json
import os
import sqlite3
import time
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from mage_async.errors import MageError, RunError, WireError
from mage_async.policy_version import oldest
from mage_async.protocol.journal_records import Commit, Dropped, Granted, SegmentHeader
from mage_async.protocol.trial_arrays import TrialHeader
from mage_async.results.run_directory import RunDirectory
from mage_async.trajectory import Trial
from mage_services.journal.record_bytes import (
    MAGIC,
    MAX_RECORD_BYTES,
    decode_record,
    read_trial_header,
    whole_records,
)
from mage_services.processes.child_process import channel_to_parent
from mage_services.processes.cores_and_memory import WATCHER, lower_priority
from mage_services.view.index import connect

MODULE = "mage_services.view.index_process"
"""This module, which the process runs."""
SLICE_S = 0.2
"""Seconds of one slice of work, after which readers see its results."""
WINDOW_BYTES = 1 << 22
"""Number of bytes to read at a time; more if a record is longer."""
CHECKED_BYTES = 1024
"""Number of bytes at both ends of the indexed part of a file, whose checksum shows whether another
file has taken its place.
"""


def _upsert(*columns: str, condition: str = "true") -> str:
    """Return the statement that writes columns of a group; an existing row keeps the others."""
    changes = ", ".join(f"{column} = excluded.{column}" for column in columns[1:])
    return (
        f"INSERT INTO groups ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) "
        f"ON CONFLICT (number) DO UPDATE SET {changes} WHERE {condition}"
    )


_TASK_COLUMNS = ("number", "member", "seat", "seed")
"""Columns of a group that its grant, or any of its trials, states."""
# Statement that adds a group by the record of its grant.
_GROUP = _upsert(
    *_TASK_COLUMNS,
    *("version", "peer", "epoch", "num_trials"),
    # A group that is granted again has a higher epoch. Segments are read newest first, so an older
    # grant may be read later and must not replace the newer one.
    condition="groups.epoch IS NULL OR excluded.epoch >= groups.epoch",
)
_TASK = _upsert(*_TASK_COLUMNS, condition="groups.member IS NULL")
"""Statement that adds the task of a group, known from a trial, if no grant of it was read."""
_STEP = _upsert("number", "step")
"""Statement that adds the step that trained a group."""
_DROPPED = _upsert("number", "dropped")
"""Statement that adds the reason for which a group was dropped."""
_TRIAL = "INSERT OR REPLACE INTO trials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
"""Statement that adds a trial."""

_State = tuple[int, int, int]
"""A file's size in bytes, time of change in nanoseconds, and inode number."""


class IndexBuilder:
    """Build the index of a run slice by slice, from its metrics and its journal, newest first.

    No other object writes the index.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._index = run, connect(run)
        self._at_end: dict[str, _State] = {}
        """State of each file when it had no unread finished record."""

    def close(self) -> None:
        """Close the index."""
        self._index.close()

    def work(self) -> bool:
        """Do one slice of work; return whether there is more to read.

        Raises:
            RunError: the run is gone or cannot be read, or a record has another format.
        """
        try:
            until = time.monotonic() + SLICE_S
            while unread := [file for file in self._files() if self._is_unread(file)]:
                for file in unread:
                    self._read(file, until)
                    if time.monotonic() > until:
                        return True
        except FileNotFoundError as gone:
            raise RunError(f"{gone.filename} was deleted") from gone
        except OSError as error:  # such as an error of a network disk
            place = error.filename or self._run.root
            raise RunError(f"{place} cannot be read: {error.strerror}") from error
        except sqlite3.Error as error:
            raise RunError(f"the index of {self._run.root} cannot be written: {error}") from error
        return False

    def _files(self) -> list[Path]:
        """Return the files to read, in the order in which a person wants to see them."""
        segments = sorted(self._run.journal.glob("*.log"), reverse=True)
        lines = [file for file in (self._run.metrics, self._run.curve) if file.is_file()]
        return [*lines, *segments]

    def _is_unread(self, file: Path) -> bool:
        """Return whether a file has unread bytes; forget its index if another file has taken its
        place.
        """
        state = _state(file.stat())
        if self._at_end.get(file.name) == state:
            return False
        size = state[0]
        done, digest = self._done(file)
        if size < done or (done and _digest(file, done) != digest):
            self._forget(file)
            done = 0
        if size == done:
            self._at_end[file.name] = state
        return size > done

    def _done(self, file: Path) -> tuple[int, int]:
        """Return how many bytes of a file were read, and the checksum of that part."""
        query = "SELECT read, digest FROM files WHERE name = ?"
        found = self._index.execute(query, (file.name,)).fetchone()
        return tuple(found) if found else (0, 0)

    def _forget(self, file: Path) -> None:
        """Delete the index of a file that another file has replaced.

        A resumed learner cuts lines off, and a new run in the folder has another journal.
        """
        with self._index:
            if file.suffix == ".log":
                for table in ("files", "heads", "groups", "trials"):
                    self._index.execute(f"DELETE FROM {table}")
            self._index.execute(f"DELETE FROM {self._table(file)[0]}")
            self._index.execute("DELETE FROM files WHERE name = ?", (file.name,))
        self._at_end.clear()

    def _table(self, file: Path) -> tuple[str, str]:
        """Return the table for the lines of a file and their key; `trials` for a segment."""
        tables = {self._run.metrics: ("steps", "step"), self._run.curve: ("curve", "version")}
        return tables.get(file, ("trials", ""))

    def _read(self, file: Path, until: float) -> None:
        """Read more of a file, until the time `until`; write the records and the position in one
        transaction.
        """
        done, _ = self._done(file)
        with file.open("rb") as source, self._index:
            end, state = done, _state(os.fstat(source.fileno()))
            for reached in self._ends(file, source, done):
                end = reached
                if time.monotonic() > until:
                    break
            else:
                self._at_end[file.name] = state
            values = (file.name, end, _digest(file, end))
            self._index.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", values)

    def _ends(self, file: Path, source: BinaryIO, start: int) -> Iterator[int]:
        """Index the records from byte `start` on, and yield the position after each.

        The file is read and never mapped: if a mapped file is truncated, the kernel kills the
        process that accesses the map (SIGBUS).
        """
        index_records = self._segment if file.suffix == ".log" else self._lines
        num_bytes = WINDOW_BYTES
        while num_bytes <= 2 * MAX_RECORD_BYTES:
            source.seek(start)
            data, before = source.read(num_bytes), start
            for start in index_records(file, data, before):
                yield start
            if len(data) < num_bytes:
                return
            # No record ended in the window: read the same place again, in a larger window.
            num_bytes = WINDOW_BYTES if start > before else 2 * num_bytes

    def _lines(self, file: Path, data: bytes, at: int) -> Iterator[int]:
        """Index the finished lines in `data`, which lies at byte `at` of metrics or the curve."""
        table, key = self._table(file)
        *lines, _ = data.split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            try:
                number = json.loads(text)[key]
            except (ValueError, KeyError, TypeError) as error:
                raise RunError(f"{file}: damaged at byte {at}: {error!r}") from error
            self._index.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", (number, text))
            at += len(line) + 1
            yield at

    def _segment(self, file: Path, data: bytes, at: int) -> Iterator[int]:
        """Index the finished records in `data`, which lies at byte `at` of a journal segment."""
        if at == 0 and not data.startswith(MAGIC):
            return
        segment = int(file.stem)
        for end, body in whole_records(memoryview(data), 0 if at else len(MAGIC)):
            try:
                self._take_record(segment, at + end, body)
            except WireError as fault:
                raise RunError(f"{file}: {fault}") from fault
            yield at + end

    def _take_record(self, segment: int, end: int, body: memoryview) -> None:
        """Index one record, whose body ends at byte `end` of a segment."""
        if (header := read_trial_header(body)) is not None:
            for each in header.seats():
                self._take_trial(each, (segment, end - len(body), len(body)))
            return
        match decode_record(body):
            case SegmentHeader(version=version, config=config, groups=groups):
                head = (segment, version, config)
                self._index.execute("INSERT OR REPLACE INTO heads VALUES (?, ?, ?)", head)
                for granted in groups:
                    self._take_group(granted)
            case Granted() as granted:
                self._take_group(granted)
            case Dropped(grant=grant, reason=reason):
                self._index.execute(_DROPPED, (grant, reason))
            case Commit(version=version, grants=grants):
                self._index.executemany(_STEP, [(grant, version) for grant in grants])

    def _take_group(self, granted: Granted) -> None:
        """Index a group that was granted."""
        grant = granted.grant
        task = (grant.grant, grant.member, grant.seat, str(grant.seed))
        others = (granted.version, granted.peer, grant.epoch, grant.num_trials)
        self._index.execute(_GROUP, task + others)

    def _take_trial(self, header: TrialHeader, place: tuple[int, int, int]) -> None:
        """Index a trial; `place` is its segment, and the offset and length of its record in
        bytes.
        """
        # Without its tokens: only the rewards and counts of its turns are needed.
        trial = Trial(header.task, header.index, header.num_episodes, (), header.turns)
        version_runs = [run for runs in header.versions for run in runs]
        values = (
            msgspec.json.encode(trial.episode_rewards()).decode(),
            len(header.turns),
            sum(header.num_tokens),
            trial.num_invalid(),
            oldest(version_runs) if version_runs else None,
            max((run.policy for run in version_runs), default=None),
            header.duration_s,
        )
        self._index.execute(_TRIAL, (header.grant, header.index, *place, *values))
        # The record of the grant may have been deleted with its segment; then the trial names the
        # task.
        if header.index == 0:
            task = header.task
            self._index.execute(_TASK, (header.grant, task.member, task.seat, str(task.seed)))


def _state(found: os.stat_result) -> _State:
    """Return the state of a file."""
    return found.st_size, found.st_mtime_ns, found.st_ino


def _digest(file: Path, end: int) -> int:
    """Return a checksum of the first and the last bytes of a file's first `end` bytes."""
    with file.open("rb") as source:
        head = source.read(min(CHECKED_BYTES, end))
        source.seek(max(0, end - CHECKED_BYTES))
        return zlib.crc32(head + source.read(min(CHECKED_BYTES, end)))


class ReadRun(msgspec.Struct, frozen=True):
    """Ask the process to index the new records of a run."""

    run: str
    """The run's directory."""


class Indexed(msgspec.Struct, frozen=True):
    """Report that a slice of a run was read."""

    run: str
    """The run's directory."""
    fault: str
    """Why no more of the run can be read; "" if it can."""


def main() -> None:
    """Build indexes until the server ends."""
    server = channel_to_parent(ReadRun)
    lower_priority(WATCHER)
    builders: dict[str, IndexBuilder] = {}
    waiting: deque[str] = deque()
    while not server.has_ended:
        while (message := server.receive(waits=not waiting)) is not None:
            if message.run not in waiting:
                waiting.append(message.run)
        if waiting:
            root, fault = waiting.popleft(), ""
            try:
                if root not in builders:
                    builders[root] = IndexBuilder(RunDirectory(Path(root)))
                if builders[root].work():
                    waiting.append(root)  # there is more to read
            except MageError as error:
                fault = str(error)
                if root in builders:
                    builders.pop(root).close()
            server.send(Indexed(root, fault))


if __name__ == "__main__":
    main()
