"""Digests of weights."""

import pytest
import torch
from torch import nn

from mage_async.learning import digest
from mage_async.learning.digest import overall, tensor_digests


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(torch.bfloat16)


@pytest.mark.parametrize("threads_from_bytes", [0, 1 << 40])
def test_a_digest_is_the_same_by_one_thread_or_many(monkeypatch, threads_from_bytes):
    known = tensor_digests(model())
    monkeypatch.setattr(digest, "THREADS_FROM_BYTES", threads_from_bytes)
    assert tensor_digests(model()) == known
    assert list(known) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_one_bit_of_one_tensor_changes_its_digest_and_the_whole_one():
    one, other = model(), model()
    with torch.no_grad():
        other[1].bias.view(torch.int16)[1] ^= 1
    ours, theirs = tensor_digests(one), tensor_digests(other)
    assert [name for name in ours if ours[name] != theirs[name]] == ["1.bias"]
    assert overall(ours) != overall(theirs)
