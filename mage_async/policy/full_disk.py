"""Turn errors of writing a file into messages of one line: a full disk or /dev/shm, and a disk that
fails otherwise.

The learner waits for space on a full disk (`until_there_is_space` of
`services/mage_services/processes/process.py`).
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from mage_async.errors import DiskFull, RunError, first_line

DISK_ERRORS = (OSError, SafetensorError, RuntimeError)
"""Errors of the disk; torch raises a RuntimeError."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, and of a full quota."""


@contextmanager
def writing(what: str, advice: str = "make room, then --resume") -> Iterator[None]:
    """Turn an error of the disk into a `RunError` of one line.

    Args:
        advice: Remedy that the message names; the default is for a learner, whose run `--resume`
            continues.

    Raises:
        DiskFull: there is no space.
        RunError: the disk has failed otherwise.
    """
    try:
        yield
    except DISK_ERRORS as error:
        problem = f"cannot write {what}: {first_line(error)}"
        if lacks_space(error):
            raise DiskFull(problem, advice) from error
        raise RunError(f"{problem}; {advice}") from error


def lacks_space(error: BaseException | None) -> bool:
    """Return whether an error, or one that led to it, reports a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return True
        # safetensors, a library in Rust, gives the number in its text alone.
        if any(f"(os error {number})" in str(error) for number in _NO_SPACE):
            return True
        error = error.__cause__ or error.__context__
    return False
