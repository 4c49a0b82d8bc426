"""float32 masters behind bfloat16: no update is lost, and a resumed run goes on with them."""

import copy
import random

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from mage_async.assembly import check
from mage_async.config import config_file
from mage_async.config.schema import Config, Learner, Lora
from mage_async.errors import ConfigError, RunError
from mage_async.learning.lora import add_adapters
from mage_async.learning.packing import SampledTokens, TrainingSequence
from mage_async.learning.trainer import Trainer
from tests.helpers.random_models import smallest_qwen3

SHAPE = smallest_qwen3()
RATE = 1e-6


def batch(step: int) -> list[TrainingSequence]:
    """Six sequences of 20 tokens."""
    source = random.Random(step)
    zeros = [np.zeros(12, np.int32) for _ in range(5)]
    return [
        TrainingSequence(
            np.array([source.randrange(32) for _ in range(20)], np.int32),
            np.arange(4, 16),
            SampledTokens(np.full(12, -3.0, np.float32), *zeros),
            np.array([12]),
            torch.tensor([source.choice((-1.0, 1.0))]),
        )
        for _ in range(6)
    ]


def trainer(dtype: torch.dtype, *, masters: bool, max_tokens_per_microbatch: int = 0) -> Trainer:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(SHAPE).to(torch.bfloat16).to(dtype)
    rules = Learner(
        minibatches=1,
        learning_rate=RATE,
        final_learning_rate=RATE,
        warmup_steps=0,
        beta2=0.999,
        float32_masters=masters,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
    )
    return Trainer(model, Config(learner=rules))


def moved(taught: Trainer, steps: int) -> torch.Tensor:
    """How far training moves what the optimizer changes: float32 [weights]."""
    before = [weight.detach().clone().float() for weight in taught.masters.trained]
    for step in range(steps):
        taught.step(batch(step))
    after = zip(taught.masters.trained, before, strict=True)
    return torch.cat([(new.detach().float() - old).flatten() for new, old in after])


def test_updates_that_bfloat16_rounds_away_reach_the_masters() -> None:
    lost = moved(trainer(torch.bfloat16, masters=False), 8)
    kept = moved(trainer(torch.bfloat16, masters=True), 8)
    true = moved(trainer(torch.float32, masters=False), 8)
    assert (kept != 0).float().mean() > 5 * (lost != 0).float().mean()
    assert torch.cosine_similarity(kept, true, dim=0) > 0.9
    assert kept.abs().max() <= 8.1 * RATE


def test_the_model_is_its_masters_rounded() -> None:
    taught = trainer(torch.bfloat16, masters=True)
    moved(taught, 3)
    weights = [weight for weight in taught.model.parameters() if weight.requires_grad]
    for weight, master in zip(weights, taught.masters.trained, strict=True):
        assert (weight.dtype, master.dtype) == (torch.bfloat16, torch.float32)
        assert weight.grad is None
        assert torch.equal(weight, master.to(torch.bfloat16))


def test_gradients_of_passes_add_up_in_float32() -> None:
    whole, cut = (
        trainer(torch.bfloat16, masters=True, max_tokens_per_microbatch=size) for size in (0, 20)
    )
    for taught in (whole, cut):
        taught.update(taught.micro_batches(batch(0)), 0.01)
    for one, other in zip(whole.masters.trained, cut.masters.trained, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert other.grad.dtype == torch.float32
        assert torch.allclose(one.grad, other.grad, rtol=0.1, atol=2e-3)


def test_a_restored_trainer_goes_on_to_the_same_bits() -> None:
    taught = trainer(torch.bfloat16, masters=True)
    moved(taught, 2)
    state = copy.deepcopy(taught.state())
    resumed = trainer(torch.bfloat16, masters=True)
    resumed.model.load_state_dict(taught.model.state_dict())
    resumed.restore(state)
    for each in (taught, resumed):
        each.step(batch(7))
    pairs = zip(taught.masters.trained, resumed.masters.trained, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_checkpoint_of_another_kind_is_refused() -> None:
    state = trainer(torch.bfloat16, masters=False).state()
    with pytest.raises(RunError, match="leave learner"):
        trainer(torch.bfloat16, masters=True).restore(state)


@pytest.mark.parametrize("others", [(), ("policy.dtype=bfloat16", "policy.lora.rank=2")])
def test_masters_of_nothing_are_refused(others: tuple[str, ...]) -> None:
    config = config_file.load(config_file.find(None), ["learner.float32_masters=true", *others])
    with pytest.raises(ConfigError, match="is for all weights of a model in bfloat16"):
        check(config)


def test_adapters_and_float32_weights_are_their_own_masters() -> None:
    assert trainer(torch.float32, masters=True).masters.tensors() == []
    model = Qwen3ForCausalLM(SHAPE).to(torch.bfloat16)
    add_adapters(model, Lora(rank=2), 0)
    adapted = Trainer(model, Config(learner=Learner(float32_masters=True)))
    assert adapted.masters.tensors() == []
    assert len(adapted.state()) == 2
