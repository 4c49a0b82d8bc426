"""The parent-death signal: no process of a run outlives the process that started it."""

import ctypes
import os
import signal
import sys

PARENT = "MAGE_PAIRED_PARENT"
"""Names the variable with the process id of the process that started a paired one."""
_PR_SET_PDEATHSIG = 1
EXIT_ORPHANED = 2


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process with its parent, whose process id is `parent`."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(EXIT_ORPHANED)
