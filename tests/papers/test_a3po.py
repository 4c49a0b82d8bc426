"""A-3PO (arXiv 2512.06547): proximal log-probs that are interpolated, without a forward."""

from dataclasses import replace

import pytest
import torch

from mage_async.config import config_file
from mage_async.learning.corrections import interpolated
from mage_async.learning.forward import head_inputs
from mage_async.learning.trainer import Trainer
from tests.helpers.paper_trials import close
from tests.helpers.random_models import in_double, random_model, sequence

LENGTHS = (40, 31, 22, 40, 13, 37)
SAMPLED = 7  # tokens of each sequence


def test_a_log_prob_that_changed_evenly_is_found_again():
    """`current = behaviour + slope * (staleness + progress)`, so that of the beginning is known."""
    behaviour = torch.tensor([-1.0, -0.2, -3.0, -0.7], dtype=torch.float64)
    slope = torch.tensor([0.3, -0.1, 0.05, -0.4], dtype=torch.float64)
    staleness = torch.tensor([0, 1, 2, 7], dtype=torch.int32)
    for progress in (0.25, 0.5, 1.0):
        current = behaviour + slope * (staleness + progress)
        found = interpolated(behaviour, current, staleness, progress)
        assert found.tolist() == close((behaviour + slope * staleness).tolist())


def test_areal_interpolates_to_the_step_before():
    """log prox = log behav + alpha (log theta - log behav), alpha = (v_prox - v_behav) /
    (v_theta - v_behav), where v_theta, the version at the beginning of the step, is v_prox + 1;
    alpha is at least 0, and 0 for a fresh token (AReaL 4aef98d, areal/trainer/ppo/actor.py)."""
    behaviour, theta = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-0.5, -2.5, -0.25])
    at_beginning, versions = 8, torch.tensor([4, 7, 6], dtype=torch.int32)
    found = interpolated(behaviour, theta, at_beginning - 1 - versions, 1.0)
    alphas = [(7 - 4) / (8 - 4), (7 - 7) / (8 - 7), (7 - 6) / (8 - 6)]
    rows = zip(alphas, behaviour.tolist(), theta.tolist(), strict=True)
    assert found.tolist() == close([b + alpha * (c - b) for alpha, b, c in rows])


def trained(proximal: str, minibatches: int) -> tuple[torch.Tensor, dict[str, float], int]:
    """The weights after a step on fresh tokens, its metrics, and the number of its forwards."""
    settings = [f"learner.proximal={proximal}", f"learner.minibatches={minibatches}"]
    settings += ["learner.learning_rate=0.01", "learner.warmup_steps=0"]
    model = in_double(random_model("Qwen3")).train()
    trainer, parts = Trainer(model, config_file.load(config_file.find(None), settings)), []
    for part in map(sequence, LENGTHS):
        with torch.no_grad():
            batch = trainer.micro_batches([part])[0]
            logprobs, _ = head_inputs(model, batch.row, 1.0).logprobs()
        own = part.sampled._replace(logprobs=logprobs.float().numpy())
        parts.append(replace(part, sampled=own))
    forwards = list[int]()
    model.base_model.norm.register_forward_hook(lambda *_: forwards.append(1))
    metrics = trainer.step(parts)
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    return weights, metrics, len(forwards)


@pytest.mark.parametrize("minibatches", [1, 3])
def test_on_fresh_tokens_a_step_is_the_same_with_fewer_forwards(minibatches: int):
    computed, metrics, num_forwards = trained("computed", minibatches)
    estimated, others, num_fewer = trained("interpolated", minibatches)
    before = torch.cat([each.detach().flatten() for each in random_model("Qwen3").parameters()])
    assert (estimated - before).abs().max() > 1e-3
    torch.testing.assert_close(estimated, computed, rtol=0.0, atol=2e-4)
    assert (num_forwards, num_fewer) == (2 * minibatches - 1, minibatches)
    assert metrics["equal_version_tokens"] == SAMPLED * len(LENGTHS)
    # What is interpolated does not count as agreement of engine and learner.
    assert others["equal_version_tokens"] == SAMPLED * len(LENGTHS) / minibatches
