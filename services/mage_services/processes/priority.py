"""Lower the priority of actors, of the evaluator, and of processes that only watch a run."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
