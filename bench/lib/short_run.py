"""Train a whole run of a few steps, and time the steps without imports and warm start."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines

FIRST = 4
"""Number of steps that are not timed: after them, the pipeline is full."""
SETTINGS = (
    "evaluation.every=0",
    "evaluation.final_trials=24",
    "warm_start.steps=20",
    "warm_start.gate=1.0",
    "warm_start.max_steps=20",
    "warm_start.trials=200",
)
"""Settings without evaluation, and with a very short warm start.

A gate of 1.0 is no gate: the warm start ends after its steps, whatever the policy has learned.
"""


def command(run_dir: Path, steps: int, *settings: str, config: str = "quickstart") -> list[str]:
    """Return the command that trains `steps` steps, with further `KEY=VALUE` settings."""
    changes = [*SETTINGS, f"learner.steps={steps}", *settings]
    start = [sys.executable, "-m", "mage_async.launch", "--config", config]
    return [*start, "--run-dir", str(run_dir), *(f"--set={change}" for change in changes)]


def timed(
    run_dir: Path,
    steps: int,
    *settings: str,
    config: str = "quickstart",
    variables: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> dict[str, float]:
    """Train `steps` steps, and return their times.

    Only the time from commit `FIRST + 1` to the last one counts, without imports and warm start.

    Args:
        variables: Environment variables, added to those of this process.
        folder: Folder in which the command is started.

    Returns:
        Trials per second, mean seconds of a step in the trainer, and CPU seconds of all processes
        from the start of the command to its end.
    """
    run = RunDirectory(run_dir.resolve())
    process = subprocess.Popen(
        command(run.root, steps, *settings, config=config),
        stdout=subprocess.DEVNULL,
        env=os.environ | (variables or {}),
        cwd=folder,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    lines = list(read_lines(run.metrics))
    # All steps train equally many trials, the untimed ones too.
    trials_of_a_step = json.loads(run.learner.read_text())["totals"]["trials"] / len(lines)
    seconds = lines[-1]["time_s"] - lines[FIRST]["time_s"]
    return {
        "trials_per_s": trials_of_a_step * (len(lines) - 1 - FIRST) / seconds,
        "train_s": statistics.mean(line["train_s"] for line in lines[FIRST + 1 :]),
        "processor_s": usage.ru_utime + usage.ru_stime,
    }
