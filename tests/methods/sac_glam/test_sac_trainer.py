"""A whole step of soft actor-critic: it learns, it is the same twice, and a checkpoint holds it."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mage_async.algorithm import InProcessRun, prepare
from mage_async.config import config_file
from mage_async.errors import DeterministicFailure
from mage_async.learning.packing import training_sequences
from mage_async.policy.weight_digest import overall, tensor_digests
from mage_async.results.metrics import check_names

SMALL = (
    "environment.name=grid",
    "environment.options.size=4",
    "environment.options.turns=6",
    "policy.hidden_size=16",
    "policy.layers=1",
    "policy.heads=2",
    "policy.kv_heads=1",
    "policy.mlp_size=16",
    "warm_start=none",
    "learner.steps=4",
    "learner.minibatches=2",
    "admission.groups_per_step=2",
    "admission.trials_per_group=2",
    "methods.sac_glam.batch=4",
    "methods.sac_glam.capacity=6",
)


@pytest.fixture(scope="module")
def config():
    return config_file.load(config_file.find(None), SMALL, "sac_glam")


@pytest.fixture
def run(config, tmp_path, one_thread):
    return InProcessRun(config, prepare(config, tmp_path))


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def digest(trainer):
    return overall(tensor_digests(trainer.model))


def without_choices(groups):
    """The groups as if every turn had had a single legal action, which is not sampled."""
    changed = []
    for group in groups:
        trials = [
            replace(
                trial,
                segments=[
                    replace(each, is_sampled=np.zeros_like(each.is_sampled))
                    for each in trial.segments
                ],
            )
            for trial in group.trials
        ]
        changed.append(replace(group, trials=trials))
    return changed


def test_a_batch_without_a_sampled_token_is_a_plain_error(run, config):
    groups = without_choices(run.play_batch())
    with pytest.raises(DeterministicFailure, match="none of the 4 trials of a batch has a sampled"):
        training_sequences(groups, config, "cpu", version=0)


def test_a_batch_of_answers_that_were_cut_names_the_limit(run, config):
    cut = [
        replace(
            group,
            trials=[
                replace(each, turns=[replace(turn, is_valid=False) for turn in each.turns])
                for each in group.trials
            ],
        )
        for group in without_choices(run.play_batch())
    ]
    said = r"from: \d+ answers were cut at transcript\.max_action_tokens = 1, when they only had"
    with pytest.raises(DeterministicFailure, match=said):
        training_sequences(cut, config, "cpu", version=0)


def test_a_first_batch_without_a_choice_is_a_plain_error(run, monkeypatch):
    monkeypatch.setattr("mage_async.methods.sac_glam.trainer.experiences", lambda *given: [])
    with pytest.raises(DeterministicFailure, match="no turn had a choice"):
        run._trainer.train(run.play_batch())


def test_a_step_trains_the_policy_and_explains_its_metrics(run, config):
    before = digest(run._trainer)
    metrics = run._trainer.train(run.play_batch())
    check_names(metrics)
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["replay_trials"] == 4.0
    assert metrics["staleness_max"] == 0.0
    assert digest(run._trainer) != before
    assert run.version == 1


def test_a_checkpoint_of_the_middle_goes_on_to_the_same_weights(run, config, tmp_path: Path):
    batches = []
    for _ in range(2):
        batches.append(run.play_batch())
        run._trainer.train(batches[-1])
        run._publish()
    file = io.BytesIO()
    torch.save(run._trainer.state(), file)
    weights = {name: each.clone() for name, each in run.model.state_dict().items()}
    last = run.play_batch()
    metrics = run._trainer.train(last)
    assert metrics["replay_trials"] == 6.0
    assert metrics["replay_age_max"] > 0.0

    other = InProcessRun(config, prepare(config, tmp_path))
    other.model.load_state_dict(weights)
    file.seek(0)
    other._trainer.restore(torch.load(file, weights_only=True))
    other._trainer.train(last)
    assert digest(other._trainer) == digest(run._trainer)

    anew = InProcessRun(config, prepare(config, tmp_path))
    for batch in (*batches, last):
        anew._trainer.train(batch)
    assert digest(anew._trainer) == digest(run._trainer)
