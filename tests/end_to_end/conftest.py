"""Whole runs, small: one warm start is shared by all of them through the cache."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SMALL = (
    "warm_start.steps=8",
    "warm_start.gate=1.0",
    "warm_start.max_steps=8",
    "warm_start.trials=64",
    "admission.groups_per_step=4",
    "admission.trials_per_group=4",
    "learner.checkpoint_every=2",
    "evaluation.every=2",
    "evaluation.trials=24",
    "evaluation.final_trials=36",
)
Start = Callable[..., "subprocess.Popen[str]"]
Mage = Callable[..., str]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A process environment with a cache of its own."""
    return os.environ | {
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        "PYTHONUNBUFFERED": "1",
    }


@pytest.fixture(scope="session")
def start(environment: dict[str, str]) -> Start:
    """Start `mage` with the small settings and more; its output is piped."""

    def start_run(run_dir: Path, *arguments: str, changes: tuple[str, ...] = ()) -> Any:
        command = [sys.executable, "-m", "mage_async.launch", "--run-dir", str(run_dir), *arguments]
        for change in (*SMALL, *changes):
            command += ["--set", change]
        return subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    return start_run


@pytest.fixture(scope="session")
def mage(environment: dict[str, str]) -> Mage:
    """Run a command of `mage` to its end, which is a good one; what it printed."""

    def run_command(*arguments: str, timeout_s: float = 110) -> str:
        command = [sys.executable, "-m", "mage_async.launch", *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run_command


@pytest.fixture(scope="session")
def finished(start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of four steps with two actors, and what it printed."""
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    process = start(run_dir, "--actors", "2", changes=("learner.steps=4",))
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    return run_dir, output


@pytest.fixture
def summary(finished: tuple[Path, str]) -> dict[str, Any]:
    """The finished run's summary."""
    return json.loads((finished[0] / "summary.json").read_text())


@pytest.fixture(scope="session")
def processes_of() -> Callable[[Path], list[int]]:
    """Ids of living processes whose command line names a run."""
    return _processes_of


def _processes_of(run_dir: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(run_dir).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found
