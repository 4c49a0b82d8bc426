"""A whole run of MetaCURE: what is played and trained by whom, and that a replay is the same."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from mage_async.algorithm import InProcessRun
from mage_async.completion import SECOND_ROLE
from mage_async.config import config_file
from mage_async.inference.weights import read_tensors
from mage_async.policy.weight_digest import overall, tensor_digests
from mage_async.protocol.journal_records import Commit
from mage_async.results.run_directory import RunDirectory
from mage_services.journal.reader import open_journal

if TYPE_CHECKING:
    import subprocess

SHORT = (
    "environment.name=scout",
    "warm_start.steps=0",
    "engine.arithmetic=exact",
    "learner.steps=3",
    "evaluation.trials=4",
    "evaluation.final_trials=8",
)
IN_STEP = ("admission.rule=sync", "admission.max_staleness=0")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Start = Callable[..., "subprocess.Popen[str]"]
Mage = Callable[..., str]
Explore = Callable[..., RunDirectory]


@pytest.fixture(scope="module")
def explore(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Explore:
    """A run of three steps by `--method metacure`."""

    def run(num_actors: int, *changes: str) -> RunDirectory:
        root = tmp_path_factory.mktemp("runs") / "explored"
        method = ("--actors", f"{num_actors}", "--method", "metacure")
        process = start(root, *method, changes=SHORT + changes)
        output, _ = process.communicate(timeout=500)
        assert process.returncode == 0, output
        return RunDirectory(root)

    return run


@pytest.fixture(scope="module")
def explored(explore: Explore) -> RunDirectory:
    """One with two actors, asynchronous as usual."""
    return explore(2)


def test_the_engine_draws_with_the_learners_log_probs(explored: RunDirectory) -> None:
    lines = (explored.root / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    for name in ("logprob_mismatch_max", "receipt_difference"):
        found = [step[name] for step in steps if name in step]
        assert found
        assert max(found) < 1e-4, name


def test_one_process_makes_the_same_weights(explore: Explore) -> None:
    run = explore(1, *IN_STEP)
    threads = torch.get_num_threads()
    alone = InProcessRun(config_file.load(run.config, []), run.policy)
    alone.train()
    torch.set_num_threads(threads)
    commits = [r for r in open_journal(run.journal).records(1) if isinstance(r, Commit)]
    assert overall(tensor_digests(alone.model)) == commits[-1].digest


def test_a_replay_agrees_bit_by_bit(explored: RunDirectory, mage: Mage) -> None:
    said = mage("replay", str(explored.root), timeout_s=500)
    assert "3 steps from step 0 on: every digest agrees" in said


def test_the_last_checkpoint_has_both_adapters_and_both_models(explored: RunDirectory) -> None:
    last = explored.checkpoints / "step_000003"
    assert all((last / role / "adapter_config.json").is_file() for role in ("explore", "exploit"))
    merged = dict(read_tensors(last / "merged"))
    own = {name: tensor for name, tensor in merged.items() if name.startswith(SECOND_ROLE)}
    assert len(own) == 7 * 2
    for name, tensor in own.items():
        assert not torch.equal(tensor, merged[name.removeprefix(SECOND_ROLE)])
