"""Lock a run, so that no two `mage train` processes run the same directory.

`mage train` takes the lock before it writes the configuration and holds it to its end. The kernel
releases it (`flock`) when the process ends, however that happens. Reading a run needs no lock.
"""

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mage_async.errors import RunError
from mage_async.results.run_directory import RunDirectory
from mage_services.processes.child_process import waiting_notice

INITIAL_NAMESPACE = "pid:[4026531836]"
"""Linux's name of the PID namespace of a machine outside its containers."""
WAITING_S = 30.0
"""Seconds between two lines about a lock that is waited for."""


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


@contextmanager
def holding(file: Path, what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a file within the block. While another process holds it, wait for `what`,
    and say so at once and every `WAITING_S` seconds.

    Raises:
        OSError: as `hold`.
    """
    try:
        descriptor = hold(file, "")
    except RunError:
        say(f"waiting for {what}")
        with waiting_notice(what, say, WAITING_S):
            descriptor = hold(file)
    try:
        yield
    finally:
        os.close(descriptor)


def hold(file: Path, refusal: str | None = None) -> int:
    """Lock a file, and return the descriptor that holds the lock until it is closed.

    Args:
        refusal: Error if another process holds the lock; None: wait until it is free.

    Raises:
        RunError: another process holds the lock; the error says `refusal`.
        OSError: the directory cannot be written, or its file system has no locks.
    """
    # Descriptors of `os.open` are not inheritable. If they were, a child that outlives a killed
    # supervisor by a moment would keep the lock.
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if refusal is None else fcntl.LOCK_NB))
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise RunError(refusal) from None
        raise
    os.truncate(descriptor, 0)
    os.write(descriptor, _pid_namespace().encode())  # for `is_held`
    return descriptor


def is_held(file: Path) -> bool | None:
    """Return whether a process of this machine holds the lock of a file, without locking it.

    The result is None if the system does not list its locks, there is no such file, or a process of
    another container may hold the lock.
    """
    locks = Path("/proc/locks")
    if not locks.is_file() or not file.is_file():
        return None
    place = _place(file)
    if any(_is_of(line.split(), place) for line in locks.read_text().splitlines()):
        return True
    # The list has only the locks of this process's PID namespace and of the namespaces below it. A
    # lock that is not in the list is not held if this process is in the initial namespace, above
    # all others, or in the namespace that wrote the lock.
    seen = (INITIAL_NAMESPACE, file.read_text())
    return False if _pid_namespace() in seen else None


def _pid_namespace() -> str:
    """Return the name of this process's PID namespace; "" where there are none."""
    link = Path("/proc/self/ns/pid")
    return os.readlink(link) if link.is_symlink() else ""


def _place(file: Path) -> str:
    """Return the device and inode of a file as /proc/locks writes them, with a colon in front, such
    as `:fe:01:1311`; without the device, `:1311`, if the system hides it.
    """
    # The device is that of the file system. `st_dev` is another one in a subvolume of btrfs, and
    # for some files of overlayfs.
    with file.open("rb") as opened:
        node = os.fstat(opened.fileno()).st_ino
        described = Path(f"/proc/self/fdinfo/{opened.fileno()}").read_text()
    mount = re.search(r"^mnt_id:\s*(\d+)", described, re.M)
    mounts = Path("/proc/self/mountinfo").read_text()
    # A sandbox may show no mounts, or other mounts.
    found = mount and re.search(rf"^{mount[1]} \d+ (\d+):(\d+) ", mounts, re.M)
    return f":{int(found[1]):02x}:{int(found[2]):02x}:{node}" if found else f":{node}"


def _is_of(fields: list[str], place: str) -> bool:
    """Return whether a line of /proc/locks is a lock of the file at this `_place`.

    Such a line is `1: FLOCK ADVISORY WRITE 815 fe:01:1311 0 EOF`.
    """
    return len(fields) > 5 and fields[1] == "FLOCK" and f":{fields[5]}".endswith(place)
