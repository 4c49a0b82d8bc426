"""Whole runs beside trackers that hang and raise: no step, no end and no Ctrl-C waits for them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_document, read_lines
from mage_services.tracking.tracker_worker import read_position

SETTINGS = (
    "warm_start.steps=2",
    "warm_start.gate=1.0",
    "warm_start.max_steps=2",
    "warm_start.trials=64",
    "admission.groups_per_step=2",
    "admission.trials_per_group=2",
    "evaluation.every=0",
    "evaluation.final_trials=24",
    "tracking.wandb.project=project",
)
pytestmark = pytest.mark.timeout(300)
END_S = 20.0
"""From Ctrl-C to the end of `mage train` on a loaded machine; the tracker would go on for 60."""
Put = Callable[[str], None]


def started(run: RunDirectory, steps: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "mage_async.launch", "--actors", "1"]
    command += ["--run-dir", str(run.root), f"--set=learner.steps={steps}"]
    command += [f"--set={setting}" for setting in SETTINGS]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """A run to be started; what is left of its tracker's process in the end is killed."""
    yield RunDirectory(tmp_path / "run")
    for entry in Path("/proc").iterdir():
        own = f"mage_services.tracking.tracker_worker\0{tmp_path}".encode()
        if entry.name.isdigit() and own in _command(entry):
            os.kill(int(entry.name), signal.SIGKILL)


def _command(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def ended(process: Any, within_s: float = 280.0) -> str:
    output, _ = process.communicate(timeout=within_s)
    return output


@pytest.mark.slow
def test_a_run_ends_well_beside_a_tracker_that_hangs(run: RunDirectory, wandb_that: Put) -> None:
    wandb_that("hangs")
    output = ended(started(run, 4))
    assert read_document(run.summary)["complete"] is True
    assert len(read_lines(run.metrics)) == 4
    assert "wandb has received 0 steps so far, and receives more for up to 60 s" in output


@pytest.mark.slow
def test_a_run_ends_well_beside_a_tracker_that_raises(run: RunDirectory, wandb_that: Put) -> None:
    wandb_that("raises")
    output = ended(started(run, 4))
    assert read_document(run.summary)["complete"] is True
    assert "wandb has received 0 steps so far (OSError: no route to the tracker)" in output
    position = read_position(run, "wandb")
    assert position is not None
    assert position.num_faults > 0


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_a_tracker_that_hangs(run: RunDirectory, wandb_that: Put) -> None:
    wandb_that("hangs")
    process = started(run, 10_000)
    assert process.stdout is not None
    for line in process.stdout:
        if "phase=training" in line:
            break
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    ended(process)
    assert time.monotonic() - began < END_S
    assert process.returncode == 128 + signal.SIGINT
