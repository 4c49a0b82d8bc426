"""A run whose environment fails all the time, or whose actor is killed, trains what it would have
trained without faults.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mage_async.protocol.journal_records import Commit, Dropped
from mage_async.protocol.messages import TrialResult
from mage_async.results.run_directory import RunDirectory
from mage_services.journal.reader import open_journal

Start = Callable[..., Any]
FRAIL = """
import os
import random
import sys

SOURCE = random.Random(os.urandom(8))
IS_ACTOR = "mage_services.actor.actor" in sys.orig_argv
SHARE = {"reset": 0.05, "step": 0.01}


def call(name):
    if IS_ACTOR and "frail" == os.environ.get("LOCK") and SOURCE.random() < SHARE[name]:
        raise ConnectionError(f"{name} was not answered")


class Lock:
    \"\"\"A lock opens with one digit from 1 to 3.\"\"\"

    legal_actions = ("1", "2", "3")
    words = (*"123", "closed", "open")
    max_turns = 4

    def reset(self, seed, task):
        call("reset")
        self.code = random.Random(task).choice("123")
        return "closed"

    def step(self, action):
        call("step")
        is_right = action == self.code
        return "open" if is_right else "closed", float(is_right), is_right
"""
CHANGES = (
    "environment.name=frail_lock:Lock",
    "warm_start=none",
    "engine.arithmetic=exact",
    "admission.rule=sync",
    "admission.max_staleness=0",
    "learner.steps=6",
    "learner.checkpoint_every=6",
    "evaluation.every=0",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_faults_drop_no_group_and_change_no_bit_of_the_weights(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    (tmp_path / "frail_lock.py").write_text(FRAIL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(environment, "PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    digests, retries = {}, {}
    for kind in ("sound", "frail"):
        monkeypatch.setitem(environment, "LOCK", kind)
        process = start(tmp_path / kind, "--actors", "2", changes=CHANGES)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        records = list(open_journal(RunDirectory(tmp_path / kind).journal).records())
        assert not [record for record in records if isinstance(record, Dropped)]
        digests[kind] = [record.digest for record in records if isinstance(record, Commit)]
        retries[kind] = sum(
            record.trial.num_retries for record in records if isinstance(record, TrialResult)
        )
    assert len(digests["sound"]) == 6
    assert digests["frail"] == digests["sound"]
    assert retries["sound"] == 0 < retries["frail"]


@pytest.mark.slow
def test_a_killed_actor_costs_the_run_nothing_but_time(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    process = start(run_dir, "--actors", "2", changes=("learner.steps=30", "evaluation.every=30"))
    assert process.stdout is not None
    for line in process.stdout:
        if "step=" in line and "phase" not in line and "warm_start" not in line:
            subprocess.run(
                ["pkill", "-KILL", "-f", f"mage_services.actor.actor {run_dir}"], check=True
            )
            break
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    assert "was killed by SIGKILL" in output
    trials = json.loads((run_dir / "summary.json").read_text())["trials"]
    assert trials["trained"] == 30 * 16
