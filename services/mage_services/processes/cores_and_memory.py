"""Count the CPU cores and the memory that a process may use; lower the priority of actors, of the
evaluator, and of processes that only watch a run.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def num_cores(root: Path = Path("/")) -> int:
    """Return the number of CPU cores that this process may use: those it may run on, or fewer where
    a container, a batch system or systemd limits its time. A part of a core counts as one.

    Args:
        root: Directory that has `proc` and `sys`.
    """
    # Only Linux says which cores a process may run on.
    may_run_on = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    limits = [len(may_run_on) or os.cpu_count() or 1]
    for folder, is_first_version in _control_groups(root, "cpu"):
        if is_first_version:
            files = [folder / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
            texts = [file.read_text().strip() for file in files if file.exists()]
        else:
            file = folder / "cpu.max"
            texts = file.read_text().split() if file.exists() else []
        # Microseconds of time in each period. -1 and "max" stand for no limit.
        if len(texts) == 2 and texts[0] not in ("-1", "max"):
            limits.append(math.ceil(int(texts[0]) / int(texts[1])))
    return max(1, min(limits))


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may use: those of the machine, or fewer where a
    container, a batch system or systemd limits them.

    Args:
        root: Directory that has `proc` and `sys`.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder, is_first_version in _control_groups(root, "memory"):
        file = folder / ("memory.limit_in_bytes" if is_first_version else "memory.max")
        if file.exists() and (limit := file.read_text().strip()) != "max":
            limits.append(int(limit))
    return min(limits)


def _control_groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the directory of each control group that may limit this process, and whether it is a
    group of cgroup v1. Other systems than Linux have none.
    """
    groups = root / "proc/self/cgroup"
    # Each line has a number, controllers, and a path.
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if controllers:  # cgroup v2 names no controllers
            mount /= controller
            if controller not in controllers.split(","):
                continue
        folder = mount / path.lstrip("/")
        # The limits of all groups above hold too. In a container `mount` may be the container's own
        # group, while `proc/self/cgroup` states the path of this group on the host: then `folder`
        # does not exist, but `mount` is one of its parents.
        for each in (folder, *folder.parents):
            if each.is_relative_to(mount):
                yield each, bool(controllers)


# The trainer is one thread on the critical path of a run: a delay of the trainer delays every step.
# An actor that waits a little still has its groups played before they are needed. So actors have a
# lower priority than the learner. The evaluator, and processes that only watch a run (its trackers,
# and the indexer of `mage view`), have a lower priority than both. With enough cores priorities
# change nothing.
ACTOR, EVALUATOR, WATCHER = 10, 15, 15
"""Niceness of actors, of the evaluator, and of processes that only watch a run. Of two processes on
one core, the one whose niceness is higher by 10 gets about a tenth of the core.
"""
_NICENESS_AT_START = os.getpriority(os.PRIO_PROCESS, 0)
_AUTOGROUP = Path("/proc/self/autogroup")
"""File with the niceness of this process's session, which Linux may schedule as one group."""


def lower_priority(niceness: int) -> None:
    """Raise the niceness of this process to at least `niceness`.

    With `sched_autogroup` Linux shares CPU time between sessions, not processes, so that niceness
    alone has no effect between sessions. If this process leads its session, the session gets the
    same niceness.
    """
    own = max(niceness, os.getpriority(os.PRIO_PROCESS, 0))
    os.setpriority(os.PRIO_PROCESS, 0, own)
    _set_session_niceness(own)


def restore_priority() -> None:
    """Undo `lower_priority`, also for the processes that this one has started since.

    Every process may reset the niceness of its session. The threads keep their niceness if the
    process lacks the privilege to lower it.
    """
    _set_session_niceness(0)
    with suppress(PermissionError):
        for thread in _threads(os.getpid()):
            with suppress(ProcessLookupError):  # it has ended since
                os.setpriority(os.PRIO_PROCESS, thread, _NICENESS_AT_START)


def _threads(pid: int) -> Iterator[int]:
    """Yield the ids of the threads of a process and of its descendants; on systems other than
    Linux, where a niceness belongs to the process, the id of the process alone.
    """
    yield pid
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        yield int(folder.name)
        with suppress(OSError):  # it has ended since
            for child in (folder / "children").read_text().split():
                yield from _threads(int(child))


def _set_session_niceness(niceness: int) -> None:
    """Set the niceness of the session, if this process leads it and the kernel has such a value."""
    if sys.platform.startswith("linux") and os.getsid(0) == os.getpid():
        with suppress(OSError):  # a kernel without `sched_autogroup`, or a read-only file system
            _AUTOGROUP.write_text(str(niceness))
