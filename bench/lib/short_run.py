"""A whole run of a few steps, without what dilutes its timing."""

import sys
from pathlib import Path

SETTINGS = (
    "evaluation.every=0",
    "evaluation.final_trials=24",
    "warm_start.steps=20",
    "warm_start.gate=1.0",
    "warm_start.max_steps=20",
    "warm_start.trials=200",
)
"""No evaluation, hardly a warm start."""


def command(run_dir: Path, steps: int, *settings: str, config: str = "quickstart") -> list[str]:
    """What trains so many steps, with `KEY=VALUE` settings on top."""
    changes = [*SETTINGS, f"learner.steps={steps}", *settings]
    start = [sys.executable, "-m", "mage_async.launch", "--config", config]
    return [*start, "--run-dir", str(run_dir), *(f"--set={change}" for change in changes)]
