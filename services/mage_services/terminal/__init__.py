"""Show a run in the terminal."""

import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import TextIOWrapper
from typing import Any, TextIO

from mage_async.errors import DiskFull, first_line


@contextmanager
def printing() -> Iterator[None]:
    """Let the block print; once the reader of stdout has gone, discard the rest.

    Raises:
        BrokenPipeError: another pipe than stdout has lost its reader.
        DiskFull: the disk of stdout, or of another file, is full.
    """
    if isinstance(sys.stdout, TextIOWrapper):  # not in a test or a notebook
        # Where the locale lacks a character, such as ±, it is printed as "?".
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        if _has_reader(sys.stdout):
            raise
        _discard(sys.stdout)
    except OSError as error:
        from mage_async.policy.full_disk import lacks_space  # only a command that fails needs it

        if not lacks_space(error):
            raise
        try:
            sys.stdout.flush()
        except OSError:
            _discard(sys.stdout)
        raise DiskFull(first_line(error), "make room") from error


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let the block print; go on if stdout cannot be written, for example on a full disk or into a
    pipe whose reader has gone. stderr says so, and stdout once it can be written again.
    """
    output = LastingOutput(sys.stdout, _say_on_stderr)
    try:
        with redirect_stdout(output):
            yield
    finally:
        output.flush()
        if output.failure:
            _discard(sys.stdout)


class LastingOutput:
    """Write to a stream, and raise no error if that fails.

    Args:
        on_failure: Called with the reason of a failure, once until the next success.
    """

    def __init__(self, stream: TextIO, on_failure: Callable[[str], None]) -> None:
        self._stream, self._on_failure, self.failure = stream, on_failure, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, and return its length."""
        with self._reporting():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the buffer of the stream."""
        with self._reporting():
            self._stream.flush()
            if self.failure:
                self._stream.write(f"Lines may be missing above: {self.failure}\n")
                self.failure = ""

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report a failure to write, once until the next success."""
        try:
            yield
        except OSError as error:
            if not self.failure:
                self.failure = error.strerror or str(error)
                self._on_failure(self.failure)
            if isinstance(error, BrokenPipeError):
                _discard(self._stream)


class CountedOutput:
    """Replace stdout while a user's class is called: count the lines that it prints, and keep the
    first one.

    Args:
        stream: Has all else that a class may use, such as `buffer` and `fileno`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.num_lines, self.first = stream, 0, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Count the lines of a text."""
        if not self.num_lines:
            self.first = f"{self.first}{text}"[:1000].partition("\n")[0]
        self.num_lines += text.count("\n")
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Count the lines of some texts."""
        self.write("".join(lines))

    def sentence(self) -> str:
        """Return how many lines were printed, in words; "" for none."""
        if not self.num_lines:
            return ""
        return f"the class printed {self.num_lines:,} lines, the first: {self.first!r:.80}"


def _say_on_stderr(failure: str) -> None:
    """Print why stdout cannot be written."""
    with suppress(OSError):  # stderr may be the same file
        text = f"stdout cannot be written: {failure}. The command goes on without it"
        print(text, file=sys.stderr, flush=True)


def _has_reader(stream: TextIO) -> bool:
    """Return whether the output of a stream still has a reader."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)  # the system reports errors and hang-ups in any case
    return not poll.poll(0)


def _discard(stream: TextIO) -> None:
    """Discard all further output of a stream."""
    # Python flushes stdout once more at its end, which would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
