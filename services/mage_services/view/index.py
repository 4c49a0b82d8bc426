"""Index a run in an SQLite file: the place of each trial in the journal, and the values for lists.

The index can always be rebuilt. It lies in the run's folder or, if that is read-only, in the user's
cache. One process writes it (`index_process.py`); any number may read at the same time.
"""

import fcntl
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import lru_cache
from hashlib import blake2s
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mage_async.errors import RunError, WireError
from mage_async.protocol.messages import TrialResult
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import Record, parsed
from mage_async.tasks.task_stream import num_seats
from mage_async.trajectory import Trial
from mage_async.user_modules import cache_folder
from mage_services.journal.record_bytes import PREFIX_BYTES, decode_record, whole_records

FORMAT = 2
"""Number of the index's format. It is increased when a table changes; an index of another format is
rebuilt.
"""
# `files`: how many bytes of each file were read, and a checksum of both ends of that part, by which
# a file that was replaced is noticed. `steps` and `curve`: lines of JSON from the run's metrics, by
# step, and from its curve, by version. `heads`: the policy version and the configuration (TOML) in
# the header of each segment of the journal. `groups` and `trials`: see `ListedGroup` and
# `ListedTrial`; the body of a trial's record (kind included) begins at byte `place` of its segment
# and has `size` bytes; `rewards` is a JSON list, `seed` the digits of a number.
_TABLES = """
CREATE TABLE files (name TEXT PRIMARY KEY, read INTEGER, digest INTEGER);
CREATE TABLE steps (number INTEGER PRIMARY KEY, record TEXT);
CREATE TABLE curve (number INTEGER PRIMARY KEY, record TEXT);
CREATE TABLE heads (segment INTEGER PRIMARY KEY, version INTEGER, config TEXT);
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, version INTEGER, member TEXT, seat INTEGER, seed TEXT,
    peer TEXT, epoch INTEGER, num_trials INTEGER, step INTEGER, dropped TEXT
);
CREATE INDEX groups_by_step ON groups (step);
CREATE TABLE trials (
    grp INTEGER, number INTEGER, segment INTEGER, place INTEGER, size INTEGER, rewards TEXT,
    num_turns INTEGER, num_tokens INTEGER, num_invalid INTEGER, oldest INTEGER, newest INTEGER,
    duration_s REAL, PRIMARY KEY (grp, number)
) WITHOUT ROWID;
"""
_NAMES = "SELECT name FROM sqlite_schema WHERE type = 'table'"
"""Query for the names of all tables."""


def index_file(run: RunDirectory) -> Path:
    """Return the path of a run's index."""
    if os.access(run.root, os.W_OK):
        return run.index
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    name = blake2s(str(run.root.resolve()).encode(), digest_size=8).hexdigest()
    return cache / f"{name}.sqlite"


def connect(run: RunDirectory) -> sqlite3.Connection:
    """Open the index of a run; a new one has empty tables.

    Raises:
        RunError: the run is gone, or its index can be neither read nor written.
    """
    run.check()
    file = index_file(run)
    try:
        connection = sqlite3.connect(file, timeout=10.0)
        connection.execute("PRAGMA synchronous = off")  # an index that a crash damages is rebuilt
        if _format(connection) != FORMAT:
            _rebuild(file, connection)
    except sqlite3.Error as error:
        raise RunError(f"{file}: the index cannot be used: {error}") from error
    connection.row_factory = sqlite3.Row
    return connection


def _format(connection: sqlite3.Connection) -> int:
    """Return the number of the format of an index; 0 for a new file."""
    with closing(connection.execute("PRAGMA user_version")) as found:
        return int(found.fetchone()[0])


def _rebuild(file: Path, connection: sqlite3.Connection) -> None:
    """Create empty tables of this format, unless another process has just created them.

    A page and the indexer may open a new index at the same moment. The lock of the folder lets only
    one of them go on, because two connections that switch to a write-ahead log at the same time
    fail.
    """
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if _format(connection) != FORMAT:
            connection.execute("PRAGMA journal_mode = wal")
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                for (name,) in connection.execute(_NAMES).fetchall():
                    connection.execute(f"DROP TABLE {name}")
                for statement in _TABLES.strip().rstrip(";").split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {FORMAT}")
    finally:
        os.close(folder)


# What pages read from an index.


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """Describe a group in the index of a run.

    A field is `None` until the index has read a record that holds it.
    """

    number: int
    version: int | None
    """The policy version when the group was granted."""
    member: str | None
    """Name of the hidden opponent or task variant."""
    seat: int | None
    """Number of the player whose part the policy plays, from 0."""
    seed: str | None
    """Seed of the task, in digits."""
    peer: str | None
    """Name of the actor that it was granted to last."""
    epoch: int | None
    """Number of times that the group was granted before."""
    num_trials: int | None
    step: int | None
    """Step that trained the group; None if none has yet."""
    dropped: str | None
    """Why the group was dropped; None if it was not."""

    @property
    def is_self_play(self) -> bool:
        """Whether the policy plays both seats, so that a play has two trials."""
        return self.member is not None and num_seats(self.member) > 1


@dataclass(frozen=True, slots=True)
class ListedTrial:
    """Describe a trial in the index of a run, without its text."""

    group: int
    number: int
    rewards: Sequence[float]
    """Undiscounted reward of each episode."""
    num_turns: int
    num_tokens: int
    num_invalid: int
    oldest: int | None
    """The oldest version that sampled one of its tokens."""
    newest: int | None
    duration_s: float
    step: int | None
    member: str | None


_REWARDS = msgspec.json.Decoder(list[float])
"""Decoder of the column `rewards`, a JSON list."""
_GROUPS = ", ".join(each.name for each in fields(ListedGroup))
"""Columns that make a `ListedGroup`, in the order of its fields."""
_TRIALS = (
    "trials.grp, trials.number, rewards, num_turns, num_tokens, num_invalid, oldest, newest, "
    "duration_s, step, member"
)
"""Columns that make a `ListedTrial`, in the order of its fields."""


class RunReader:
    """Read lists from the index of a run, and whole trials from its journal.

    A reader is open while one page is made, and used by one thread only.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run, self._index = run, connect(run)

    def __enter__(self) -> "RunReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._index.close()

    def progress(self) -> tuple[int, int]:
        """Return how many bytes of the run's files the index has read, and how many they have."""
        (read_bytes,) = self._one("SELECT coalesce(sum(read), 0) FROM files")
        files = [*self.run.journal.glob("*.log"), self.run.metrics, self.run.curve]
        return read_bytes, sum(file_state(file).size for file in files)

    def last_step(self) -> int:
        """Return the newest step in the index; 0 if there is none."""
        newest = "SELECT max(coalesce((SELECT max(number) FROM steps), 0),"
        return int(self._one(f"{newest} coalesce((SELECT max(step) FROM groups), 0))")[0])

    def metrics(self, at_most: int) -> list[Record]:
        """Return the metrics of steps, oldest first. If the run has more than `at_most` steps, they
        are every k-th step back from the newest one, with an odd k.
        """
        ends = "SELECT (SELECT min(number) FROM steps), (SELECT max(number) FROM steps)"
        low, high = self._one(ends)  # two inner queries, of which each reads one end of the table
        if low is None:
            return []
        # -(-a // b) is a / b, rounded up. `| 1` makes the distance odd: fresh and stale steps may
        # alternate, and an even distance would show only one of the two kinds.
        every = max(1, -(-(high - low + 1) // at_most)) | 1
        return self._records("steps", range(high, low - 1, -every))

    def newest_metrics(self, at_most: int, after: int) -> list[Record]:
        """Return the metrics of the newest steps with a number above `after`, oldest first."""
        rows = "SELECT record FROM steps WHERE number > ? ORDER BY number DESC LIMIT ?"
        found = self._index.execute(rows, (after, at_most))
        return [_record(self.run.metrics, row[0]) for row in found][::-1]

    def step(self, number: int) -> Record:
        """Return the metrics of one step; empty if there are none."""
        return next(iter(self._records("steps", [number])), {})

    def curve(self, at_most: int) -> list[Record]:
        """Return evaluations during training, oldest first. If there are more than `at_most`, they
        are evenly spaced ones, including the newest.
        """
        newest = "SELECT number FROM curve ORDER BY number DESC"
        found = [row[0] for row in self._index.execute(newest)]
        every = max(1, -(-len(found) // at_most))
        return self._records("curve", found[::every])

    def config_of(self, step: int) -> str:
        """Return the configuration that a step was computed with, as TOML.

        Raises:
            RunError: the index has not read that far yet.
        """
        # Step n is trained from version n - 1, so the last segment of the journal that begins below
        # version n has its configuration.
        before = "SELECT config FROM heads WHERE version < ? ORDER BY segment DESC LIMIT 1"
        found = self._one(before, (step,))
        if found is None:
            raise RunError(f"the journal has no configuration of step {step}")
        return str(found[0])

    def groups_of(self, step: int) -> list[ListedGroup]:
        """Return the groups of a step, in the order of their grants."""
        return self._groups("WHERE step = ? ORDER BY number", (step,))

    def untrained_groups(self, at_most: int) -> list[ListedGroup]:
        """Return the newest groups that no step has trained, including dropped ones."""
        last = self._one("SELECT coalesce(max(number), 0) FROM groups")[0]
        condition = "WHERE step IS NULL AND number > ? ORDER BY number DESC LIMIT ?"
        # Old groups without a step were dropped or lost. Looking at the newest numbers alone keeps
        # the query fast in a long run.
        return self._groups(condition, (last - 100 * at_most, at_most))

    def group(self, number: int) -> ListedGroup:
        """Return one group.

        Raises:
            RunError: the group is not in the index.
        """
        found = self._groups("WHERE number = ?", (number,))
        if not found:
            raise RunError(f"group {number} is not in the index of {self.run.root}")
        return found[0]

    def trials_of(self, groups: Sequence[int]) -> list[ListedTrial]:
        """Return the trials of some groups, in order."""
        marks = ",".join("?" * len(groups))
        joined = f"SELECT {_TRIALS} FROM groups JOIN trials ON trials.grp = groups.number"
        rows = f"{joined} WHERE groups.number IN ({marks}) ORDER BY 1, 2"
        return [
            ListedTrial(row[0], row[1], _REWARDS.decode(row[2]), *row[3:])
            for row in self._index.execute(rows, groups)
        ]

    def trials_between(self, first: int, last: int, at_most: int) -> list[ListedTrial]:
        """Return at most `at_most` trials of the steps `first` to `last`, the newest first."""
        condition = "WHERE step BETWEEN ? AND ? ORDER BY step DESC, number DESC"
        groups = self._index.execute(f"SELECT number FROM groups {condition}", (first, last))
        found: list[ListedTrial] = []
        for (number,) in groups:  # the query is evaluated row by row: the rest is never read
            if len(found) >= at_most:
                break
            found += self.trials_of([number])
        return found[:at_most]

    def load(self, group: int, number: int) -> Trial:
        """Read a whole trial from the journal; the record may hold the trials of both seats.

        Raises:
            RunError: the trial's segment of the journal was deleted, or its record is damaged.
        """
        where = "SELECT segment, place, size FROM trials WHERE grp = ? AND number = ?"
        found = self._one(where, (group, number))
        if found is None:
            raise RunError(f"trial {number} of group {group} is not in the index of the run")
        file = self.run.journal / f"{found['segment']:08}.log"
        try:
            with file.open("rb") as source:
                start, size = found["place"] - PREFIX_BYTES, found["size"] + PREFIX_BYTES
                data = os.pread(source.fileno(), size, start)
            _, body = next(whole_records(memoryview(data), 0), (0, b""))
            if len(body) != found["size"]:
                raise WireError("its checksum does not match")
            record = decode_record(body)
        except FileNotFoundError:
            raise RunError(
                f"{file} was deleted, and the trial with it; `journal.max_bytes` limits the "
                "journal of a run"
            ) from None
        except WireError as fault:
            raise RunError(f"{file} is damaged at byte {found['place']}: {fault}") from fault
        assert isinstance(record, TrialResult)
        return next(trial for trial in record.trials() if trial.index == number)

    def _groups(self, condition: str, values: Sequence[Any]) -> list[ListedGroup]:
        """Return the groups that a condition of SQL selects."""
        rows = self._index.execute(f"SELECT {_GROUPS} FROM groups {condition}", values)
        return [ListedGroup(*row) for row in rows]

    def _records(self, table: str, numbers: Sequence[int]) -> list[Record]:
        """Return the records of a table by their numbers, in order."""
        marks = ",".join("?" * len(numbers))
        rows = f"SELECT record FROM {table} WHERE number IN ({marks}) ORDER BY number"
        file = self.run.metrics if table == "steps" else self.run.curve
        return [_record(file, row[0]) for row in self._index.execute(rows, numbers)]

    def _one(self, query: str, values: Sequence[Any] = ()) -> Any:
        """Return the first row of a query; None if there is none."""
        return self._index.execute(query, values).fetchone()


@lru_cache(maxsize=1024)
def _record(file: Path, line: str) -> Record:
    """Parse a line of metrics or of the curve. Callers must not change the result: it is cached,
    because pages that follow a run need the same lines every second.
    """
    return parsed(file, line)


class FileState(NamedTuple):
    """Hold the size and the time of change of a file, by which a change is noticed; zeros if there
    is no file.
    """

    size: int = 0
    """Bytes."""
    changed_ns: int = 0
    """Time of the last change, in nanoseconds since the epoch."""


def file_state(file: Path) -> FileState:
    """Return the size and the time of change of a file."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return FileState()
    return FileState(found.st_size, found.st_mtime_ns)
