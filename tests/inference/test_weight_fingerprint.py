"""Which faults sums of samples and row checksums reveal, and which they let pass."""

import weakref

import numpy as np
import pytest
import torch

from mage_async.completion import SECOND_ROLE
from mage_async.config.schema import Lora
from mage_async.inference.weight_fingerprint import (
    BLOCK_BYTES,
    MERGED_ROW_TOLERANCES,
    SAMPLED,
    FingerprintBuilder,
    WeightFingerprint,
    checked_row,
    joined,
    mismatch,
    row_checksums_of,
    sample_digest,
)
from mage_async.learning.lora import add_adapters, base_tensors, merged_tensors, trained_tensors
from mage_async.policy.snapshot import Snapshot
from tests.helpers.random_models import random_model

TAIL = 100
BODY = np.random.default_rng(0).integers(0, 256, 2 * SAMPLED * BLOCK_BYTES + TAIL, np.uint8)


def test_samples_of_versions_in_a_row_come_past_every_block() -> None:
    before = [sample_digest(BODY, version) for version in range(SAMPLED)]
    changed = BODY.copy()
    for block in (0, 17, SAMPLED, 2 * SAMPLED - 1):
        changed[:] = BODY
        changed[block * BLOCK_BYTES + 1234] ^= 1
        after = [sample_digest(changed, version) for version in range(SAMPLED)]
        seen = [version for version in range(SAMPLED) if before[version] != after[version]]
        assert seen == [block % SAMPLED]


@pytest.mark.parametrize(
    "length", [0, 3, TAIL, BLOCK_BYTES - 1, BLOCK_BYTES, 8 * BLOCK_BYTES + TAIL]
)
def test_a_small_body_is_digested_whole_in_every_version(length: int) -> None:
    body = BODY[:length].copy()
    digests = {sample_digest(body, version) for version in range(3)}
    assert len(digests) == 1
    assert sample_digest(BODY[: length + 1], 0) not in digests
    for place in {0, length // 2, length - 1} & set(range(length)):
        body[place] ^= 1
        assert sample_digest(body, 0) not in digests
        body[place] ^= 1


def row_checksums(tensors: dict[str, torch.Tensor], version: int) -> dict[str, float | None]:
    rows = {name: checked_row(tensor, version) for name, tensor in tensors.items()}
    return row_checksums_of({name: len(row) for name, row in rows.items()}, joined(rows.values()))


def fingerprint(tensors: dict[str, torch.Tensor], version: int) -> WeightFingerprint:
    """An engine's."""
    found = row_checksums(tensors, version)
    return WeightFingerprint(
        version=version, precision="float32", tensors={}, row_checksums=found, logprobs=()
    )


def test_a_row_checksum_is_a_rows_weighted_sum_over_its_elements_sizes() -> None:
    tensors = {
        "a": torch.tensor([[1.0, 0.0], [0.0, -2.0]]),
        "b": torch.tensor([0.0, 0.25], dtype=torch.bfloat16),
        "none": torch.zeros(4),
        "nan": torch.tensor([1.0, torch.nan]),
    }
    first, second = (
        row_checksums({"a": torch.eye(2)}, 0)["a"],
        row_checksums({"a": torch.eye(2)}, 1)["a"],
    )
    assert first == -1023 / 1024
    assert row_checksums(tensors, 0) == {"a": first, "b": second, "none": 0.0, "nan": None}
    assert row_checksums(tensors, 1)["a"] == -second


@pytest.mark.parametrize("roles", [None, ("first", "second")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_checksums_of_merged_rows_are_those_of_merged_tensors_but_for_rounding(
    dtype: torch.dtype, roles: tuple[str, str] | None
) -> None:
    model = random_model("Qwen3", initializer_range=0.2).to(dtype)
    add_adapters(model, Lora(rank=4, alpha=8.0), 0, roles=roles)
    source = torch.Generator().manual_seed(1)
    for tensor in trained_tensors(model).values():
        tensor.normal_(0.0, 0.3, generator=source)
    merged = {name: tensor.clone() for name, tensor in merged_tensors(model)}
    for version in range(20):
        published = Snapshot.of(model, version).fingerprint()
        assert published.row_tolerance == MERGED_ROW_TOLERANCES[published.precision]
        assert mismatch(published, fingerprint(merged, version)) == ""
        left = [name for name in merged if f"layers.{version % 3}." in name and "_proj" in name]
        base = {name: base_tensors(model)[name.removeprefix(SECOND_ROLE)] for name in left}
        assert "_proj" in mismatch(published, fingerprint(merged | base, version))


@torch.no_grad()
def test_without_adapters_one_changed_bit_of_a_row_is_seen() -> None:
    model = random_model("Qwen3", initializer_range=0.2)
    tensors = {name: tensor.clone() for name, tensor in base_tensors(model).items()}
    published = Snapshot.of(model, 0).fingerprint()
    assert mismatch(published, fingerprint(tensors, 0)) == ""
    tensors["model.norm.weight"].view(torch.int32)[5] ^= 1
    reason = mismatch(published, fingerprint(tensors, 0))
    assert reason == "a row of model.norm.weight is not the learner's"


@torch.no_grad()
def test_weights_that_have_become_nan_arrive_as_nan() -> None:
    model = random_model("Qwen3", initializer_range=0.2)
    model.model.norm.weight[3] = torch.nan
    published = Snapshot.of(model, 0).fingerprint()
    tensors = base_tensors(model)
    assert mismatch(published, fingerprint(tensors, 0)) == ""
    healthy = tensors | {"model.norm.weight": torch.ones(32)}
    assert mismatch(published, fingerprint(healthy, 0)) != ""


def test_of_a_tensor_that_has_passed_its_row_alone_stays_in_memory() -> None:
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    published = fingerprint({"a": torch.from_numpy(values.copy())}, version=3)
    builder, alive = FingerprintBuilder(published, None), weakref.ref(values)
    assert len(list(builder.passing([("a", torch.from_numpy(values))]))) == 1
    del values
    assert alive() is None
    found = builder.fingerprint(3, "float32", ())
    assert found.row_checksums == published.row_checksums
