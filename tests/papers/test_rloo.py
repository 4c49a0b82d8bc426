"""RLOO (arXiv 2402.14740), worked in plain Python."""

import math
from statistics import mean

import numpy as np
import pytest
import torch

from mage_async.learning.corrections import Tokens
from tests.helpers.paper_trials import advantages_of, close, configured, drawn_rewards, trial_of

REWARDS = drawn_rewards(3, 1, 4, 2)
SCORES = [math.fsum(rewards) for rewards in REWARDS]


def test_the_baseline_of_a_trial_is_the_mean_score_of_the_others():
    """Eq. 9."""
    trials = [trial_of(index, rewards) for index, rewards in enumerate(REWARDS)]
    for number, own in enumerate(advantages_of(trials, "rloo")):
        others = SCORES[:number] + SCORES[number + 1 :]
        assert own == [close(SCORES[number] - mean(others))] * len(own)


@pytest.mark.parametrize("moved", [False, True])
def test_its_gradient_is_reinforces_at_the_first_update_and_clipped_at_later_ones(moved):
    """Eq. 9: the advantage times the gradient of the log-prob of the whole answer."""
    lengths = [3, 1, 4, 2]
    advantages = [SCORES[n] - mean(SCORES[:n] + SCORES[n + 1 :]) for n in range(4)]
    number = torch.from_numpy(np.repeat(np.arange(4), lengths))
    before = -3 * torch.rand(10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gaps = torch.tensor([0.5, -0.5] * 5, dtype=torch.float64) if moved else torch.zeros(10)
    current = (before + gaps).requires_grad_()
    factors = torch.tensor(advantages, dtype=torch.float64)[number]
    fresh = torch.zeros(10, dtype=torch.int32)
    tokens = Tokens(current, before, before, factors, fresh, number, number)
    loss = configured("rloo").learner.correction.surrogate(tokens).losses.sum()
    (made,) = torch.autograd.grad(loss, current)
    answers = torch.zeros(4, dtype=torch.float64).index_add(0, number, current)
    reinforce = -(torch.tensor(advantages, dtype=torch.float64) * answers).sum()
    (expected,) = torch.autograd.grad(reinforce, current)
    if moved:
        assert not made[gaps * factors > 0].any()
    else:
        torch.testing.assert_close(made, expected)
