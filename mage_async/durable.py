"""Having what was written on the disk itself."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make a file's content, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
