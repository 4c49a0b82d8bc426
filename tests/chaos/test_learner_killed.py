"""A learner, or a rank of it, that is killed while it trains: nothing acknowledged is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mage_async.protocol.journal_records import Commit, Dropped, Granted
from mage_async.protocol.messages import TrialResult
from mage_services.journal.reader import open_journal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # whole runs
NUM_KILLS = 1
SETTINGS = (
    "warm_start.steps=8",
    "warm_start.gate=1.0",
    "warm_start.max_steps=8",
    "warm_start.trials=64",
    "warm_start.threads=1",
    "warm_start.cache=false",
    "admission.groups_per_step=4",
    "admission.trials_per_group=4",
    "learner.steps=8",
    "learner.checkpoint_every=3",
    "evaluation.every=0",
    "evaluation.final_trials=12",
    "supervision.max_restarts=10",
)


def processes(module: str, run_dir: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if module.encode() in words and str(run_dir).encode() in words:
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="module", params=["learner.learner", "learner.rank_worker"])
def killed(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, str]:
    """A run whose learner, or the second of its ranks, is killed after its fifth step, two behind
    its checkpoint.
    """
    run_dir, module = tmp_path_factory.mktemp("runs") / "killed", f"mage_services.{request.param}"
    command = [sys.executable, "-m", "mage_async.launch", "--run-dir", str(run_dir)]
    command += ["--actors", "2", *(part for s in SETTINGS for part in ("--set", s))]
    command += ["--learner", "2" if "rank_worker" in module else "1"]
    num_killed, printed = 0, []
    with subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if num_killed < NUM_KILLS and "phase=training" in line:
                _wait_for_commits(run_dir, 5, process)
                for pid in processes(module, run_dir):
                    os.kill(pid, signal.SIGKILL)
                num_killed += 1
    assert process.returncode == 0, "".join(printed)
    return run_dir, "".join(printed)


def _wait_for_commits(run_dir: Path, count: int, process: "subprocess.Popen[str]") -> None:
    """Return when the journal has so many steps; the run's own deadline is the test's."""
    while process.poll() is None and _num_commits(run_dir) < count:
        time.sleep(0.02)


def _num_commits(run_dir: Path) -> int:
    records = open_journal(run_dir / "journal").records()
    return sum(isinstance(record, Commit) for record in records)


def test_the_run_is_completed(killed: tuple[Path, str]) -> None:
    lines = (killed[0] / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 9))
    assert "learner was killed by SIGKILL" in killed[1]
    assert killed[1].count("phase=training") == NUM_KILLS + 1
    assert "actor-0 was" not in killed[1]


def test_every_trial_is_trained_once_or_in_flight_or_dropped(killed: tuple[Path, str]) -> None:
    records = list(open_journal(killed[0] / "journal").records())
    granted = {r.grant.grant for r in records if isinstance(r, Granted)}
    acknowledged = [(r.grant, r.trial.index) for r in records if isinstance(r, TrialResult)]
    trained = [grant for r in records if isinstance(r, Commit) for grant in r.grants]
    dropped = {r.grant for r in records if isinstance(r, Dropped)}
    assert len(set(acknowledged)) == len(acknowledged)
    assert len(set(trained)) == len(trained) == 8 * 4
    trials = json.loads((killed[0] / "summary.json").read_text())["trials"]
    in_flight = granted - set(trained) - dropped
    assert trials["trained"] == 4 * len(trained)
    assert trials["in_flight"] == 4 * len(in_flight)
    assert {(g, i) for g in trained for i in range(4)} <= set(acknowledged)


def test_staleness_stays_within_its_bound(killed: tuple[Path, str]) -> None:
    lines = (killed[0] / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["staleness_max"] for line in lines) <= 1


def test_the_totals_count_every_step_once(killed: tuple[Path, str]) -> None:
    assert json.loads((killed[0] / "learner.json").read_text())["totals"]["trials"] == 8 * 16


def test_a_replay_gives_the_weights_of_every_step_bit_for_bit(killed: tuple[Path, str]) -> None:
    command = [sys.executable, "-m", "mage_async.launch", "replay", str(killed[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "8 steps from step 0 on: every digest agrees" in done.stdout
