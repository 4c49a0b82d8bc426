"""An actor on another machine: a network namespace of its own, and none of the run's files."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mage_async.errors import MageError
from mage_async.protocol.journal_records import Granted
from mage_async.protocol.messages import TrialResult
from mage_services.journal.reader import open_journal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Start = Callable[..., Any]
HERE, THERE, PORT = "10.213.7.1", "10.213.7.2", 5517
MAGE = "from mage_async.launch import main; main()"
SETTINGS = ("learner.steps=100000", "evaluation.every=0", "learner.checkpoint_every=5")


@pytest.fixture
def namespace() -> Iterator[str]:
    """Another network, with one cable to ours."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2 and root")
    name = f"mage{os.getpid()}"
    ours, theirs = f"{name}a"[-15:], f"{name}b"[-15:]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as fault:
        pytest.skip(f"no network namespace can be made here: {fault.stderr.decode()}")
    try:
        ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        ip("addr", "add", f"{HERE}/24", "dev", ours)
        ip("link", "set", ours, "up")
        ip("-n", name, "addr", "add", f"{THERE}/24", "dev", theirs)
        ip("-n", name, "link", "set", theirs, "up")
        yield name
    finally:
        ip("netns", "delete", name)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Keys, and in `away` the two files that the other machine is given."""
    made, away = tmp_path / "keys", tmp_path / "away"
    subprocess.run([sys.executable, "-c", MAGE, "keys", "new", str(made)], check=True)
    away.mkdir()
    for name in ("learner.key", "actor.key_secret"):
        shutil.copy2(made / name, away / name)
    return made


def played_by(run_dir: Path, name: str) -> tuple[set[int], dict[int, str]]:
    """Groups of which `name` was granted and the learner holds a trial; the last owner of each
    group."""
    owners: dict[int, str] = {}
    played: set[int] = set()
    try:
        for record in open_journal(run_dir / "journal").records(0):
            if isinstance(record, Granted):
                owners[record.grant.grant] = record.peer or ""
            elif isinstance(record, TrialResult) and owners.get(record.grant, "").startswith(name):
                played.add(record.grant)
    except (MageError, FileNotFoundError):  # none is there yet
        return set(), {}
    return played, owners


def test_an_actor_far_away_plays_on_after_a_restart_and_gives_its_groups_back(
    start: Start, namespace: str, keys: Path, tmp_path: Path, processes_of: Callable[..., list[int]]
) -> None:
    run_dir, address = tmp_path / "run", f"tcp://{HERE}:{PORT}"
    transport = (f"transport.address={address}", f"transport.keys={keys}")
    run = start(run_dir, "--actors", "1", changes=(*SETTINGS, *transport))
    far = start_far_away(namespace, address, keys.parent / "away", run_dir)
    seen = []
    try:
        for stage in (rejoins, leaves, is_missed):
            for line in run.stdout:
                seen.append(line)
                if stage(run_dir, far):
                    break
            else:
                pytest.fail(f"before {stage.__name__}: {''.join(seen[-30:])} {far.poll()}")
        output, _ = far.communicate(timeout=30)
        assert far.returncode == 0, output
        assert "left by SIGINT" in output
    finally:
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=60)
        far.kill()


def start_far_away(namespace: str, address: str, keys: Path, run_dir: Path) -> Any:
    """An actor in the other network; an empty folder lies over the run's."""
    hidden = f'mkdir -p {run_dir} && mount -t tmpfs none {run_dir} && exec "$@"'
    command = ["ip", "netns", "exec", namespace, "unshare", "-m", "sh", "-c", hidden, "sh"]
    command += [sys.executable, "-c", MAGE, "actor", "--connect", address, "--name", "far"]
    return subprocess.Popen(
        [*command, "--keys", str(keys)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


BEFORE: dict[str, set[int]] = {}


def rejoins(run_dir: Path, far: Any) -> bool:
    """It has played; then the learner is killed."""
    played, _ = played_by(run_dir, "far/")
    if len(played) < 3:
        return False
    BEFORE["kill"] = played
    (learner,) = processes("mage_services.learner.learner", run_dir)
    os.kill(learner, signal.SIGKILL)
    return True


def leaves(run_dir: Path, far: Any) -> bool:
    """It has played for the new learner, too; then it is told to leave."""
    played, _ = played_by(run_dir, "far/")
    if len(played - BEFORE["kill"]) < 3 or max(played) <= max(BEFORE["kill"]):
        return False
    far.send_signal(signal.SIGINT)
    return True


def is_missed(run_dir: Path, far: Any) -> bool:
    """It holds no group any more that is not played."""
    played, owners = played_by(run_dir, "far/")
    return not {grant for grant, owner in owners.items() if owner.startswith("far/")} - played


def processes(module: str, run_dir: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if module.encode() in words and str(run_dir).encode() in words:
                found.append(int(entry.name))
    return found
