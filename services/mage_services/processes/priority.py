"""Priorities: which process runs first where cores are few.

The trainer is one thread on the longest path of a run: a delay of the trainer delays every step,
while an actor that waits a little still has its groups played before they are needed. So actors
give way to the learner, the evaluator to both, and as much as the evaluator what only tells of a
run: its trackers, and the index of `mage view`. With enough cores priorities change nothing.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

ACTOR, EVALUATOR, WATCHER = 10, 15, 15
"""Niceness: of two processes on one core, the one that is 10 nicer gets a tenth of it."""
_AUTOGROUP = Path("/proc/self/autogroup")


def give_way(niceness: int) -> None:
    """Be at least this nice from now on; a process that is nicer already stays as it is.

    Linux may weigh sessions (`sched_autogroup`) instead of processes: a child has one of its own,
    which becomes as nice.
    """
    own = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, own))
    _weigh_session(os.getpriority(os.PRIO_PROCESS, 0))


def give_way_no_more() -> None:
    """Have this process's session weigh as much as any other again, where Linux weighs sessions. A
    process as such cannot become less nice without privileges.
    """
    _weigh_session(0)


def _weigh_session(niceness: int) -> None:
    if sys.platform.startswith("linux") and os.getsid(0) == os.getpid():
        with suppress(OSError):  # a kernel without it, or a file system that may not be written
            _AUTOGROUP.write_text(str(niceness))
