"""One configuration on either engine: the quickstart's model, trained for a few steps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines

SMALL = (
    "learner.steps=3",
    "warm_start.steps=8",
    "warm_start.gate=1.0",
    "warm_start.max_steps=8",
    "warm_start.trials=64",
    "admission.groups_per_step=2",
    "admission.trials_per_group=4",
    "admission.grant_deadline_s=600",
    "engine.max_contexts=16",
    "evaluation.every=0",
    "evaluation.final_trials=12",
    "supervision.silence_s=120",
)
STEPS = 3


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One warm start for both runs, through the cache."""
    return os.environ | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


def played(kind: str, root: Path, environment: dict[str, str]) -> RunDirectory:
    """A run that has ended well."""
    command = [sys.executable, "-m", "mage_async.launch", "--run-dir", str(root), "--actors", "1"]
    for change in (*SMALL, f"engine.kind={kind}"):
        command += ["--set", change]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=560, check=False
    )
    logs = "".join(file.read_text()[-3000:] for file in sorted((root / "logs").glob("*")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return RunDirectory(root)


def names(run: RunDirectory) -> set[str]:
    """Names of the metrics of all steps, without those that depend on time: by age there are those
    of the ages that came up, and a step that ends between two heartbeats has no idle share.
    """
    found = {name for line in read_lines(run.metrics) for name in line}
    return {name for name in found if not re.search(r"_age_\d+$|^actors_idle_share$", name)}


@pytest.mark.timeout(600)
def test_the_same_configuration_trains_on_either_engine_and_says_the_same(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    embedded = played("embedded", tmp_path / "embedded", environment)
    served = played("sglang", tmp_path / "sglang", environment)
    assert names(served) == names(embedded)
    for run in (embedded, served):
        summary = json.loads(run.summary.read_text())
        assert summary["steps"] == STEPS
        assert summary["logprob_mismatch"]["max_abs"] < 1e-4
        lines = read_lines(run.metrics)
        assert [line["exact_version_share"] for line in lines] == [1.0] * STEPS
        assert all(line["extension_faults"] == 0 for line in lines)
        assert all(line["prefix_hit_rate_episode_3"] > 0.8 for line in lines)
        assert json.loads(run.evaluation.read_text())["version"] == STEPS
