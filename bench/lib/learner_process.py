"""Run a benchmark in a process with the environment of a run's learner."""

import os
import sys

from mage_services.processes.supervisor import LARGE_TENSORS


def become_learner(module: str, num_threads: int) -> None:
    """Start this benchmark anew with the learner's environment, unless it has it already.

    The thresholds of the allocator are read when a process starts, so they cannot be set later.

    Args:
        module: the benchmark, as `python -m` takes it; it is given the same arguments.
    """
    if LARGE_TENSORS.items() <= os.environ.items():
        return
    command = [sys.executable, "-m", module, *sys.argv[1:]]
    variables = {**LARGE_TENSORS, "OMP_NUM_THREADS": str(num_threads)}
    os.execve(sys.executable, command, {**os.environ, **variables})
