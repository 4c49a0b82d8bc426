"""Restricted actions in whole batches: the engine's and the learner's log-probs are the same."""

import numpy as np
import pytest
import torch

from mage_async.algorithm import InProcessRun, prepare
from mage_async.config import config_file
from mage_async.learning.packing import training_sequences
from mage_async.trajectory import Kind


class Sum:
    """Write two digits with a sum of nine."""

    words = (*"0123456789", "right", "wrong")
    legal_pattern = "[0-9] [0-9]"
    max_turns = 3

    def reset(self, seed, task):
        return "wrong"

    def step(self, action):
        first, second = map(int, action.split(" "))
        return "right", float(first + second == 9), first + second == 9


SETTINGS = ["warm_start=none", "admission.groups_per_step=4", "engine.max_contexts=32"]


def batch(tmp_path, *settings: str):
    """A run with a policy of random weights, and the groups of its first batch."""
    config = config_file.load(config_file.find(None), [*SETTINGS, *settings])
    run = InProcessRun(config, prepare(config, tmp_path))
    return config, run, run.play_batch()


@pytest.mark.parametrize(
    "settings",
    [
        ("environment.name=rps",),
        ("environment.name=maze", "engine.max_tokens=1200"),
        ("environment.name=numberlock", "engine.max_tokens=600", "transcript.max_action_tokens=8"),
        ("environment.name=rps", "trial.memory=reflection", "engine.max_tokens=300"),
        (f"environment.name={__name__}:Sum", "engine.max_tokens=300"),
    ],
    ids=["words", "lists_that_change", "several_tokens", "remarks_between", "a_pattern"],
)
def test_a_random_policy_acts_validly_and_is_trained_on_what_it_drew_from(tmp_path, settings):
    config, run, groups = batch(tmp_path, *settings)
    trials = [trial for group in groups for trial in group.trials]
    turns = [turn for trial in trials for turn in trial.turns if turn.kind is Kind.ACT]
    assert turns
    assert all(turn.is_valid for turn in turns)
    segments = [segment for trial in trials for segment in trial.segments]
    restricted = sum(int((each.allowed.index >= 0).sum()) for each in segments)
    assert restricted > len(turns) / 2
    sequences = training_sequences(groups, config, "cpu", version=0)
    found = run._trainer.parity(sequences)
    assert found["equal_version_tokens"] == sum(len(each.places) for each in sequences)
    assert found["logprob_mismatch_max"] < 1e-4
    before = {name: weight.clone() for name, weight in run.model.named_parameters()}
    metrics = run._trainer.train(groups)
    assert np.isfinite(list(metrics.values())).all()
    changed = [not torch.equal(before[name], each) for name, each in run.model.named_parameters()]
    assert all(changed)


def test_without_it_a_random_policy_is_hardly_ever_valid(tmp_path) -> None:
    _, _, groups = batch(tmp_path, "sampling.restricted=false")
    trials = [trial for group in groups for trial in group.trials]
    assert all(segment.allowed is None for trial in trials for segment in trial.segments)
    turns = [turn for trial in trials for turn in trial.turns]
    assert sum(turn.is_valid for turn in turns) < len(turns) / 4
