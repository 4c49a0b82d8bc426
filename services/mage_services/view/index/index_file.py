"""The index of a run: an SQLite file that says where each trial lies in the journal, and what lists
show of it.

The index holds nothing that cannot be made anew, and lies in the run's folder, or where that cannot
be written in a cache of this user. One process writes (`builder.py`), any may read meanwhile.
"""

import fcntl
import os
import sqlite3
from contextlib import closing
from hashlib import blake2s
from pathlib import Path

from mage_async.errors import RunError
from mage_async.results.run_directory import RunDirectory

FORMAT = 2
"""Raised where a table changes: an index of another format is made anew."""
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


def index_file(run: RunDirectory) -> Path:
    """Where the index of a run lies."""
    if os.access(run.root, os.W_OK):
        return run.index
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mage_async"
    cache.mkdir(parents=True, exist_ok=True)
    name = blake2s(str(run.root.resolve()).encode(), digest_size=8).hexdigest()
    return cache / f"{name}.sqlite"


def connect(run: RunDirectory) -> sqlite3.Connection:
    """The index of a run, with empty tables where there was none.

    Raises:
        RunError: the run is gone, or its index can be neither read nor written.
    """
    if not run.config.is_file():
        raise RunError(f"{run.root} is no run directory: it has no {run.config.name}")
    file = index_file(run)
    try:
        connection = _opened(file)
        if _format(connection) != FORMAT:
            _make_anew(file, connection)
    except sqlite3.Error as error:
        raise RunError(f"{file}: the index cannot be used: {error}") from error
    connection.row_factory = sqlite3.Row
    return connection


def _opened(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(file, timeout=10.0)
    connection.execute("PRAGMA synchronous = off")  # what is lost is made anew
    return connection


def _format(connection: sqlite3.Connection) -> int:
    with closing(connection.execute("PRAGMA user_version")) as found:
        return found.fetchone()[0]


def _make_anew(file: Path, connection: sqlite3.Connection) -> None:
    """Empty tables of this format, unless another process has made them meanwhile.

    A page and the builder may open a new index at the same moment. A lock of the folder lets one of
    them begin: two connections that turn to a write-ahead log at once refuse each other.
    """
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if _format(connection) != FORMAT:
            connection.execute("PRAGMA journal_mode = wal")
            with connection:
                _replace_tables(connection)
    finally:
        os.close(folder)


def _replace_tables(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for (name,) in connection.execute(_NAMES).fetchall():
        connection.execute(f"DROP TABLE {name}")
    for statement in _TABLES.strip().rstrip(";").split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {FORMAT}")
