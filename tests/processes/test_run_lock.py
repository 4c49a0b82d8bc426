"""Whether the lock of a file is held is read from the system's list of locks."""

import os
from pathlib import Path

import pytest

from mage_services.processes.run_lock import _is_of, hold, is_held


@pytest.mark.skipif(not Path("/proc/locks").is_file(), reason="the system lists no locks")
@pytest.mark.parametrize("root", ["", "/dev/shm"])
def test_a_lock_is_seen_until_it_is_released(root: str, tmp_path: Path) -> None:
    file = Path(root or tmp_path) / f"{tmp_path.name}-{os.getpid()}.lock"
    file.touch()
    try:
        assert is_held(file) is False
        descriptor = hold(file, "held")
        assert is_held(file) is True
        os.close(descriptor)
        assert is_held(file) is False
    finally:
        file.unlink()


def test_a_lock_of_the_same_inode_on_another_device_is_another_lock() -> None:
    line = ["1:", "FLOCK", "ADVISORY", "WRITE", "815", "fe:01:1311", "0", "EOF"]
    assert _is_of(line, ":fe:01:1311")
    assert not _is_of(line, ":fe:02:1311")
    assert _is_of(line, ":1311")  # the system does not say the device
    assert not _is_of(line, ":311")
    assert not _is_of(["1:", "->", *line[1:]], ":fe:01:1311")  # it waits for the lock
