"""The learner trains trials with an expert, as they arrive, to the weights of one process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mage_async.algorithm import InProcessRun, prepare
from mage_async.config import config_file
from mage_async.policy.weight_digest import overall, tensor_digests
from mage_async.protocol.codec import decode, encode
from mage_async.protocol.messages import TrialResult
from mage_async.results.metrics import check_names
from mage_async.results.run_directory import RunDirectory
from mage_async.trajectory import Group, Trial
from mage_services.learner.trainer_thread import Training

SMALL = [
    "warm_start=none",
    "admission.groups_per_step=2",
    "admission.trials_per_group=2",
    "learner.minibatches=2",
    "learner.threads=1",
]


def sent(trial: Trial) -> Trial:
    """A trial that went over the wire."""
    arrived = decode([bytes(frame) for frame in encode(TrialResult(0, 0, trial))])
    assert isinstance(arrived, TrialResult)
    return arrived.trial


@pytest.mark.parametrize("method", ["stepagent_implicit", "stepagent_irl"])
def test_a_step_on_trials_that_were_sent_makes_the_weights_of_one_process(
    tmp_path: Path, method: str
) -> None:
    config = config_file.load(config_file.find(None), SMALL, method)
    run, threads = RunDirectory(tmp_path), torch.get_num_threads()
    prepare(config, tmp_path).rename(run.policy)
    alone, played = InProcessRun(config, run.policy), list[Group]()
    alone.step(played.extend)
    groups = [replace(each, trials=tuple(map(sent, each.trials))) for each in played]
    training = Training.of(run, config, None)
    before = training.digest()
    metrics = training.step(groups)
    torch.set_num_threads(threads)
    assert training.digest() == overall(tensor_digests(alone.model)) != before
    assert 0.0 <= metrics["expert_agreement"] < 1.0
    assert ("expert_loss" in metrics) == (method == "stepagent_implicit")
    check_names({name: value for name, value in metrics.items() if name != "train_s"})
