"""The learner's training by soft actor-critic: computed again from groups, or from a checkpoint."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from mage_async.admission.replay import Committed
from mage_async.algorithm import InProcessRun
from mage_async.config import config_file
from mage_async.methods.sac_glam.replay_buffer import SoftSequence
from mage_async.methods.sac_glam.trainer import Transitions
from mage_async.policy.initial_policy import prepare_policy
from mage_async.results.run_directory import RunDirectory
from mage_services.learner.trainer_thread import Training

SMALL = (
    "environment.name=grid",
    "environment.options={size=4,turns=6}",
    *("policy.hidden_size=16", "policy.layers=1", "policy.heads=2", "policy.kv_heads=1"),
    *("policy.mlp_size=16", "warm_start=none", "learner.steps=2", "learner.minibatches=2"),
    *("admission.groups_per_step=2", "admission.trials_per_group=2", "methods.sac_glam.batch=4"),
)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_journal_and_a_checkpoint_lead_to_the_same_weights(tmp_path: Path) -> None:
    config = config_file.load(config_file.find(None), SMALL, "sac_glam")
    run = RunDirectory(tmp_path)
    prepare_policy(config, run.policy, lambda progress: None)
    batches = [InProcessRun(config, run.policy).play_batch() for _ in range(2)]
    first, commits = Training.of(run, config, None), []
    assert first.step(batches[0])["replay_trials"] == 4.0
    commits.append(first.commit(batches[0], 1.0)[0])
    checkpoint = first.checkpoint({}).result()
    first.step(batches[1])
    commits.append(first.commit(batches[1], 2.0)[0])

    said, again = config_file.dump(config), Training.of(run, config, None)
    for commit, groups in zip(commits, batches, strict=True):
        metrics, difference = again.redo(Committed(commit, groups, said))
        assert difference == ""
    assert metrics["replay_trials"] == 8.0

    resumed = Training.of(run, config, checkpoint)
    assert resumed.redo(Committed(commits[1], batches[1], said))[1] == ""


def test_a_reward_that_is_not_finite_spoils_neither_policy_nor_critic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_file.load(config_file.find(None), SMALL, "sac_glam")
    run = RunDirectory(tmp_path)
    prepare_policy(config, run.policy, lambda progress: None)
    training, transitions = Training.of(run, config, None), Transitions.of

    def spoilt(parts: Sequence[SoftSequence], device: torch.device) -> Transitions:
        made = transitions(parts, device)
        made.rewards[0] = math.inf
        return made

    def kept() -> list[torch.Tensor]:
        critic = training.trainer.state()["critic"]["weights"].values()
        return [each.detach().clone() for each in (*training.trainer.model.parameters(), *critic)]

    monkeypatch.setattr(Transitions, "of", spoilt)
    before, batch = kept(), InProcessRun(config, run.policy).play_batch()
    assert training.step(batch)["skipped_updates"] == 2.0
    assert all(torch.equal(one, other) for one, other in zip(before, kept(), strict=True))
    monkeypatch.undo()
    assert training.step(batch)["skipped_updates"] == 0.0
    assert any(not torch.equal(one, other) for one, other in zip(before, kept(), strict=True))
