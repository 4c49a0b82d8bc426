"""Runs that an older version left are reported, evaluated, replayed and resumed.

The recordings are of commit 34afa1d, whose configurations stated every key.
"""

import json
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

RECORDED = Path(__file__).parent / "recorded"
pytestmark = pytest.mark.slow
Mage = Callable[..., str]


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(RECORDED / f"{name}.tar.xz") as recorded:
        recorded.extractall(folder, filter="data")
    return folder / name


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    return unpacked("finished", tmp_path)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    return unpacked("killed", tmp_path)


def test_every_step_of_an_older_run_is_computed_again_to_the_same_bits(
    finished: Path, killed: Path, mage: Mage
) -> None:
    assert "4 steps from step 0 on: every digest agrees" in mage("replay", str(finished))
    assert "5 steps from step 0 on: every digest agrees" in mage("replay", str(killed))


def test_an_older_run_is_listed_and_reported(finished: Path, tmp_path: Path, mage: Mage) -> None:
    listed = mage("journal", str(finished))
    assert len(re.findall(r"^.*\bcommit", listed, re.MULTILINE)) == 4
    other = tmp_path / "other"
    shutil.copytree(finished, other)
    mage("report", str(finished), str(other), "--output", str(tmp_path / "beside.html"))
    assert "held-out" in (tmp_path / "beside.html").read_text()


def test_an_older_run_is_evaluated_as_it_was(finished: Path, mage: Mage) -> None:
    before = json.loads((finished / "evaluation.json").read_text())["sets"]
    mage("evaluate", str(finished), "--trials", "24")
    after = json.loads((finished / "evaluation.json").read_text())["sets"]
    assert after == before


def test_an_older_killed_run_is_resumed_from_its_journal(killed: Path, mage: Mage) -> None:
    printed = mage("--resume", "--run-dir", str(killed), "--set", "learner.steps=7")
    assert "from_checkpoint_step_000004_and_1_steps_of_the_journal" in printed
    assert "7 steps from step 0 on: every digest agrees" in mage("replay", str(killed))
    trials = json.loads((killed / "summary.json").read_text())["trials"]
    assert trials["granted"] == trials["trained"] + trials["dropped"] + trials["in_flight"]
