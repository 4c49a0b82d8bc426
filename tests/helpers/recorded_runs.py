"""Two small real runs of the quickstart, recorded, for tests that look at, copy or damage a run.

    python -m tests.helpers.recorded_runs      makes them anew, after a change of a run's files

`finished` has four steps of three groups of four trials, and evaluations; `other` has five steps
from another seed, and none.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from mage_async.results.run_directory import RunDirectory

FOLDER = Path(__file__).parent / "recorded"
SETTINGS = (
    "policy.hidden_size=16",
    "policy.mlp_size=32",
    "warm_start.steps=120",
    "warm_start.max_steps=120",
    "warm_start.gate=1.0",
    "warm_start.trials=256",
    "admission.groups_per_step=3",
    "admission.trials_per_group=4",
    "learner.checkpoint_every=2",
    "learner.keep_checkpoints=1",
    "evaluation.trials=12",
    "evaluation.final_trials=24",
)
RUNS = {
    "finished": ("learner.steps=4", "evaluation.every=2"),
    "other": ("learner.steps=5", "evaluation.every=0", "seed=1"),
}


def unpack(name: str, folder: Path) -> RunDirectory:
    """Copy a recorded run into a folder, under its name."""
    with tarfile.open(FOLDER / f"{name}.tar.xz") as recorded:
        recorded.extractall(folder, filter="data")
    return RunDirectory(folder / name)


def record(name: str, changes: tuple[str, ...]) -> None:
    """Run `mage train`, and keep what it leaves but its sockets."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / name
        command = [sys.executable, "-m", "mage_async.launch", "--run-dir", str(run_dir)]
        for change in (*SETTINGS, *changes):
            command += ["--set", change]
        subprocess.run(command, env=os.environ | {"XDG_CACHE_HOME": folder}, check=True)
        with tarfile.open(FOLDER / f"{name}.tar.xz", "w:xz") as recorded:
            recorded.add(run_dir, name, filter=_without_owner)


def _without_owner(file: tarfile.TarInfo) -> tarfile.TarInfo | None:
    file.uid = file.gid = 0
    file.uname = file.gname = "root"
    return file if file.isfile() or file.isdir() else None


if __name__ == "__main__":
    for run_name, run_changes in RUNS.items():
        record(run_name, run_changes)
