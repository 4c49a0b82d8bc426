"""A task of one's own: the class and the commands of the documents, word by word, with the tiny
model and with a model that reads text.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines
from tests.helpers.random_models import save_text_model

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STEPS = 2


def class_of(page: str, folder: Path) -> list[str]:
    """Write the first class of a page as `guess.py`; return the commands that train on it."""
    text = (ROOT / page).read_text()
    (folder / "guess.py").write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    return re.findall(r"^    (mage train .*guess:GuessNumber.*)$", text, re.MULTILINE)


def trained(command: str, folder: Path, *more: str) -> str:
    """Run a command of a page with fewer trials; return what it printed."""
    program = "import sys; from mage_async.launch import main; sys.exit(main())"
    given = [sys.executable, "-c", program, *shlex.split(command)[1:]]
    given += ["--actors", "1", "--run-dir", str(folder / "run")]
    for setting in (f"learner.steps={STEPS}", "evaluation.final_trials=4", *more):
        given += ["--set", setting]
    ended = subprocess.run(
        given, cwd=folder, env=os.environ, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def check_run(folder: Path) -> None:
    """Check that each step was trained on three episodes of valid actions."""
    run = RunDirectory(folder / "run")
    summary = json.loads(run.summary.read_text())
    assert summary["steps"] == STEPS
    assert summary["logprob_mismatch"]["max_abs"] < 1e-3
    lines = list(read_lines(run.metrics))
    assert [len(line["return_by_episode"]) for line in lines] == [3] * STEPS
    assert [line["valid_action_share"] for line in lines] == [1.0] * STEPS
    assert json.loads(run.evaluation.read_text())["version"] == STEPS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", ["README.md", "docs/your_environment.md"])
def test_the_class_of_a_page_is_trained_on_with_the_tiny_model(page: str, tmp_path: Path) -> None:
    tiny, _ = class_of(page, tmp_path)
    trained(tiny, tmp_path, "admission.groups_per_step=2", "evaluation.every=0")
    check_run(tmp_path)


@pytest.mark.timeout(600)
def test_the_program_of_the_page_on_agents_is_trained_with_the_tiny_model(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "agents.md").read_text()
    (tmp_path / "my_agent.py").write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    (command,) = re.findall(r"^    (mage train --agent my_agent:run .*)$", text, re.MULTILINE)
    trained(command, tmp_path, "admission.groups_per_step=2", "evaluation.every=0")
    check_run(tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", ["README.md", "docs/your_environment.md"])
def test_the_class_of_a_page_is_trained_on_with_a_model_of_ones_own(
    page: str, tmp_path: Path
) -> None:
    model = save_text_model(tmp_path / "model")
    _, pretrained = class_of(page, tmp_path)
    # In bfloat16, which is the default where the processor has it, log-probs are not compared.
    exact = ("policy.dtype=float32", "engine.arithmetic=float32")
    command = pretrained.replace("DIR", str(model))
    printed = trained(command, tmp_path, "evaluation.episodes=2", "evaluation.every=0", *exact)
    assert "30 of 30 actions were valid" in printed
    assert "forecast: the first step is expected after" in printed
    check_run(tmp_path)
