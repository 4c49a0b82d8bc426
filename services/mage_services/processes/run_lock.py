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
