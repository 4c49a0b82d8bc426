"""Processes of this machine, by the words of their command lines (Linux, `/proc`)."""

from collections.abc import Iterator
from pathlib import Path


def command_lines() -> Iterator[tuple[int, list[str]]]:
    """Process id and command line of every process that lives."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended since
        yield int(entry.name), words.decode(errors="replace").split("\0")
