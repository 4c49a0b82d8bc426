"""Count the CPU cores of a process."""

import os


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    # Only Linux says which cores a process may use, such as those of a container.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
