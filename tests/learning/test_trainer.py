"""A step of the trainer on a tiny model, under different corrections."""

import copy
import dataclasses
import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import Qwen3ForCausalLM

from mage_async.config import config_file
from mage_async.config.schema import AnyCorrection
from mage_async.config.tables import kinds
from mage_async.learning.forward import head_inputs
from mage_async.learning.packing import MicroBatch, SampledTokens, TrainingSequence, sequences_of
from mage_async.learning.trainer import Trainer
from mage_async.policy_version import VersionRun
from mage_async.restriction import AllowedSets
from mage_async.results.metrics import check_names
from mage_async.trajectory import Kind, Segment, Task, Trial, Turn
from tests.helpers.random_models import smallest_qwen3

TASK = Task("rps", "fixed-rock", 3)


def sequence(seed, *, drawn_at=0, logprob=-3.0):
    """20 tokens of 32, of which 12 were sampled in three turns of two episodes."""
    source = random.Random(seed)
    advantages = torch.tensor([1.0, -0.5, source.random()])
    episodes = np.repeat([0, 0, 1], 4).astype(np.int32)
    versions, zeros = np.full(12, drawn_at, np.int32), np.zeros(12, np.int32)
    return TrainingSequence(
        np.array([source.randrange(32) for _ in range(20)], np.int32),
        np.concatenate([np.arange(start, start + 4) for start in (2, 8, 14)]),
        SampledTokens(
            np.full(12, logprob, np.float32),
            versions,
            versions.copy(),
            episodes,
            zeros,
            zeros.copy(),
        ),
        np.array([4, 4, 4]),
        advantages,
    )


def trainer(name, **options):
    torch.manual_seed(0)
    shape = smallest_qwen3()
    changes = [f"learner.{key}={value}" for key, value in options.items()]
    config = config_file.load(config_file.find(None), [f"learner.correction={name}", *changes])
    return Trainer(Qwen3ForCausalLM(shape), config)


@pytest.mark.parametrize("name", kinds(AnyCorrection))
def test_every_correction_trains_and_every_metric_is_explained(name):
    # The weights are random, and the policy is far from the one that sampled.
    wide = {
        "m2po": {"correction.max_second_moment": 0.5},
        "mis_geometric": {"correction.keep_low": 0.01, "correction.keep_high": 100},
    }
    taught = trainer(name, **wide.get(name, {}))
    before = [weight.detach().clone() for weight in taught.model.parameters()]
    metrics = taught.step([sequence(seed) for seed in range(6)])
    check_names(metrics)
    assert all(np.isfinite(value) for value in metrics.values())
    changed = zip(before, taught.model.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in changed)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_an_update_whose_gradient_is_not_finite_is_skipped_and_leaves_no_trace(wrong):
    batch = [sequence(seed) for seed in range(6)]
    taught, undisturbed = (trainer("decoupled", minibatches=2) for _ in range(2))
    undisturbed.version = 1
    broken = copy.deepcopy(batch)
    for each in broken:
        each.advantages[1] = wrong
    metrics = taught.step(broken)
    assert metrics["skipped_updates"] == 2.0
    assert not np.isfinite(metrics["grad_norm"])
    both = [each.step(batch) for each in (taught, undisturbed)]
    assert both[0] == both[1]
    assert both[0]["skipped_updates"] == 0.0
    for one, other in zip(taught.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_other_updates_of_a_step_are_made():
    taught = trainer("decoupled", minibatches=3)
    before = [weight.detach().clone() for weight in taught.model.parameters()]
    batch = [sequence(seed) for seed in range(6)]
    batch[4].advantages[0] = torch.nan
    assert taught.step(batch)["skipped_updates"] == 1.0
    after = list(taught.model.parameters())
    assert all(weight.isfinite().all() for weight in after)
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_strategies_are_learned_at_the_temperature_they_were_drawn_at():
    taught = trainer("decoupled")
    part = sequence(3)
    part.sampled.kinds[:4] = Kind.STRATEGY
    plain = taught.with_proximal(taught.micro_batches([part])[0]).proximal
    sampling = replace(taught.config.sampling, strategy_temperature=1.6)
    taught.adopt(replace(taught.config, sampling=sampling))
    hot = taught.with_proximal(taught.micro_batches([part])[0]).proximal
    states = head_inputs(taught.model, MicroBatch.of([part], torch.device("cpu")).row, 1.0)
    logits = states.hidden @ states.head.T
    expected = (logits / 1.6).log_softmax(-1).gather(1, states.targets[:, None])[:, 0]
    assert torch.allclose(hot[:4], expected[:4], atol=1e-5)
    assert torch.equal(hot[4:], plain[4:])
    assert not torch.allclose(hot[:4], plain[:4], atol=1e-3)


def test_tokens_above_the_entropy_ceiling_and_reflections_get_no_bonus():
    norms = {}
    for ceiling, kind in ((0.0, Kind.ACT), (9.0, Kind.ACT), (0.1, Kind.ACT), (0.0, Kind.REFLECT)):
        taught = trainer("none", entropy=0.5, entropy_ceiling=ceiling, minibatches=1)
        part = sequence(0)
        part.advantages[:], part.sampled.kinds[:] = 0.0, kind
        norms[ceiling, kind] = taught.step([part])["grad_norm"]
    assert norms[0.0, Kind.ACT] == norms[9.0, Kind.ACT] > 0  # random weights: 3.4 nats a token
    assert norms[0.1, Kind.ACT] == norms[0.0, Kind.REFLECT] == 0


def test_with_restricted_tokens_alone_a_token_of_the_whole_vocabulary_gets_no_bonus():
    taught = trainer("none", entropy=0.5, entropy_tokens="restricted", minibatches=1)
    part = sequence(0)
    part.advantages[:] = 0.0
    assert taught.step([part])["grad_norm"] == 0
    drawn = [np.unique([token, 0, 31]) for token in part.tokens[part.places]]
    part = dataclasses.replace(part, allowed=AllowedSets.of([*drawn[:2], *[None] * 10]))
    batch = taught.micro_batches([part])[0]
    mask = taught.with_proximal(batch).entropy_mask
    assert mask is not None
    assert mask.tolist() == [1.0] * 2 + [0.0] * 10
    assert taught.step([part])["grad_norm"] > 0


def test_a_mask_does_not_make_what_is_left_count_more():
    fresh, stale = sequence(0, drawn_at=9), sequence(1, drawn_at=0)
    norms = []
    for batch in ([fresh, stale], [fresh]):
        taught = trainer(
            "age_mask", minibatches=1, entropy=0.0, grad_clip=1e9, **{"correction.max_age": 2}
        )
        taught.version = 9
        metrics = taught.step(batch)
        norms.append(metrics["grad_norm"])
    assert metrics["masked_share"] == 0.0
    assert norms[0] == pytest.approx(norms[1] / 2, rel=1e-4)


def test_the_share_over_the_bound_is_against_the_configured_one():
    taught = trainer("decoupled")
    taught.version = 2
    metrics = taught.step([sequence(0, drawn_at=0), sequence(1, drawn_at=1)])
    assert metrics["over_bound_share"] == 0.5
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (1.5, 2.0)
    assert metrics["token_share_age_2"] == 0.5


def test_turns_are_numbered_without_gaps_over_all_packed_sequences():
    batch = MicroBatch.of([sequence(0), sequence(1)], torch.device("cpu"))
    assert batch.turns.tolist() == np.repeat(np.arange(6), 4).tolist()


def test_each_segment_gets_the_advantages_of_its_own_turns():
    runs = (VersionRun(0, 0, 0),)
    segment = Segment(np.arange(6, dtype=np.int32), np.ones(6, bool), np.zeros(6, np.float32), runs)
    turns = [
        Turn(Kind.ACT, 0, place, number, start, start + 2, 0.0, True, "")
        for place, (number, start) in enumerate([(0, 0), (2, 0), (0, 2), (2, 3)])
    ]
    trials = [Trial(TASK, index, 1, (segment,) * 3, tuple(turns)) for index in range(2)]
    made = sequences_of(trials, torch.arange(8.0))
    assert [part.advantages.tolist() for part in made] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert [part.places.tolist() for part in made] == [[0, 1, 2, 3], [0, 1, 3, 4]] * 2


def test_a_turn_without_a_choice_is_left_out_and_moves_no_advantage_to_another_turn():
    def trial(index, *is_sampled):
        flags = np.array(is_sampled, bool)
        segment = Segment(
            np.arange(8, dtype=np.int32), flags, np.zeros(8, np.float32), (VersionRun(0, 0, 0),)
        )
        turns = [
            Turn(Kind.ACT, 0, n, 0, start, start + 2, 0.0, True, "")
            for n, start in ((0, 1), (1, 5))
        ]
        return Trial(TASK, index, 1, (segment,), tuple(turns))

    forced, whole = trial(0, 0, 0, 0, 0, 0, 1, 1, 0), trial(1, 0, 1, 1, 0, 0, 1, 0, 0)
    made = sequences_of([forced, whole], torch.tensor([10.0, 11.0, 20.0, 21.0]))
    assert [part.advantages.tolist() for part in made] == [[11], [20, 21]]
    assert [part.turn_lengths.tolist() for part in made] == [[2], [2, 1]]


def test_a_kl_term_holds_the_policy_where_training_began():
    moved = {}
    for kl in (0.0, 50.0):
        taught = trainer("none", kl=kl, learning_rate=0.01, warmup_steps=0)
        taught.reference = copy.deepcopy(taught.model)
        for _ in range(4):
            metrics = taught.step([sequence(seed) for seed in range(6)])
        pairs = zip(taught.model.parameters(), taught.reference.parameters(), strict=True)
        moved[kl] = sum(float((a - b).detach().square().sum()) for a, b in pairs)
        assert (metrics["reference_k3"] > 0) == (kl > 0)
    assert moved[50.0] < 0.9 * moved[0.0]


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_products_of_float32_are_as_precise_as_the_rules_say(precision):
    before = torch.get_float32_matmul_precision()
    try:
        trainer("decoupled", matmul_precision=precision)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
