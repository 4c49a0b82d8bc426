"""A whole run of a mix: returns by environment, also of one that is never trained on."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mage_async.results.metrics import returns_by_environment
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines
from mage_services.api.evaluation import folder_of

pytestmark = pytest.mark.slow
Start = Callable[..., "subprocess.Popen[str]"]
TRAINED, UNSEEN = {"boxes", "rps"}, {"maze"}
PARTS = '{name = "boxes"}, {name = "rps"}, {name = "maze", share = 0, options = {turns = 16}}'
CHANGES = (
    "environment.name=mix",
    f"environment.options={{parts = [{PARTS}]}}",
    "engine.max_tokens=512",
    "learner.steps=2",
    "evaluation.every=1",
    "evaluation.trials=6",
    "evaluation.final_trials=6",
)


@pytest.fixture(scope="module")
def mixed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two steps with one actor, and what it printed."""
    run_dir = tmp_path_factory.mktemp("runs") / "mixed"
    process = start(run_dir, "--actors", "1", changes=CHANGES)
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    return run_dir, output


def test_a_step_plays_each_environment_as_often_as_its_share_says(
    mixed: tuple[Path, str],
) -> None:
    for record in read_lines(RunDirectory(mixed[0]).metrics):
        assert set(returns_by_environment(record)) == TRAINED


def test_all_environments_are_measured_in_the_curve_and_at_the_end(
    mixed: tuple[Path, str],
) -> None:
    run_dir, printed = mixed
    document = json.loads((run_dir / "evaluation.json").read_text())
    assert {name for name, each in document["environments"].items() if each["is_trained_on"]} == (
        TRAINED
    )
    scores = [
        *document["sets"].values(),
        *read_lines(RunDirectory(run_dir).curve)[0]["sets"].values(),
    ]
    for score in scores:
        assert set(score["parts"]["environment"]) == TRAINED | UNSEEN
    assert "maze (not trained on)" in printed
    assert "By environment" in (run_dir / "report.html").read_text()


def test_a_run_is_evaluated_in_an_environment_that_is_named(mixed: tuple[Path, str]) -> None:
    """With the words of the mix, also in one that was never trained on."""
    before = (mixed[0] / "evaluation.json").read_bytes()
    option = "environment.options.turns=16"
    done = evaluated(mixed[0], "maze", "--set", option)
    assert done.returncode == 0, done.stderr
    assert "explorer without memory" in done.stdout
    folder = mixed[0] / folder_of("maze", [option])
    document = json.loads((folder / "evaluation.json").read_text())
    assert document["environment"]["max_turns"] == 16
    assert document["sets"]["heldout"]["num_trials"] == 4
    assert (mixed[0] / "evaluation.json").read_bytes() == before


def test_a_tiny_policy_is_not_evaluated_in_words_that_it_was_not_built_of(
    mixed: tuple[Path, str],
) -> None:
    done = evaluated(mixed[0], "scout")
    assert done.returncode != 0
    assert "words that this tiny policy was not built with, such as 'scout': train" in done.stderr


def evaluated(run_dir: Path, name: str, *more: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mage_async.launch", "evaluate", str(run_dir), "--trials", "4"]
    return subprocess.run(
        [*command, "--environment", name, *more], capture_output=True, text=True, timeout=110
    )
