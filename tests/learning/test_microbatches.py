"""Passes and checkpointed activations: the same step in less memory."""

import pytest
import torch

from mage_async.assembly import check
from mage_async.config import config_file
from mage_async.errors import ConfigError, RunError
from mage_async.learning.attention import PACKED_ATTENTION
from mage_async.learning.packing import split_minibatch
from mage_async.learning.trainer import Trainer
from tests.helpers.random_models import random_model, sequence

LENGTHS = (40, 31, 40, 22, 40, 13, 37)


def trained(*changes: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradients in float64 of a step of one minibatch, and its metrics."""
    settings = ["learner.minibatches=1", "learner.grad_clip=1e9", "learner.entropy=0.05", *changes]
    config = config_file.load(config_file.find(None), settings)
    model = random_model("Qwen3").double().train()
    model.set_attn_implementation(PACKED_ATTENTION)
    trainer = Trainer(model, config)
    trainer.reference = model if config.learner.kl else None
    metrics = trainer.step([sequence(length) for length in LENGTHS])
    found = {name: weight.grad for name, weight in model.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return found, metrics


def assert_alike(one, other, tolerance=1e-10) -> None:
    gradients = [torch.cat([grad.flatten() for grad in each[0].values()]) for each in (one, other)]
    assert gradients[0].abs().max() > 1e-3
    assert (gradients[0] - gradients[1]).abs().max() < tolerance
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        assert value == pytest.approx(other[1][name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("correction", ["decoupled", "gspo", "mis_sequence", "cispo"])
def test_gradients_and_metrics_do_not_know_of_passes(correction: str) -> None:
    whole = trained(f"learner.correction={correction}", "learner.kl=0.1")
    for budget, count in ((120, 2), (62, 5)):
        assert len(split_minibatch([sequence(each) for each in LENGTHS], budget)) == count
        in_passes = trained(
            f"learner.correction={correction}",
            "learner.kl=0.1",
            f"learner.max_tokens_per_microbatch={budget}",
        )
        assert_alike(whole, in_passes)


def test_checkpointed_activations_give_the_same_gradient_from_less_memory() -> None:
    kept = {}
    found = {}
    for is_on in ("false", "true"):
        num_bytes = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal num_bytes
            num_bytes += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found[is_on] = trained(f"learner.activation_checkpointing={is_on}")
        kept[is_on] = num_bytes
    assert_alike(found["false"], found["true"])
    assert kept["true"] < kept["false"] / 2


def test_a_pass_holds_whole_segments_in_their_order() -> None:
    sequences = [sequence(length) for length in LENGTHS]
    passes = split_minibatch(sequences, 80)
    assert [each for made in passes for each in made] == sequences
    assert [[len(each.tokens) for each in made] for made in passes] == [
        [40, 31],
        [40, 22],
        [40, 13],
        [37],
    ]


def test_a_segment_longer_than_a_pass_is_one_sentence() -> None:
    with pytest.raises(
        RunError, match=r"40 tokens does not fit into learner\.max_tokens_per_microbatch"
    ):
        split_minibatch([sequence(40)], 39)


def test_what_passes_cannot_hold_is_refused_before_the_run() -> None:
    for changes, reason in (
        (["learner.max_tokens_per_microbatch=100"], r"at least engine\.max_tokens = 160"),
        (
            ["learner.max_tokens_per_microbatch=999", "learner.correction=m2po"],
            "looks at a whole minibatch",
        ),
    ):
        with pytest.raises(ConfigError, match=reason):
            check(config_file.load(config_file.find(None), changes))
