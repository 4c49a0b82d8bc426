"""An update on tensors without values holds what an update on real ones holds."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.learning.attention import PACKED_ATTENTION
from mage_async.learning.lora import add_adapters
from mage_async.learning.trainer import Trainer
from mage_async.plan.model_shape import shape_of
from mage_async.plan.update_memory import Batch, Trace, random_segments, update_of

SMALL = ("admission.groups_per_step=2", "learner.minibatches=1", "policy.layers=3")
MASTERS = ("policy.dtype=bfloat16", "learner.float32_masters=true")
LORA = ("policy.lora.rank=4", "learner.activation_checkpointing=true")


def small(*changes: str) -> Config:
    return config_file.load(config_file.find(None), [*SMALL, *changes])


def test_a_budget_of_turns_bounds_the_contexts_of_a_compacted_trial() -> None:
    notes = ("trial.memory=notes", "trial.episodes=5")
    without, with_budget = (
        Batch.of(small(*notes, *more)).num_segments for more in ((), ("trial.episode_budget=2",))
    )
    assert with_budget * 5 == without * 2


@pytest.mark.parametrize(
    ("changes", "num_actions", "num_remarks"),
    [
        (("trial.memory=none", "trial.strategy=turn"), 4, 4),
        (("trial.strategy=episode",), 12, 3),
        (("trial.strategy=turn",), 12, 12),
        (("trial.memory=history_and_reflection", "trial.strategy=episode"), 12, 5),
        (("trial.memory=reflection",), 4, 1),
        (("trial.memory=notes", "trial.strategy=turn"), 1, 2),
        (("trial.memory=truncation",), 1, 0),
    ],
)
def test_a_batch_holds_the_tokens_of_actions_strategies_reflections_and_notes(
    changes: tuple[str, ...], num_actions: int, num_remarks: int
) -> None:
    limits = ("transcript.max_action_tokens=8", "transcript.max_reflection_tokens=64")
    batch = Batch.of(small(*changes, *limits, "engine.max_tokens=2048"))
    assert batch.sampled == num_actions * 8 + num_remarks * 64


def seen_on_real_tensors(config: Config) -> tuple[int, float]:
    """Peak bytes and operations of the second update of a real learner."""
    shape, batch = shape_of(config), Batch.of(config)
    segments = random_segments(batch.micro_batch_lengths(config), batch, shape.config.vocab_size)
    with Trace(shape.config.vocab_size) as trace:
        dtype = getattr(torch, config.policy.dtype)
        model = AutoModelForCausalLM.from_config(
            shape.config, dtype=dtype, attn_implementation=PACKED_ATTENTION
        )
        if config.policy.lora:
            add_adapters(model, config.policy.lora, 0)
        trainer = Trainer(model.train(), config)
        for _ in range(2):
            began = trace.flops
            batches = [trainer.with_proximal(each) for each in trainer.micro_batches(segments)]
            between = trace.flops
            trainer.update(batches, 1.0)
    share = 1 / config.learner.minibatches
    return trace.peak.total(), trace.flops - began - share * (between - began)


@pytest.mark.parametrize("changes", [(), LORA, MASTERS], ids=["whole", "adapters", "masters"])
def test_peak_and_operations_are_those_of_a_real_update(changes: tuple[str, ...]) -> None:
    config = small(*changes)
    shape, batch = shape_of(config), Batch.of(config)
    peak, flops = seen_on_real_tensors(config)
    update = update_of(config, shape, batch)
    assert update.parts.total() == pytest.approx(peak, rel=0.01)
    tokens = sum(batch.micro_batch_lengths(config))
    assert update.token_flops * tokens == pytest.approx(flops, rel=0.01)


def test_the_planned_micro_batch_is_as_full_as_shorter_trials_make_one() -> None:
    config, batch = small("learner.max_tokens_per_microbatch=400"), Batch(8, 160, 40)
    assert batch.micro_batch_lengths(config) == [160, 160, 80]
    assert [each.places.size for each in random_segments([160, 80], batch, 9)] == [40, 20]
    assert batch.micro_batch_lengths(small("learner.max_tokens_per_microbatch=4000")) == [160] * 8
    assert batch.micro_batch_lengths(small()) == [160] * 8


def test_parts_are_the_tensors_that_they_are_named_after() -> None:
    config = small()
    shape = shape_of(config)
    parts = update_of(config, shape, Batch.of(config)).parts
    assert parts["weights"] == pytest.approx(4 * shape.num_weights, rel=0.01)
    assert parts["optimizer"] == pytest.approx(8 * shape.num_weights, rel=0.01)
    adapted = update_of(small(*LORA), shape, Batch.of(config)).parts
    assert adapted["optimizer"] < parts["optimizer"] / 2
    assert adapted["activations"] < parts["activations"] / 2


def test_a_model_under_a_kl_term_is_held_twice() -> None:
    config = small("learner.kl=0.1")
    parts = update_of(config, shape_of(config), Batch.of(config)).parts
    assert parts["reference policy"] == parts["weights"]


def test_moments_in_8_bits_are_planned_without_their_library() -> None:
    config = small("learner.optimizer_state=8bit")
    shape, batch = shape_of(config), Batch.of(config)
    parts, whole = (update_of(each, shape, batch).parts for each in (config, small()))
    assert parts["optimizer"] < whole["optimizer"] / 2.5
    assert parts["weights"] == whole["weights"]
