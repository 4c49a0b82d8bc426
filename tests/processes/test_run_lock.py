"""Whether the lock of a file is held is read from the system's list of locks."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mage_async.errors import RunError
from mage_services.processes.run_lock import INITIAL_NAMESPACE, _is_of, hold, holding, is_held


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


def test_a_lock_of_a_killed_process_is_free_for_the_one_that_waits(tmp_path: Path) -> None:
    file, said = tmp_path / "lock", list[str]()
    code = f"import sys; {SEEN}hold(file, ''); print(1, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(file)]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"1\n"

        def say(line: str) -> None:
            said.append(line)
            holder.kill()

        with holding(file, "it", say):
            assert said == ["waiting for it"]
            with pytest.raises(RunError, match="held"):
                hold(file, "held")


def test_a_lock_of_the_same_inode_on_another_device_is_another_lock() -> None:
    line = ["1:", "FLOCK", "ADVISORY", "WRITE", "815", "fe:01:1311", "0", "EOF"]
    assert _is_of(line, ":fe:01:1311")
    assert not _is_of(line, ":fe:02:1311")
    assert _is_of(line, ":1311")  # the system does not say the device
    assert not _is_of(line, ":311")
    assert not _is_of(["1:", "->", *line[1:]], ":fe:01:1311")  # it waits for the lock


def test_a_file_system_without_locks_leaves_no_descriptor_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = list[int]()

    def flock(descriptor: int, operation: int) -> None:
        refused.append(descriptor)
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="No locks available"):
        hold(tmp_path / "lock", "held")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(refused[0])


NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
"""Command that runs another in a PID namespace of its own, as a container does."""
SEEN = "from mage_services.processes.run_lock import *; file = Path(sys.argv[1]); "


def in_namespace(code: str, file: Path) -> str:
    command = [*NAMESPACE, sys.executable, "-c", f"import sys; {SEEN}{code}", str(file)]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, check=True
    ).stdout.strip()


def can_unshare() -> bool:
    if shutil.which(NAMESPACE[0]) is None or not Path("/proc/locks").is_file():
        return False
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="the system makes no PID namespaces for users")
def test_a_lock_of_another_container_is_unknown_and_one_of_the_own_is_known(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    descriptor = hold(file, "held")
    assert in_namespace("print(is_held(file))", file) == "None"
    os.close(descriptor)
    # The lock is free, but a container cannot know this of a lock that was taken outside.
    assert in_namespace("print(is_held(file))", file) == "None"
    code = "d = hold(file, ''); print(is_held(file)); os.close(d); print(is_held(file))"
    assert in_namespace(code, file).split() == ["True", "False"]
    assert is_held(file) is False or os.readlink("/proc/self/ns/pid") != INITIAL_NAMESPACE
