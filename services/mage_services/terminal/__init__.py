"""Show a run in the terminal."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO


@contextmanager
def printing() -> Iterator[None]:
    """Let the block print; once the reader of stdout has gone, discard the rest."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let the block print; go on if stdout cannot be written, for example on a full disk or into a
    pipe whose reader has gone. stderr says so, and stdout once it can be written again.
    """
    output = _LastingOutput(sys.stdout)
    try:
        with redirect_stdout(output):
            yield
    finally:
        output.flush()
        if output.failure:
            _discard(sys.stdout)


class _LastingOutput:
    """Write to a stream, and raise no error if that fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.failure = stream, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, and return its length."""
        with self._reporting():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what waits in the buffer of the stream."""
        with self._reporting():
            self._stream.flush()
            if self.failure:
                self._stream.write(f"Lines may be missing above: {self.failure}\n")
                self.failure = ""

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report a failure to write on stderr, once until the next success."""
        try:
            yield
        except OSError as error:
            if not self.failure:
                self.failure = error.strerror or str(error)
                text = f"stdout cannot be written: {self.failure}. The command goes on without it"
                with suppress(OSError):  # stderr may be the same file
                    print(text, file=sys.stderr, flush=True)
            if isinstance(error, BrokenPipeError):
                _discard(self._stream)


def _discard(stream: TextIO) -> None:
    """Discard what a stream writes from now on."""
    # Python flushes stdout once more at its end, which would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
