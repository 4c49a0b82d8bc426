"""A real run made sick: one member's games fail, the doctor halts it, and it can be resumed."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAILS = """
import sys
from mage_async.environments.games.rps import Rps

class Frail(Rps):
    def begin(self, task, episode):
        if task.member == "beat-rock" and sys.argv[0].endswith("actor/actor.py"):
            raise ValueError("the dice are gone")
        return super().begin(task, episode)
"""
FEW = ("learner.steps=40", "evaluation.every=0", "evaluation.final_trials=24")
SMALL = ("admission.groups_per_step=8", "admission.trials_per_group=2")


@pytest.mark.slow
def test_a_member_that_fails_halts_the_run_which_can_go_on(
    start: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
) -> None:
    (tmp_path / "frail_game.py").write_text(FAILS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(environment, "PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    frail = ("environment.name=frail_game:Frail", "environment.retries=0")
    changes = (*frail, 'doctor.halt=["member_failing"]', *FEW, *SMALL)
    process = start(tmp_path / "run", "--actors", "2", changes=changes)
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 3, output
    assert "the doctor halted the run: member_failing of beat-rock since step" in output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    drops = [json.loads(line).get("dropped_by_member", {}) for line in lines]
    assert {name for each in drops for name in each} == {"beat-rock"}
    assert 3 <= len(lines) < 40
    more = (*SMALL, f"learner.steps={len(lines) + 2}")
    process = start(tmp_path / "run", "--resume", changes=more)
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == len(lines) + 2
