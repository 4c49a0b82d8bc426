"""What all sequences of a pass begin with goes through the model once, with the gradient of all."""

import numpy as np
import pytest
import torch

from mage_async.config import config_file
from mage_async.config.schema import Lora
from mage_async.learning.attention import PACKED_ATTENTION
from mage_async.learning.lora import add_adapters, trained_tensors
from mage_async.learning.packing import TokenRow, TrainingSequence, split_minibatch
from mage_async.learning.trainer import Trainer
from mage_async.policy import warm_start
from tests.helpers.random_models import in_double, random_model, sequence

LENGTHS = (40, 31, 40, 22, 40, 13, 37)
CPU = torch.device("cpu")
RULES = config_file.load(config_file.find(None)).learner


def alike_for(opening: int) -> list[TrainingSequence]:
    """Sequences that begin with the same tokens; those of places 2 to 5 were sampled."""
    found = [sequence(length) for length in LENGTHS]
    for number, each in enumerate(found):
        each.tokens[:opening] = found[0].tokens[: min(opening, len(each.tokens))]
        if opening < len(each.tokens):
            each.tokens[opening] = 3 + number  # and no token more
    return found


def trained(
    parts: list[TrainingSequence], *changes: str, shares: bool, rank: int = 0, window: int = 0
) -> tuple[torch.Tensor, dict[str, float], int]:
    """The gradient of one update in float64, the step's metrics, and how many tokens went through
    the model in training.
    """
    settings = ["learner.minibatches=1", "learner.grad_clip=1e9", "learner.entropy=0.05"]
    settings += [f"learner.shared_opening={str(shares).lower()}", *changes]
    config = config_file.load(config_file.find(None), settings)
    sight = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    model = in_double(random_model("Qwen3", **sight if window else {})).train()
    if rank:
        add_adapters(model, Lora(rank=rank, alpha=8.0), 0)
        for tensor in trained_tensors(model).values():
            tensor.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation(PACKED_ATTENTION)
    seen = []
    model.base_model.norm.register_forward_hook(
        lambda module, given, out: seen.append(out.shape[1] * out.requires_grad)
    )
    trainer = Trainer(model, config)
    metrics = trainer.step(parts)
    gradients = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
    return torch.cat(gradients), metrics, sum(seen)


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("opening", [0, 1, 2, 4, 12, 40])
def test_gradients_and_metrics_do_not_know_of_it(opening: int, window: int) -> None:
    parts = alike_for(opening)
    apart, own, num_tokens = trained(parts, shares=False, window=window)
    shared, others, num_shared = trained(parts, shares=True, window=window)
    assert num_tokens == sum(LENGTHS)
    assert num_shared == sum(LENGTHS) - (len(LENGTHS) - 1) * min(opening, min(LENGTHS) - 1)
    assert apart.abs().max() > 1e-3
    assert (apart - shared).abs().max() < 1e-10
    for name, value in own.items():
        assert value == pytest.approx(others[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("changes", "rank"),
    [
        (("learner.max_tokens_per_microbatch=95",), 0),
        (("learner.activation_checkpointing=true",), 0),
        (("learner.correction=gspo", "learner.max_tokens_per_microbatch=62"), 4),
        (("learner.activation_checkpointing=true", "learner.kl=0.1"), 4),
        (("learner.minibatches=3", "learner.learning_rate=1e-5"), 0),
    ],
)
def test_nor_in_passes_with_adapters_or_less_memory(changes: tuple[str, ...], rank: int) -> None:
    parts = alike_for(11)
    apart = trained(parts, *changes, shares=False, rank=rank)
    shared = trained(parts, *changes, shares=True, rank=rank)
    assert shared[2] < 0.9 * apart[2]
    assert (apart[0] - shared[0]).abs().max() < 1e-10


def test_a_pass_has_room_for_more_sequences() -> None:
    parts = alike_for(12)
    assert [len(each) for each in split_minibatch(parts, 80)] == [2, 2, 2, 1]
    passes = split_minibatch(parts, 80, shares_opening=True)
    assert len(passes) == 3
    assert {id(part) for each in passes for part in each} == {id(part) for part in parts}
    for each in passes:
        row = TokenRow.of([part.tokens for part in each], CPU, shares_opening=True)
        assert row.tokens.shape[1] <= 80
    alone = split_minibatch([sequence(40), sequence(41)], 81, shares_opening=True)
    assert [len(each) for each in alone] == [2]


def test_sequences_of_two_games_go_into_passes_of_their_own() -> None:
    one, other = alike_for(12), [sequence(length) for length in LENGTHS]
    for each in other:
        each.tokens[:12] = np.arange(40, 52)
    mixed = [each for pair in zip(one, other, strict=True) for each in pair]
    passes = split_minibatch(mixed, 1000, shares_opening=True)
    assert [{int(each.tokens[0]) for each in found} for found in passes] in (
        [{int(one[0].tokens[0])}, {40}],
        [{40}, {int(one[0].tokens[0])}],
    )


def test_a_row_has_the_opening_once_and_positions_of_each_sequence() -> None:
    sequences = [np.array([5, 6, 7, 8]), np.array([5, 6, 9]), np.array([5, 6, 7, 4, 3])]
    row = TokenRow.of(sequences, CPU, shares_opening=True)
    assert row.tokens.tolist() == [[5, 6, 7, 8, 9, 7, 4, 3]]
    assert row.positions.tolist() == [[0, 1, 2, 3, 2, 2, 3, 4]]
    assert row.index_of(2, np.array([1, 2, 4])).tolist() == [1, 5, 7]
    for number, tokens in enumerate(sequences):
        places = np.arange(len(tokens))
        assert row.tokens[0, row.index_of(number, places)].tolist() == tokens.tolist()
        assert row.positions[0, row.index_of(number, places)].tolist() == places.tolist()


def test_the_warm_start_has_the_same_losses_and_gradient() -> None:
    source = np.random.default_rng(0)
    examples = [
        warm_start.Example(
            part.tokens.astype(np.int64),
            source.random(len(part.tokens), np.float32),
            np.full(len(part.tokens), -1),
        )
        for part in alike_for(12)
    ]
    found = {}
    for shares in (False, True):
        model = in_double(random_model("Qwen3"))
        model.set_attn_implementation(PACKED_ATTENTION)
        losses, weights, _ = warm_start._losses(model, examples, shares_opening=shares)
        (losses * weights).sum().backward()
        gradient = torch.cat([one.grad.flatten() for one in model.parameters()])
        found[shares] = (losses.detach(), weights, gradient)
    for apart, shared in zip(found[False], found[True], strict=True):
        assert (apart - shared).abs().max() < 1e-10
    assert len(found[True][0]) == sum(LENGTHS) - len(LENGTHS)
