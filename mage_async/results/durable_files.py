"""Durable files: written whole, and synced to the disk."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make a file's content, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(file: Path, text: str) -> None:
    """Replace a file's content, on the disk itself: all of it or, where that fails, nothing."""
    draft = file.with_name(f".{file.name}.part")
    draft.write_text(text)
    sync(draft)
    os.replace(draft, file)
    sync(file.parent)
