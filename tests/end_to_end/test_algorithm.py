"""The algorithm in one process and the asynchronous run compute the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from mage_async.algorithm import InProcessRun, prepare
from mage_async.config import config_file
from mage_async.errors import ConfigError
from mage_async.inference.chat_files import load_chat
from mage_async.policy.load import load_policy
from mage_async.policy.weight_digest import overall, tensor_digests
from mage_async.trajectory import Group

if TYPE_CHECKING:
    import subprocess

EXACT = (
    "engine.arithmetic=exact",
    "admission.rule=sync",
    "admission.max_staleness=0",
    "learner.steps=3",
    # As in a run of slow steps, a checkpoint is due at every step.
    "learner.checkpoint_every=1000",
    "learner.checkpoint_minutes=1e-9",
    "evaluation.every=0",
)
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.mark.parametrize(
    "method",
    [
        (),
        pytest.param(("--method", "stepagent_implicit"), marks=pytest.mark.slow),
        pytest.param(("--method", "mage_population"), marks=pytest.mark.slow),
    ],
)
def test_an_asynchronous_run_makes_the_weights_that_one_process_makes(
    start: Start, tmp_path: Path, method: tuple[str, ...]
) -> None:
    """With an expert too, whose actions come with the trials, and with both seats of self-play."""
    run_dir = tmp_path / "run"
    process = start(run_dir, "--actors", "2", *method, changes=EXACT)
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    config = config_file.load(run_dir / "config.toml", [])
    threads = torch.get_num_threads()
    alone = InProcessRun(config, run_dir / "policy")
    before = overall(tensor_digests(alone.model))
    alone.train()
    torch.set_num_threads(threads)
    checkpoints = sorted((run_dir / "checkpoints").iterdir())
    assert [each.name for each in checkpoints] == ["step_000002", "step_000003"]
    trained = load_policy(checkpoints[-1], "float32", "cpu")
    assert overall(tensor_digests(alone.model)) == overall(tensor_digests(trained)) != before


def test_one_process_evaluates_as_the_evaluator_does(
    finished: tuple[Path, str], summary: dict[str, dict[str, dict[str, list[float]]]]
) -> None:
    config = config_file.load(finished[0] / "config.toml", ["learner.steps=0"])
    threads = torch.get_num_threads()
    alone = InProcessRun(config, finished[0] / "checkpoints" / "step_000004")
    found = alone.evaluate("heldout", 36).return_by_episode
    torch.set_num_threads(threads)
    assert found == pytest.approx(summary["evaluation"]["heldout"]["return_by_episode"], abs=0.02)


def test_one_process_refuses_an_engine_that_is_a_process_of_its_own(tmp_path: Path) -> None:
    config = config_file.load(config_file.find(None), ["policy.source=m", "engine.kind=sglang"])
    with pytest.raises(ConfigError, match=r'needs engine\.kind = "embedded"'):
        InProcessRun(config, tmp_path)


@pytest.mark.parametrize("thinking", [True, False])
def test_one_process_thinks_as_actors_do(tmp_path: Path, thinking: bool) -> None:
    small = ["admission.groups_per_step=1", "admission.trials_per_group=2", "warm_start=none"]
    keys = [*small, f"transcript.thinking={str(thinking).lower()}"]
    config = config_file.load(config_file.find(None), keys)
    policy = prepare(config, tmp_path)
    settings = policy / "tokenizer_config.json"
    fields = json.loads(settings.read_text())
    fields["chat_template"] += "{% if enable_thinking %} scissors{% endif %}"
    settings.write_text(json.dumps(fields))
    threads = torch.get_num_threads()
    (group,) = InProcessRun(config, policy).play_batch()
    torch.set_num_threads(threads)
    chat = load_chat(policy)
    for trial in group.trials:
        opening = trial.segments[0].tokens[: trial.turns[0].start].tolist()
        assert ("scissors" in chat.decode(opening)) == thinking


def test_batches_lag_and_evaluations_do_not(finished: tuple[Path, str]) -> None:
    small = ["admission.lag=2", "admission.groups_per_step=2", "learner.steps=5"]
    config = config_file.load(finished[0] / "config.toml", small)
    threads = torch.get_num_threads()
    alone = InProcessRun(config, finished[0] / "checkpoints" / "step_000004")
    played: list[set[int]] = []

    def versions(groups: list[Group]) -> None:
        segments = [part for each in groups for trial in each.trials for part in trial.segments]
        played.append({run.policy for segment in segments for run in segment.versions})

    for _ in range(5):
        alone.step(versions)
        alone.evaluate("heldout", 2)
    torch.set_num_threads(threads)
    assert played == [{0}, {0}, {0}, {1}, {2}]
