"""The engine's forward computes what transformers computes."""

import json
import mmap
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mage_async.errors import PolicyError
from mage_async.inference.model import PolicyForward, Rows, buckets, forward_together
from mage_async.inference.weights import read_weights
from tests.inference.conftest import FAMILIES


def forward(model, sequences, starts, slots, copies=None):
    """Compute each sequence from its start on; logits after its last token, in the given order."""
    counts = np.array([len(s) for s in sequences]) - starts
    order = np.argsort(-counts, kind="stable")
    rows = Rows(np.asarray(slots)[order], np.asarray(starts)[order], counts[order])
    tokens = np.concatenate([sequences[row][starts[row] :] for row in order])
    (logits,) = forward_together(
        [PolicyForward(model, tokens, rows, copies or {}, np.arange(len(order)))]
    )
    return torch.log_softmax(logits, 1).numpy()[np.argsort(order)]


@pytest.mark.parametrize("num_slots", [9, 11, 16], ids=["neighbours", "close", "apart"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers_over_growing_contexts(
    references, family, num_slots
) -> None:
    reference, source = references[family], np.random.default_rng(1)
    model = reference.engine_model(slots=num_slots)
    slots = source.permutation(num_slots)[:9]
    sequences, starts = [np.zeros(0, np.int32)] * 9, np.zeros(9, np.int64)
    for _ in range(6):  # a prefill of up to 40 tokens beside rows that add a single one
        counts = source.choice([1, 1, 2, 7, 40], 9)
        sequences = [
            np.concatenate([s, source.integers(0, 96, n, np.int32)])
            for s, n in zip(sequences, counts, strict=True)
        ]
        ours = forward(model, sequences, starts, slots)
        theirs = np.stack([reference.logprobs(s)[-1] for s in sequences])
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
        starts += counts


def test_a_prefix_computed_in_this_forward_is_lent_on_in_it(reference) -> None:
    model, source = reference.engine_model(), np.random.default_rng(2)
    prefix = source.integers(0, 96, 30, np.int32)
    sequences = [np.concatenate([prefix, source.integers(0, 96, 3, np.int32)]) for _ in range(4)]
    copies = {(5, 30): [1, 2], (2, 30): [7]}
    ours = forward(model, sequences, np.array([0, 30, 30, 30]), [5, 1, 2, 7], copies)
    theirs = np.stack([reference.logprobs(s)[-1] for s in sequences])
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def test_rows_of_like_width_share_a_bucket_and_a_long_prompt_has_its_own() -> None:
    counts = np.array([600, 9, 8, 8, 7, 1])
    rows = Rows(np.arange(6), np.zeros(6, np.int64), counts)
    assert [(b.tokens, b.width) for b in buckets(rows)] == [
        (slice(0, 600), 600),
        (slice(600, 633), 9),
    ]


def test_slots_that_are_close_together_are_read_where_they_are() -> None:
    def slots(*numbers: int) -> object:
        rows = Rows(np.array(numbers), np.arange(len(numbers)), np.ones(len(numbers), np.int64))
        (bucket,) = buckets(rows)
        assert bucket.masks[0].shape == (bucket.height, 1, 1, len(numbers))
        return bucket.slots

    assert slots(3, 4, 5, 6) == slice(3, 7)
    assert slots(6, 3, 5, 4) == slice(3, 7)
    assert slots(3, 4, 6, 7) == slice(3, 8)
    assert torch.equal(slots(3, 4, 6, 8), torch.tensor([3, 4, 6, 8]))


def test_keys_and_values_take_memory_where_they_are_written(reference) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    reference.engine_model()
    before = resident()
    model = reference.engine_model(slots=4000, max_tokens=512)
    rows = Rows(np.array([3999]), np.array([0]), np.array([4]))
    forward_together([PolicyForward(model, np.array([1, 2, 3, 4]), rows, {}, np.array([0]))])
    assert model.cache_bytes() > 500_000_000
    assert resident() - before < 100_000_000

    full = Rows(np.arange(1000), np.zeros(1000, int), np.full(1000, 128))
    tokens = np.ones(128_000, int)
    forward_together([PolicyForward(model, tokens, full, {}, np.array([0]))])
    held = resident()
    model.discard_cache()
    assert held - resident() > 25_000_000


def test_a_folder_in_shards_is_the_folder_in_one_piece(reference, tmp_path) -> None:
    reference.model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    whole = reference.engine_model().weights
    shards = read_weights(tmp_path, reference.engine_model().architecture)
    assert torch.equal(whole.layers[1].gate_up, shards.layers[1].gate_up)
    assert torch.equal(whole.head, shards.head)


def test_a_tied_head_may_be_written_twice_and_bfloat16_is_widened(reference, tmp_path) -> None:
    tensors = load_file(reference.directory / "model.safetensors")
    tensors |= {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    file = tmp_path / "weights.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, file)
    architecture, whole = reference.engine_model().architecture, reference.engine_model().weights
    weights = read_weights(file, architecture)
    assert weights.head is weights.embedding
    assert weights.num_parameters == whole.num_parameters == reference.model.num_parameters()
    assert torch.equal(weights.norm, whole.norm.bfloat16().float())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(7)}), "shape \\[7\\], not \\[32\\]"),
        (lambda t: t.update(another=torch.ones(1)), "another"),
    ],
)
def test_weights_of_another_model_are_refused(reference, tmp_path, change, says) -> None:
    tensors = load_file(reference.directory / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "weights.safetensors")
    with pytest.raises(PolicyError, match=says):
        read_weights(tmp_path / "weights.safetensors", reference.engine_model().architecture)


@pytest.mark.parametrize("content", [None, b"no safetensors at all"])
def test_a_file_that_is_none_is_named(reference, tmp_path, content) -> None:
    file = tmp_path / "weights.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(PolicyError, match=r"weights\.safetensors: cannot be read"):
        read_weights(file, reference.engine_model().architecture)


def test_more_tokens_than_the_model_has_positions_are_refused(reference) -> None:
    with pytest.raises(PolicyError, match=r"made for 512 positions, but engine\.max_tokens is 513"):
        reference.engine_model(max_tokens=513)


def test_a_folder_of_transformers_4_gives_the_same_logprobs(reference, tmp_path) -> None:
    folder = shutil.copytree(reference.directory, tmp_path / "v4")
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    (folder / "config.json").write_text(json.dumps(config))
    tokens = np.arange(40, dtype=np.int32)
    model = type(reference)(folder, reference.model).engine_model()
    ours = forward(model, [tokens], np.zeros(1, np.int64), [0])
    np.testing.assert_allclose(ours[0], reference.logprobs(tokens)[-1], atol=1e-4, rtol=0)
