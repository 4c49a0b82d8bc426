"""Digests of weights: one definition, whatever computes it, and every change is seen."""

import numpy as np
import pytest
import torch
from torch import nn

from mage_async.policy import weight_digest
from mage_async.policy.weight_digest import ROW, overall, tensor_digests, word_sum

COUNT = 5 * ROW + 77


def values(dtype: torch.dtype, count: int = COUNT) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)


def by_definition(tensor: torch.Tensor) -> int:
    """The same sum by numpy, in one piece, as a signed number."""
    size = min(tensor.element_size(), 4)
    words = tensor.view(torch.uint8).numpy().view(f"i{size}").astype(np.uint64)
    columns, rows = (np.random.PCG64(seed).random_raw(ROW) | np.uint64(1) for seed in (0, 1))
    keys = np.outer(rows[: len(words) // ROW + 1], columns).reshape(-1)[: len(words)]
    return int(np.sum(words * keys, dtype=np.uint64).astype(np.int64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_a_sum_is_that_of_its_definition(dtype: torch.dtype) -> None:
    tensor = values(dtype)
    assert int(word_sum(tensor)) == by_definition(tensor)
    assert int(word_sum(tensor[:100])) == by_definition(tensor[:100])


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_blocks_of_another_size_give_the_same_sum(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = values(torch.float32)
    before = word_sum(tensor)
    monkeypatch.setitem(weight_digest.ROWS_AT_ONCE, "cpu", rows)
    assert torch.equal(word_sum(tensor), before)


def test_pieces_of_a_tensor_add_up_to_the_whole() -> None:
    """As shards of it would: what is elsewhere counts as 0 here."""
    tensor, here = values(torch.float32), torch.arange(COUNT) < 2 * ROW + 9
    pieces = [word_sum(torch.where(own, tensor, 0.0)) for own in (here, ~here)]
    assert torch.equal(sum(pieces), word_sum(tensor))


@pytest.mark.parametrize("place", [0, ROW - 1, ROW, COUNT - 1])
def test_the_least_change_of_any_element_is_seen(place: int) -> None:
    tensor = values(torch.float32)
    before = word_sum(tensor)
    tensor[place] = torch.nextafter(tensor[place], torch.tensor(9.0))
    assert not torch.equal(word_sum(tensor), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_two_changed_signs_are_seen(dtype: torch.dtype) -> None:
    tensor = values(dtype, 100)
    before = word_sum(tensor)
    tensor[:2] *= -1
    assert not torch.equal(word_sum(tensor), before)


def test_elements_and_rows_that_change_places_are_seen() -> None:
    tensor = values(torch.bfloat16)
    sums = {int(word_sum(tensor)), int(word_sum(tensor.flip(0)))}
    rows = tensor[: 5 * ROW].view(5, ROW)
    sums |= {int(word_sum(rows[order])) for order in ([0, 1, 2, 3, 4], [1, 0, 2, 3, 4])}
    assert len(sums) == 4


def test_a_digest_stays_what_it_was() -> None:
    """Journals hold digests: the definition may not change."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.arange(weight.numel()).view(weight.shape) - 1.5)
    assert overall(tensor_digests(model)) == "c2be137b65483515"


def test_name_shape_and_type_are_digested_too() -> None:
    digests = set()
    for shape, dtype in (((4, 2), torch.float32), ((2, 4), torch.float32), ((4, 2), torch.int32)):
        model = nn.Module()
        model.register_buffer("weight", torch.zeros(shape, dtype=dtype))
        digests.add(overall(tensor_digests(model)))
    assert len(digests) == 3
