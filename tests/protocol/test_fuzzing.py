"""Ten thousand mutated inputs a run: nothing but the decoders' own errors comes out of them."""

import random
import tracemalloc
from types import UnionType
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_async.config import config_file
from mage_async.protocol.journal_records import Record
from mage_async.protocol.messages import Message
from tests.helpers.fuzzing.messages_and_records import example_messages, example_records
from tests.helpers.fuzzing.mutation import mutate
from tests.helpers.fuzzing.targets import Target, bundle, targets, unbundle

NUM_INPUTS = 2500
MAX_ALLOCATED_BYTES = 4 * 2**20
TARGETS = targets(config_file.find(None))
each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


@pytest.mark.parametrize(
    ("examples", "kinds"), [(example_messages(), Message), (example_records(), Record)]
)
def test_mutation_begins_from_one_of_each_kind(examples: list[object], kinds: UnionType) -> None:
    assert {type(each) for each in examples} == set(get_args(kinds))


@each_target
def test_a_seed_is_sound(target: Target) -> None:
    assert all(target.feed(seed) for seed in target.seeds)


@each_target
def test_mutated_inputs_are_sound_or_an_error_with_a_sentence(target: Target) -> None:
    source = random.Random(0)
    num_sound = sum(target.feed(mutate(target.seeds, source)) for _ in range(NUM_INPUTS))
    assert 0 < num_sound < NUM_INPUTS  # mutation reaches both sides


@each_target
def test_no_input_makes_a_decoder_allocate_more_than_its_limit(target: Target) -> None:
    source = random.Random(1)
    tracemalloc.start()
    for _ in range(100):
        data = mutate(target.seeds, source)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        target.feed(data)
        assert tracemalloc.get_traced_memory()[1] - before < MAX_ALLOCATED_BYTES
    tracemalloc.stop()


@each_target
@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=400))
def test_any_bytes_are_an_input(target: Target, data: bytes) -> None:
    target.feed(data)


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_frames_survive_their_bundle(frames: list[bytes]) -> None:
    assert unbundle(bundle(frames, sealed=False)) == frames


def test_the_same_seed_gives_the_same_inputs() -> None:
    seeds = TARGETS[0].seeds
    one, other = random.Random(5), random.Random(5)
    for _ in range(50):
        assert mutate(seeds, one) == mutate(seeds, other)
