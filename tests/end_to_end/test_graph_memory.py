"""A whole run with a graph memory: what it writes, replays, shows, and computes."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from mage_async.algorithm import InProcessRun
from mage_async.config import config_file
from mage_async.policy.weight_digest import overall, tensor_digests
from mage_async.protocol.journal_records import Commit
from mage_async.protocol.messages import TrialResult
from mage_async.results.run_directory import RunDirectory
from mage_services.journal.reader import open_journal
from mage_services.view.page_request import PageRequest
from mage_services.view.server import PAGES

if TYPE_CHECKING:
    import subprocess

SHORT = (
    "environment.name=boxes",
    "warm_start.steps=0",
    "admission.groups_per_step=3",
    "engine.arithmetic=exact",
    "admission.rule=sync",
    "admission.max_staleness=0",
    "learner.steps=3",
    "learner.checkpoint_every=3",
    "evaluation.every=1",
    "evaluation.trials=4",
    "evaluation.final_trials=8",
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Start = Callable[..., "subprocess.Popen[str]"]
Mage = Callable[..., str]


@pytest.fixture(scope="module")
def remembering(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of three steps by `--method graph_memory`."""
    root = tmp_path_factory.mktemp("runs") / "remembering"
    process = start(root, "--actors", "1", "--method", "graph_memory", changes=SHORT)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    return RunDirectory(root)


def test_every_trial_says_which_memory_it_was_told_of(remembering: RunDirectory) -> None:
    records = list(open_journal(remembering.journal).records(1))
    trials = [record.trial for record in records if isinstance(record, TrialResult)]
    assert {trial.memory for trial in trials} >= {None, 1, 2}
    told = [trial for trial in trials if trial.memory is not None]
    assert {trial.index for trial in told} == {0, 1}


def test_every_version_has_a_line_that_the_commit_confirms(remembering: RunDirectory) -> None:
    lines = [json.loads(line) for line in remembering.memory.read_text().splitlines()]
    assert [line["version"] for line in lines] == [0, 1, 2, 3]
    records = open_journal(remembering.journal).records(1)
    commits = [record for record in records if isinstance(record, Commit)]
    assert [commit.methods["graph_memory"] for commit in commits] == [
        line["digest"] for line in lines[1:]
    ]
    assert lines[3]["strategies"]


def test_the_evaluation_says_what_the_memory_is_worth(remembering: RunDirectory) -> None:
    sets = json.loads(remembering.evaluation.read_text())["sets"]
    assert sets["heldout_unguided"]["num_trials"] == sets["heldout"]["num_trials"] == 8


def test_one_process_makes_the_same_weights_and_the_same_memory(remembering: RunDirectory) -> None:
    config = config_file.load(remembering.config, [])
    threads = torch.get_num_threads()
    alone = InProcessRun(config, remembering.policy)
    alone.train()
    torch.set_num_threads(threads)
    commits = [r for r in open_journal(remembering.journal).records(1) if isinstance(r, Commit)]
    assert overall(tensor_digests(alone.model)) == commits[-1].digest
    assert alone.methods.digests() == commits[-1].methods


def test_a_replay_agrees_bit_by_bit(remembering: RunDirectory, mage: Mage) -> None:
    said = mage("replay", str(remembering.root), timeout_s=500)
    assert "3 steps from step 0 on: every digest agrees" in said


def test_the_view_lists_strategies_with_their_weights(remembering: RunDirectory) -> None:
    asked = PageRequest("/t/", {"run": remembering}, "run", {}, {"version": "2"}, None)  # type: ignore[arg-type]
    page = PAGES["memory"](asked)
    line = json.loads(remembering.memory.read_text().splitlines()[2])
    assert "version 2" in page
    assert page.count("<tr data-item") == len(line["strategies"]) > 0
    older = PageRequest("/t/", {"run": remembering}, "run", {}, {"version": "1"}, None)  # type: ignore[arg-type]
    assert PAGES["memory"](older) != page
