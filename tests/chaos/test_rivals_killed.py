"""Past policies in the population, and a learner or a supervisor that is killed while groups
against them are played: everything goes on as if nothing had happened.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mage_async.protocol.journal_records import Commit, Granted, Published, Record
from mage_async.protocol.messages import TrialResult
from mage_async.tasks.league import version_of
from mage_services.journal.reader import open_journal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # three whole runs
STEPS, GROUPS, TRIALS = 6, 4, 2
SETTINGS = (
    "warm_start.steps=8",
    "warm_start.gate=1.0",
    "warm_start.max_steps=8",
    "warm_start.trials=64",
    "warm_start.cache=false",
    "admission.rule=sync",
    "admission.max_staleness=0",
    "engine.arithmetic=exact",
    f"admission.groups_per_step={GROUPS}",
    f"admission.trials_per_group={TRIALS}",
    "population.matchmaker=prioritised",
    "population.rivals=0.6",
    "population.every=1",
    "population.kept=2",
    "population.keep=best",
    f"learner.steps={STEPS}",
    "learner.checkpoint_every=3",
    "evaluation.every=0",
    "evaluation.final_trials=12",
)


@dataclass(frozen=True)
class Run:
    """A run that is over."""

    folder: Path
    printed: str

    def records(self) -> list[Record]:
        return list(open_journal(self.folder / "journal").records())

    def population(self) -> dict[str, Any]:
        return json.loads((self.folder / "learner.json").read_text())["population"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return play(tmp_path_factory.mktemp("undisturbed") / "run", None)


@pytest.fixture(scope="module", params=["learner", "supervisor"])
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return play(tmp_path_factory.mktemp(request.param) / "run", request.param)


def play(folder: Path, victim: str | None) -> Run:
    """A whole run of one actor, whose victim is killed once."""
    changes = [part for each in SETTINGS for part in ("--set", each)]
    output = folder.with_name("output")
    with output.open("ab") as out, started(folder, out, *changes) as process:
        if victim is not None:
            wait_for_rivals(folder, process)
        if victim == "learner":
            os.kill(learner_of(process.pid), signal.SIGKILL)
        if victim == "supervisor":
            process.kill()
            process.wait()
            with started(folder, out, "--resume") as process:
                process.wait()
        assert process.wait() == 0, output.read_text()
    return Run(folder, output.read_text())


@contextmanager
def started(folder: Path, out: Any, *more: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "mage_async.launch", "--run-dir", str(folder)]
    with subprocess.Popen([*command, "--actors", "1", *more], stdout=out, stderr=out) as process:
        try:
            yield process
        finally:
            process.terminate()


def wait_for_rivals(folder: Path, process: "subprocess.Popen[bytes]") -> None:
    """Return when, behind the fourth step, a group is in play that met a past policy."""
    while process.poll() is None:
        records = list(open_journal(folder / "journal").records()) if is_there(folder) else []
        trained = {grant for each in records if isinstance(each, Commit) for grant in each.grants}
        in_play = [each.grant for each in records if isinstance(each, Granted)]
        met = [each for each in in_play if each.rival and each.grant not in trained]
        if len(trained) == 4 * GROUPS and met:
            return
        time.sleep(0.01)


def is_there(folder: Path) -> bool:
    return any((folder / "journal").glob("*.log"))


def learner_of(supervisor: int) -> int:
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children}
    return next(int(pid) for pid, said in words.items() if b"mage_services.learner.learner" in said)


def granted(run: Run) -> list[tuple[int, str, int, int]]:
    """Who met whom, in which seat, with which luck: of groups that were trained."""
    grants = [each.grant for each in run.records() if isinstance(each, Granted)]
    first = {each.grant: each for each in reversed(grants)}
    numbers = sorted(first)[: STEPS * GROUPS]
    return [(n, first[n].member, first[n].seat, first[n].seed) for n in numbers]


def test_groups_meet_whom_they_would_have_met(undisturbed: Run, killed: Run) -> None:
    assert granted(killed) == granted(undisturbed)
    met = [version_of(member) for _, member, _, _ in granted(killed)]
    assert {version for version in met[: 4 * GROUPS] if version is not None}
    assert any(version is not None and version >= 2 for version in met[4 * GROUPS :])


def test_the_population_and_its_ratings_go_on(undisturbed: Run, killed: Run) -> None:
    assert killed.population() == undisturbed.population()
    assert len(killed.population()["rivals"]) == 2
    assert sum(each["groups"] for each in killed.population()["standings"].values()) == 24


def test_every_version_has_the_weights_that_it_would_have_had(
    undisturbed: Run, killed: Run
) -> None:
    def digests(run: Run) -> list[str]:
        return [each.digest for each in run.records() if isinstance(each, Commit)]

    assert digests(killed) == digests(undisturbed)
    assert len(digests(killed)) == STEPS


def test_nothing_acknowledged_is_lost_and_every_trial_is_trained_once(killed: Run) -> None:
    records = killed.records()
    kept = [(each.grant, each.trial.index) for each in records if isinstance(each, TrialResult)]
    trained = [n for each in records if isinstance(each, Commit) for n in each.grants]
    assert len(set(kept)) == len(kept)
    assert trained == list(range(STEPS * GROUPS))
    assert {(n, index) for n in trained for index in range(TRIALS)} <= set(kept)


def test_weights_of_rivals_are_there_and_of_the_others_are_not(killed: Run) -> None:
    there = {int(file.stem[1:]) for file in (killed.folder / "weights").glob("v*.safetensors")}
    assert there >= set(killed.population()["rivals"])
    assert there < {each.version for each in killed.records() if isinstance(each, Published)}


def test_the_learner_went_on_from_its_journal(undisturbed: Run, killed: Run) -> None:
    assert "1 step of the journal" in killed.printed
    assert "of the journal" not in undisturbed.printed
