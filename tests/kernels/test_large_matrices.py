"""Offsets beyond 2^31: matrices of which only a few rows, far apart, are ever touched."""

import pytest
import torch
from torch import Tensor

FAR = 2**30


@pytest.fixture
def far_rows(triton_kernels: str, _nan_where_nothing_was_written: None):
    """Makes `[3, V]` with 2^30 elements from row to row, so that the last begins beyond 2^31."""
    torch.use_deterministic_algorithms(False)  # do not fill 4 GB: unwritten pages cost no memory

    def make(vocabulary: int) -> Tensor:
        storage = torch.empty(2 * FAR + vocabulary, dtype=torch.bfloat16, device=triton_kernels)
        return storage.as_strided((3, vocabulary), (FAR, 1))

    return make


def test_each_rows_own_element_is_overwritten(far_rows, triton_kernels: str) -> None:
    from mage_kernels.fused.head_kernels import sampled_token_gradient

    far = far_rows(300)
    near = torch.randn(3, 300).to(triton_kernels, torch.bfloat16)
    far.copy_(near)
    tokens = torch.arange(3, device=triton_kernels)
    for gradient in (far, near):
        sampled = torch.tensor([7.0, 8.0, 9.0]).to(far.device)
        sampled_token_gradient(gradient, tokens, sampled, first_column=0)
    assert torch.equal(far, near)
    assert far[tokens, tokens].tolist() == [7.0, 8.0, 9.0]


def test_kept_logits_are_written_and_read(far_rows, triton_kernels: str) -> None:
    from mage_kernels.fused.head_autograd import forward_rows
    from mage_kernels.fused.head_kernels import Coefficients, KeptLogits, kept_gradient
    from tests.helpers.random_heads import random_head

    hidden, head, tokens, _ = random_head(3, 300, 64, device=triton_kernels)
    ones = torch.ones(3, device=triton_kernels)
    near = KeptLogits.empty(3, 300, hidden)
    far = KeptLogits(far_rows(300), near.tile_max)
    results = [forward_rows(hidden, head, tokens, ones, kept) for kept in (near, far)]
    assert torch.equal(near.values, far.values)
    coefficients = Coefficients.of(*results[0], ones, ones, ones)
    rows = torch.arange(3, device=triton_kernels)
    for kept in (near, far):
        kept_gradient(kept.values, kept, rows, coefficients, first_column=0)
    assert torch.equal(near.values, far.values)
