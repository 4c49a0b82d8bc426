"""A whole run by soft actor-critic, which its journal computes again to the same bits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess

CHANGES = (
    "environment.name=grid",
    "environment.options.size=4",
    "environment.options.turns=6",
    "learner.steps=4",
    "learner.minibatches=2",
    "methods.sac_glam.batch=8",
    "methods.sac_glam.capacity=40",
    "evaluation.every=0",
    "evaluation.episodes=1",
)
Start = Callable[..., "subprocess.Popen[str]"]
Mage = Callable[..., str]


@pytest.mark.slow
def test_a_replay_fills_the_buffer_as_the_run_did(start: Start, mage: Mage, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, "--actors", "2", "--method", "sac_glam", changes=CHANGES)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [step["replay_trials"] for step in steps] == [16.0, 32.0, 40.0, 40.0]
    assert steps[-1]["replay_age_max"] > 0.0
    assert "every digest agrees" in mage("replay", str(run_dir), timeout_s=500)
