"""Lock a run, so that no two `mage train` processes run the same directory.

`mage train` takes the lock before it writes the configuration and holds it to its end. The kernel
releases it (`flock`) when the process ends, however that happens. Reading a run needs no lock.
"""

import fcntl
import os
from pathlib import Path

from mage_async.errors import RunError
from mage_async.results.run_directory import RunDirectory


def take_lock(run: RunDirectory) -> int:
    """Take the lock of a run, and return the descriptor that holds it; see `hold`.

    Raises:
        RunError: another process runs this run.
    """
    return hold(
        run.lock,
        f"{run.root} is being run by another process: wait for it or end it, or choose "
        "another --run-dir",
    )


def hold(file: Path, refusal: str) -> int:
    """Lock a file, and return the descriptor that holds the lock until it is closed.

    Raises:
        RunError: another process holds the lock; the error says `refusal`.
        OSError: the directory cannot be written, or its file system has no locks.
    """
    # Descriptors of `os.open` are not inheritable. If they were, a child that outlives a killed
    # supervisor by a moment would keep the lock.
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunError(refusal) from None
    return descriptor


def is_held(file: Path) -> bool | None:
    """Return whether a process of this machine holds the lock of a file, without locking it.

    The result is None if the system does not list its locks, or there is no such file.
    """
    locks = Path("/proc/locks")
    if not locks.is_file() or not file.is_file():
        return None
    node = str(file.stat().st_ino)
    return any(_is_of(line.split(), node) for line in locks.read_text().splitlines())


def _is_of(fields: list[str], node: str) -> bool:
    """Return whether a line of /proc/locks is about the inode `node`.

    Such a line is `1: FLOCK ADVISORY WRITE 815 fe:01:1311 0 EOF`, where 1311 is the inode.
    """
    return len(fields) > 5 and fields[1] == "FLOCK" and fields[5].split(":")[-1] == node
