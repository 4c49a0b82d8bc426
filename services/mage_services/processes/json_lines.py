"""Files of a JSON document a line, to which more than one process may append."""

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO


def append_lines(file: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append a line a record; first, what is left of a last line that was not finished is cut off.

    A full disk or a kill in the middle of a write leaves such a line, and whatever was appended to
    it could not be read. Another process that writes just now is waited for.
    """
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    with file.open("ab+") as out:
        fcntl.flock(out, fcntl.LOCK_EX)  # until it is closed, after the last byte
        out.truncate(_end_of_lines(out))
        out.write(data)


def _end_of_lines(file: BinaryIO) -> int:
    """How many bytes the finished lines have."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if file.read() in (b"", b"\n"):
        return size
    file.seek(0)
    return file.read().rfind(b"\n") + 1
