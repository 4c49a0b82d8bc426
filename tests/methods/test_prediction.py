"""The loss of predicting the environment's answers, beside the policy loss."""

import dataclasses

import numpy as np
import pytest
import torch

from mage_async.assembly import check, trial_config_of
from mage_async.config import config_file
from mage_async.environments.catalogue import load
from mage_async.errors import ConfigError
from mage_async.learning.attention import PACKED_ATTENTION
from mage_async.learning.packing import sequences_of
from mage_async.learning.trainer import Trainer
from mage_async.trajectory import Task
from mage_async.trials.scripted_play import chat_in_words, scripted_trial
from tests.helpers.random_models import in_double, random_model, sequence

LENGTHS = (40, 31, 22)
WEIGHT = 0.7


def test_the_tokens_to_predict_are_what_the_environment_answers() -> None:
    rps = load("rps")
    config = config_file.load(config_file.find("quickstart"))
    chat = chat_in_words()
    trial = scripted_trial(
        rps, Task("rps", "fixed-rock", 3), 0, trial_config_of(config, rps, chat, 2), chat
    )
    (found,) = sequences_of([trial], torch.zeros(len(trial.turns)))
    words = chat.decode(found.tokens[found.observed].tolist()).split()
    assert words.count("opp") == words.count("rock") == 7  # not what follows the last action
    assert not set(found.observed) & set(found.places)
    assert found.observed[0] == found.places[0] + 1


@pytest.mark.parametrize("max_tokens", [0, 40])
@pytest.mark.parametrize("shares", [False, True])
def test_its_gradient_is_that_of_the_cross_entropy(max_tokens: int, shares: bool) -> None:
    parts = [segment(length) for length in LENGTHS]
    config = config_file.load(
        config_file.find(None),
        [
            f"methods.prediction.weight={WEIGHT}",
            "learner.minibatches=1",
            "learner.grad_clip=1e9",
            "learner.entropy=0",
            f"learner.max_tokens_per_microbatch={max_tokens}",
            f"learner.shared_opening={str(shares).lower()}",
        ],
    )
    model = in_double(random_model("Qwen3")).train()
    expected, total = plain_gradient(parts)
    model.set_attn_implementation(PACKED_ATTENTION)
    metrics = Trainer(model, config).step(parts)
    gradient = torch.cat([each.grad.flatten() for each in model.parameters()])
    assert expected.abs().max() > 1e-3
    assert (gradient - expected).abs().max() < 1e-9
    number = sum(len(each.observed) for each in parts)
    assert metrics["prediction_loss"] == pytest.approx(total / number, rel=1e-5)


def segment(length: int):
    """A segment with advantages of 0, whose tokens between its two turns are to be predicted."""
    part = sequence(length)
    observed = np.arange(6, length - 3)
    return dataclasses.replace(part, observed=observed, advantages=torch.zeros(2))


def plain_gradient(parts) -> tuple[torch.Tensor, float]:
    """The loss as its docstring has it, by transformers' own forward of one segment at a time."""
    model = in_double(random_model("Qwen3")).train()
    num_sampled = sum(len(each.places) for each in parts)
    total = torch.zeros(())
    for each in parts:
        tokens = torch.from_numpy(each.tokens.astype(np.int64))
        logprobs = model(tokens[None]).logits[0].log_softmax(-1)
        total = total - logprobs[each.observed - 1, tokens[each.observed]].sum()
    (WEIGHT * total / num_sampled).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()]), float(total.detach())


@pytest.mark.parametrize(
    "changes",
    [
        ["learner.ranks=2"],
        ["methods.rema.separate_roles=true", "policy.lora.rank=4", "trial.strategy=turn"],
    ],
)
def test_it_is_refused_where_it_cannot_be_computed(changes: list[str]) -> None:
    config = config_file.load(
        config_file.find("quickstart"), ["methods.prediction.weight=0.3", *changes]
    )
    with pytest.raises(ConfigError, match=r"methods\.prediction"):
        check(config)
