"""Count the CPU cores and the memory that a process may use."""

import math
import os
from collections.abc import Iterator
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
