"""A whole run, however its weights travel."""

import json
from pathlib import Path

import pytest

from mage_async.results.run_directory import RunDirectory


@pytest.mark.slow
@pytest.mark.parametrize(("way", "ranks"), [("tensor", 1), ("nccl", 1), ("nccl", 2)])
def test_a_run_ends_well_and_leaves_nothing_in_shared_memory(
    start, tmp_path: Path, way, ranks
) -> None:
    changes = ("learner.steps=4", f"transport.weights={way}", f"learner.ranks={ranks}")
    process = start(tmp_path / "run", "--actors", "2", changes=changes)
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    run = RunDirectory(tmp_path / "run")
    summary = json.loads(run.summary.read_text())
    assert summary["steps"] == 4
    assert summary["logprob_mismatch"]["max_abs"] < 1e-4  # the engines drew with these weights
    assert not run.shared_weights.exists()
