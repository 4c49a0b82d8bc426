"""The chaos harness in its short form: whole runs, killed, stopped, torn and harmed from a seed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # whole runs
MAY_MOUNT = shutil.which("unshare") and not subprocess.call(["unshare", "-rm", "true"])
ROOT = Path(__file__).parents[2]


def attack(*arguments: str) -> str:
    command = [sys.executable, "-m", "bench.chaos.kills", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("cc") is None, reason="the jumping clock needs a C compiler")
def test_a_run_whose_processes_are_killed_under_a_clock_that_jumps_loses_nothing() -> None:
    said = attack("--kills", "5", "--steps", "14", "--clock", "--stop-s", "1", "--seed", "1")
    assert said.splitlines()[-1] == "nothing was lost"


@pytest.mark.skipif(not MAY_MOUNT, reason="needs mount namespaces")
def test_a_journal_whose_disk_is_full_now_and_then_loses_nothing() -> None:
    arguments = ("--kills", "3", "--steps", "10", "--roles", "actor", "learner", "--stop-s", "0")
    said = attack(*arguments, "--disk", "4", "--seed", "2")
    assert said.splitlines()[-1] == "nothing was lost"


def test_messages_that_are_doubled_cut_and_garbled_lose_nothing() -> None:
    arguments = ("--kills", "1", "--steps", "10", "--roles", "learner", "--stop-s", "0")
    said = attack(*arguments, "--frames", "0.003", "--set", "admission.grant_deadline_s=5.0")
    assert said.splitlines()[-1] == "nothing was lost"


@pytest.mark.timeout(300)  # two runs
def test_a_learner_killed_in_a_deterministic_run_leaves_every_version_as_it_would_have_been() -> (
    None
):
    arguments = ("--kills", "2", "--roles", "learner", "--deterministic", "--steps", "6")
    said = attack(*arguments, "--stop-s", "0")
    assert said.splitlines()[-1] == "nothing was lost"
    figures = dict(line.split() for line in said.splitlines() if len(line.split()) == 2)
    assert (figures["versions_compared"], figures["versions_differ"]) == ("6", "0")


@pytest.mark.timeout(400)
def test_a_learner_of_two_ranks_any_of_which_is_killed_loses_nothing() -> None:
    arguments = ("--kills", "2", "--steps", "8", "--roles", "learner", "follower")
    changes = ("--set", "learner.ranks=2", "--set", "learner.checkpoint_every=3")
    said = attack(*arguments, *changes, "--stop-s", "0")
    assert said.splitlines()[-1] == "nothing was lost"
