"""The code of the documents, copied and pasted."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace

import numpy as np
import pytest

import mage_async as mage
from mage_async.assembly import environment_of, trial_config_of
from mage_async.completion import Completion
from mage_async.config import config_file
from mage_async.policy_version import VersionRun
from mage_async.trajectory import Task
from mage_async.trials.duels import begin_trial
from mage_async.trials.trial_run import TrialStart
from tests.helpers.pages import ROOT, carry_out, python_blocks
from tests.helpers.recorded_runs import unpack

EXAMPLES = ROOT / "docs" / "examples"
SAYS = {
    "own_environment": "boxes_again",
    "own_model": "written to card",
    "compare": "report: runs/memory/report.html",
    "serve": "episode 2: ",
}
"""What the commands of a page print."""


def test_every_example_is_carried_out():
    # `tests/environments/test_duels.py` plays the class of `game_for_two`.
    assert {page.stem for page in EXAMPLES.glob("*.md")} == {*SAYS, "game_for_two"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SAYS)
def test_an_example_works_as_it_is_written(name, tmp_path):
    printed = carry_out(EXAMPLES / f"{name}.md", tmp_path, timeout_s=800)
    assert SAYS[name] in printed
    if name == "own_environment":
        steps = mage.load(tmp_path / "runs" / "boxes").steps()
        rows = steps if isinstance(steps, list) else steps.to_dict("records")
        assert rows[-1]["return_by_episode"][1] >= 2.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path):
    notebook = tmp_path / "notebook.ipynb"
    notebook.write_text((EXAMPLES / "look_into_a_run.ipynb").read_text())
    command = [Path(sys.executable).with_name("jupyter-execute"), "--inplace", notebook]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if "outputs" in cell]
    assert all(cell["outputs"] for cell in cells[:-1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_of_python_trains_a_class_of_a_script(tmp_path):
    train, _ = python_blocks(ROOT / "docs" / "python.md")
    page = tmp_path / "page.md"
    page.write_text(f"`door.py`:\n\n```python\n{train}```\n\n    python door.py\n")
    assert "heldout_swapped" in carry_out(page, tmp_path, timeout_s=800)


def test_the_page_of_python_talks_with_the_policy_of_a_run(tmp_path, capsys):
    _, talk = python_blocks(ROOT / "docs" / "python.md")
    names = {}
    exec(talk.replace("RUN_DIR", str(unpack("finished", tmp_path).root)), names)
    with names["chat"]:
        assert capsys.readouterr().out.count("<action>") == 2


def test_the_loop_of_the_page_of_architecture_plays_a_trial(chat):
    config = config_file.load(config_file.find(None), [])
    environment = environment_of(config)
    member = environment.members("heldout")[0]
    rules = trial_config_of(config, environment, chat, num_episodes=2)
    run = begin_trial(TrialStart(environment, Task("rps", member, 1), 0, rules, chat, name="t"))

    async def complete(_):
        tokens = np.array(chat.encode(" rock"), np.int32)
        logprobs = np.zeros(len(tokens), np.float32)
        return Completion(tokens, logprobs, (VersionRun(0, 0, 0),), "stop", 0)

    (lines,) = python_blocks(ROOT / "docs" / "architecture.md")
    names = {}
    exec(f"async def play(run, engine):\n{indent(lines, '    ')}", names)
    trial = asyncio.run(names["play"](run, SimpleNamespace(complete=complete)))
    assert {turn.action for turn in trial.turns} == {"rock"}
