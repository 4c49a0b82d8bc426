"""Durable files: replace a file atomically, and sync it to the disk."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Sync a file's content, or the names in a folder, to the disk (`fsync`)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(file: Path, text: str) -> None:
    """Replace the content of a file durably: a crash leaves the old or the new content."""
    draft = file.with_name(f".{file.name}.part")
    draft.write_text(text)
    sync(draft)
    os.replace(draft, file)
    sync(file.parent)
