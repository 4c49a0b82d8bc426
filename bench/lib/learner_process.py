"""Run a benchmark with the environment variables of a run's learner."""

import os
import sys

from mage_services.processes.supervisor import LARGE_TENSORS


def become_learner(module: str, num_threads: int) -> None:
    """Restart this benchmark with the learner's environment variables, unless it has them already.

    The C allocator reads its thresholds when a process starts, so they cannot be set later.

    Args:
        module: The benchmark, as `python -m` takes it; it gets the same arguments.
    """
    if LARGE_TENSORS.items() <= os.environ.items():
        return
    command = [sys.executable, "-m", module, *sys.argv[1:]]
    variables = {**LARGE_TENSORS, "OMP_NUM_THREADS": str(num_threads)}
    os.execve(sys.executable, command, {**os.environ, **variables})
