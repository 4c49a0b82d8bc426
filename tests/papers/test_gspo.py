"""GSPO (arXiv 2507.18071), eq. 5 and 7, worked on whole completions."""

import numpy as np
import pytest
import torch

from mage_async.learning.corrections import Gspo, Tokens
from mage_async.learning.packing import loss_weights
from tests.helpers.paper_trials import trial_of

LENGTHS, ADVANTAGES = (1, 9, 4), (1.0, -0.5, 0.75)
NUMBER = np.repeat(np.arange(3), LENGTHS)


@pytest.mark.parametrize("average", ["token", "turn"])
def test_its_objective_is_a_mean_over_completions_which_the_default_average_is_not(average):
    source = torch.Generator().manual_seed(4)
    behaviour = -3 * torch.rand(len(NUMBER), generator=source, dtype=torch.float64)
    gap = 0.3 * torch.randn(len(NUMBER), generator=source, dtype=torch.float64)
    current = (behaviour + gap).requires_grad_()
    trials = [trial_of(n, [0.0], lengths=(length,)) for n, length in enumerate(LENGTHS)]
    weights = np.ones(3) if average == "token" else loss_weights(trials, average)
    number = torch.from_numpy(NUMBER)
    factors = torch.from_numpy(np.array(ADVANTAGES) * weights)[number]
    fresh = torch.zeros(len(NUMBER), dtype=torch.int32)
    tokens = Tokens(current, current.detach(), behaviour, factors, fresh, number, number)
    made = Gspo(clip_low=0.05, clip_high=0.1).surrogate(tokens).losses.mean()
    (found,) = torch.autograd.grad(made, current)

    def objective(number):
        own = number == NUMBER
        ratio, advantage = (current[own] - behaviour[own]).mean().exp(), ADVANTAGES[number]
        return torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.1) * advantage)

    shares = [1 / 3] * 3 if average == "turn" else [each / sum(LENGTHS) for each in LENGTHS]
    loss = -sum(share * objective(number) for number, share in enumerate(shares))
    torch.testing.assert_close(found, torch.autograd.grad(loss, current)[0])
    assert found.count_nonzero() > 0
