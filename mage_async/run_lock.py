"""Who runs a run: one process at a time, from before its configuration is written to its end.

The kernel holds the lock (`flock`) while its file is open, so it ends with its process, however
that ends. `mage_async.launch` takes it and becomes the supervisor, which goes on with the same
descriptor: there is no moment between the two. Children are not given it: one that outlived a
killed supervisor by a moment would stand in the way of the next. Reading a run needs no lock.
"""

import fcntl
import os

from mage_async.errors import RunError
from mage_async.run_directory import RunDirectory


def take_lock(run: RunDirectory) -> int:
    """The descriptor that holds the lock until it is closed; not inheritable.

    Raises:
        RunError: another process runs this run.
        OSError: its directory cannot be written, or its file system has no locks.
    """
    descriptor = os.open(run.lock, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunError(
            f"{run.root} is being run by another process: wait for it or end it, or choose "
            "another --run-dir"
        ) from None
    return descriptor
