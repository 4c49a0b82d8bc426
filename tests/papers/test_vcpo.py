"""VCPO (arXiv 2602.17616), worked in plain Python and on a small model."""

import math
import random
from itertools import chain

import pytest
import torch
from transformers import Qwen3ForCausalLM

from mage_async.learning.corrections import Tokens, Vcpo
from mage_async.learning.forward import head_inputs
from mage_async.learning.trainer import Trainer
from tests.helpers.paper_trials import close, configured
from tests.helpers.random_models import smallest_qwen3
from tests.learning.test_trainer import sequence

SOURCE = random.Random(5)
LENGTHS = (3, 1, 4, 2)


def drawn(count, low, high):
    return [SOURCE.uniform(low, high) for _ in range(count)]


def test_a_sequence_is_weighed_by_its_product_up_to_the_bound():
    gaps = [drawn(length, -0.5, 1.2) for length in LENGTHS]
    advantages = [drawn(1, -1, 1) * length for length in LENGTHS]
    flat = torch.tensor(list(chain(*gaps)), dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(len(flat), dtype=torch.float64)
    number = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))
    advantage = torch.tensor(list(chain(*advantages)), dtype=torch.float64)
    tokens = Tokens(flat, zeros, zeros, advantage, zeros.int(), number, number)
    Vcpo(max_weight=2.0).surrogate(tokens).losses.sum().backward()
    expected = [
        -min(math.exp(math.fsum(own)), 2.0) * value
        for own, values in zip(gaps, advantages, strict=True)
        for value in values
    ]
    assert flat.grad.tolist() == close(expected)


@pytest.mark.parametrize("full_share", [1.0, 0.5])
def test_the_rate_follows_the_effective_sample_and_the_baseline_the_squared_scores(full_share):
    logs, norms, advantages = drawn(6, -3, 3), drawn(6, 0.1, 4), drawn(6, -1, 2)
    weights = [math.exp(each) for each in logs]
    share = sum(weights) ** 2 / sum(each**2 for each in weights) / 6
    counts = [w**2 * n for w, n in zip(weights, norms, strict=True)]
    columns = [torch.tensor(each, dtype=torch.float64) for each in (logs, norms, advantages)]
    baseline, factor = Vcpo(full_share=full_share).variance_controls(*columns)
    assert float(factor) == close(math.sqrt(min(1.0, share / full_share)))
    mean = sum(c * a for c, a in zip(counts, advantages, strict=True)) / sum(counts)
    assert float(baseline) == close(mean)


def test_no_other_baseline_has_a_smaller_second_moment():
    """What the closed form minimises: the sum of |w (A - b) s|^2."""
    logs, norms, advantages = drawn(6, -2, 2), drawn(6, 0.1, 4), drawn(6, -1, 2)
    columns = [torch.tensor(each, dtype=torch.float64) for each in (logs, norms, advantages)]
    baseline = float(Vcpo().variance_controls(*columns)[0])

    def moment(b):
        rows = zip(logs, norms, advantages, strict=True)
        return sum(math.exp(2 * w) * n * (a - b) ** 2 for w, n, a in rows)

    assert moment(baseline) < min(moment(baseline - 1e-3), moment(baseline + 1e-3))


def test_the_trainer_steps_by_the_reduced_rate_from_advantages_less_the_baseline():
    torch.manual_seed(0)
    config = configured(None, "learner.correction=vcpo", "learner.minibatches=1")
    taught = Trainer(Qwen3ForCausalLM(smallest_qwen3()), config)
    parts = [sequence(number, logprob=-3.4 - 0.01 * number) for number in range(4)]
    batches = taught.micro_batches(parts)
    (made,) = taught._variance_controlled(batches, parts)

    logs, norms, advantages = [], [], []
    for part in parts:
        (alone,) = taught.micro_batches([part])
        logprobs, _ = head_inputs(taught.model, alone.row, 1.0).logprobs()
        taught.model.zero_grad()
        logprobs.sum().backward()
        grads = [each.grad for each in taught.model.parameters() if each.grad is not None]
        norms.append(sum(float((each.double() ** 2).sum()) for each in grads))
        logs.append(float((logprobs.detach() - alone.behaviour).double().sum()))
        advantages.append(float(alone.advantages.double().mean()))
    weights = [math.exp(each) for each in logs]
    counts = [w**2 * n for w, n in zip(weights, norms, strict=True)]
    baseline = sum(c * a for c, a in zip(counts, advantages, strict=True)) / sum(counts)
    share = sum(weights) ** 2 / sum(each**2 for each in weights) / 4
    moved = (batches[0].advantages - made.advantages).double()
    assert moved.tolist() == pytest.approx([baseline] * len(moved), rel=0, abs=1e-6)
    plain = config.learner.learning_rate / config.learner.warmup_steps
    assert taught.optimizer.param_groups[0]["lr"] == pytest.approx(plain * math.sqrt(share), 1e-4)
