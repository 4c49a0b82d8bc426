"""GRPO (arXiv 2402.03300), section 4.1.2 and eq. 3, worked in plain Python."""

import math
from dataclasses import replace
from statistics import mean, pstdev, stdev

import pytest
import torch

from mage_async.learning.packing import MicroBatch, loss_weights, training_sequences
from mage_async.learning.token_loss import HeadInputs, corrected_loss
from mage_async.trajectory import Group
from tests.helpers.paper_trials import advantages_of, close, configured, drawn_rewards, trial_of

REWARDS = drawn_rewards(3, 1, 4, 2)
TRIALS = [trial_of(index, rewards) for index, rewards in enumerate(REWARDS)]
LENGTHS = [(2, 1, 3), (4,), (1, 1, 2, 2), (5, 1)]
LONG_TRIALS = [
    trial_of(n, r, lengths=s) for n, (r, s) in enumerate(zip(REWARDS, LENGTHS, strict=True))
]
SCORES = [math.fsum(rewards) for rewards in REWARDS]


def test_the_score_of_a_trial_is_normalised_in_its_group_and_given_to_all_its_turns():
    spread = pstdev(SCORES) + 1e-6
    for trial, score, own in zip(TRIALS, SCORES, advantages_of(TRIALS, "grpo"), strict=True):
        assert own == [close((score - mean(SCORES)) / spread)] * len(trial.turns)


def test_verls_deviation_makes_all_advantages_of_a_group_of_eight_7_percent_smaller():
    """verl and ORBIT divide by the deviation with n - 1."""
    rewards = drawn_rewards(*[2] * 8, seed=5)
    scores = [math.fsum(each) for each in rewards]
    trials = [trial_of(index, each) for index, each in enumerate(rewards)]
    theirs = [(score - mean(scores)) / (stdev(scores) + 1e-6) for score in scores]
    for own, their in zip(advantages_of(trials, "grpo"), theirs, strict=True):
        assert own[0] / their == pytest.approx(math.sqrt(8 / 7), rel=1e-6)
        assert own[0] / their == pytest.approx(1.07, abs=0.002)


def test_the_loss_is_a_mean_over_the_tokens_of_a_trial_and_then_over_trials():
    trials, lengths = LONG_TRIALS, LENGTHS
    losses = drawn_rewards(3, 1, 4, 2, seed=11)  # of each token of a turn
    of_trials = [
        sum(size * loss for size, loss in zip(sizes, own, strict=True)) / sum(sizes)
        for sizes, own in zip(lengths, losses, strict=True)
    ]
    weights = iter(loss_weights(trials, configured("grpo").learner.average))
    total = sum(
        next(weights) * size * loss
        for sizes, own in zip(lengths, losses, strict=True)
        for size, loss in zip(sizes, own, strict=True)
    )
    assert total / sum(map(sum, lengths)) == close(mean(of_trials))


@pytest.mark.parametrize("average", ["token", "trial", "turn"])
def test_the_divergence_is_averaged_like_the_loss_in_one_pass_or_after_the_logprobs(
    average, monkeypatch
):
    """Eq. 3 has beta times k3 inside of the mean over the tokens of an answer, and then of the mean
    over answers ("trial"); "turn" is a mean over the tokens of a turn, then turns, then trials."""
    config = configured("grpo", f"learner.average={average}", "learner.kl=0.5")
    sequences = training_sequences([Group(0, 0, tuple(LONG_TRIALS))], config, "cpu", version=0)
    batch = MicroBatch.of(sequences, torch.device("cpu"))
    count, vocabulary = batch.num_tokens, 7
    source = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    hidden, head = normal(count, 5).requires_grad_(), normal(vocabulary, 5)
    targets = torch.randint(vocabulary, (count,), generator=source)
    current = (hidden @ head.T).log_softmax(1)[torch.arange(count), targets]
    reference = current.detach() + normal(count)

    in_trials = torch.tensor([n for n, own in enumerate(LENGTHS) for _ in range(sum(own))])
    sizes = [size for own in LENGTHS for size in own for _ in range(size)]
    share = {
        "token": [1 / count] * count,
        "trial": [1 / 4 / sum(LENGTHS[n]) for n in in_trials],
        "turn": [1 / 4 / len(LENGTHS[n]) / size for n, size in zip(in_trials, sizes, strict=True)],
    }[average]
    spread, centre = pstdev(SCORES) + 1e-6, mean(SCORES)
    advantage = torch.tensor([(SCORES[n] - centre) / spread for n in in_trials])
    gap = reference - current
    objective = (current - current.detach()).exp() * advantage - 0.5 * (gap.exp() - gap - 1)
    loss = -(torch.tensor(share, dtype=torch.float64) * objective).sum()
    (expected,) = torch.autograd.grad(loss, hidden)

    fresh = current.detach()
    batch = replace(batch, proximal=fresh, behaviour=fresh)
    for chunk_bytes in (2**20, 1):  # logits that are kept, and those that are not
        monkeypatch.setattr("mage_kernels.head.CHUNK_BYTES", chunk_bytes)
        made = corrected_loss(config.learner)(
            HeadInputs(hidden, head, targets, 1.0),
            batch.correction_inputs(),
            torch.zeros(count),
            1 / count,
            reference,
            batch.weights,
        )
        (found,) = torch.autograd.grad(made.loss, hidden)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
