"""The lock of a run: one process at a time, from before its configuration is written to its end.

The kernel holds the lock (`flock`) while its file is open, so it ends with its process, however
that ends. `mage train` takes it and then supervises the run. Children are not given it: one that
outlived a killed supervisor by a moment would stand in the way of the next. Reading a run needs no
lock.
"""

import fcntl
import os
from pathlib import Path

from mage_async.errors import RunError
from mage_async.results.run_directory import RunDirectory


def take_lock(run: RunDirectory) -> int:
    """Hold a run's lock; as `hold`.

    Raises: RunError: another process runs this run.
    """
    return hold(
        run.lock,
        f"{run.root} is being run by another process: wait for it or end it, or choose "
        "another --run-dir",
    )


def hold(file: Path, refusal: str) -> int:
    """The descriptor that holds the lock of a file until it is closed; not inheritable.

    Raises:
        RunError: another process holds it: `refusal`.
        OSError: the directory cannot be written, or its file system has no locks.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunError(refusal) from None
    return descriptor


def is_held(file: Path) -> bool | None:
    """Whether a process of this machine holds the lock of a file, which is not touched; None where
    the system does not list locks.
    """
    locks = Path("/proc/locks")
    if not locks.is_file() or not file.is_file():
        return None
    node = str(file.stat().st_ino)
    return any(_is_of(line.split(), node) for line in locks.read_text().splitlines())


def _is_of(fields: list[str], node: str) -> bool:
    """Whether a line such as `1: FLOCK ADVISORY WRITE 815 fe:01:1311 0 EOF` is of a file."""
    return len(fields) > 5 and fields[1] == "FLOCK" and fields[5].split(":")[-1] == node
