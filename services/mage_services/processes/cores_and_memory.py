"""Count the CPU cores and the memory that a process may use."""

import os
from pathlib import Path


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    # Only Linux says which cores a process may use, such as those of a container.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may use: those of the machine, or fewer where a
    container, a batch system or systemd limits them.

    Args:
        root: Directory that has `proc` and `sys`.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    groups = root / "proc/self/cgroup"
    # Only Linux has control groups. Each line has a number, controllers, and a path.
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        mount, name = root / "sys/fs/cgroup", "memory.max"
        if controllers:  # the first version of control groups; the second names no controllers
            mount, name = mount / "memory", "memory.limit_in_bytes"
            if "memory" not in controllers.split(","):
                continue
        folder = mount / path.lstrip("/")
        # The limits of all groups above hold too. A container may mount its own group alone, at
        # `mount`, and yet read the path that the machine has for it.
        for each in (folder, *folder.parents):
            file = each / name
            if not each.is_relative_to(mount) or not file.exists():
                continue
            if (limit := file.read_text().strip()) != "max":
                limits.append(int(limit))
    return min(limits)
