"""Which of torch's attention kernels packed attention can come to."""

import pytest
import torch
from torch.nn import functional

from mage_async.learning import attention
from mage_async.learning.attention import Boundaries, lacks_grouped_kernel, packed_attention


def attend(opening=0):
    """Seven tokens of two sequences or their opening, four heads that share two key heads."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 7, 8) for heads in (4, 2, 2))
    own = torch.tensor([3, 4] if not opening else [1, 6 - opening])
    boundaries = Boundaries.of(own, opening)
    module = torch.nn.Module()
    return packed_attention(module, query, key, value, None, scaling=0.3, boundaries=boundaries)[0]


@pytest.mark.parametrize(
    ("device", "dtype", "lacks"),
    [
        ("cuda", torch.float32, True),
        ("cuda", torch.bfloat16, False),
        ("cuda", torch.float16, False),
        ("cpu", torch.float32, False),
    ],
)
def test_only_16_bits_on_a_gpu_share_key_heads_without_keeping_all_weights(device, dtype, lacks):
    assert lacks_grouped_kernel(torch.device(device), dtype) == lacks
    assert lacks_grouped_kernel(torch.device(device), dtype, is_masked=True) == (device == "cuda")


@pytest.mark.parametrize("opening", [0, 2])
def test_repeated_key_heads_attend_as_shared_ones_do(opening, monkeypatch):
    shared, asked = attend(opening), []
    kernel = functional.scaled_dot_product_attention

    def watched(query, key, value, mask, **options):
        asked.append((query.shape[1], key.shape[1], value.shape[1], options["enable_gqa"]))
        return kernel(query, key, value, mask, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(attention, "lacks_grouped_kernel", lambda *_, **__: True)
    assert torch.allclose(attend(opening), shared, atol=1e-6)
    assert set(asked) == {(4, 4, 4, False)}


def test_sequences_of_one_length_attend_without_copies_bit_by_bit_as_copied(monkeypatch):
    torch.manual_seed(0)
    states = [torch.randn(1, heads, 8, 8, requires_grad=True) for heads in (4, 2, 2)]
    boundaries, module = Boundaries.of(torch.tensor([4, 4])), torch.nn.Module()

    def attended_and_gradients():
        out, _ = packed_attention(module, *states, None, scaling=0.3, boundaries=boundaries)
        return out, *torch.autograd.grad(out.square().sum(), states)

    with monkeypatch.context() as patch:
        patch.setattr(Boundaries, "has_padding", True)
        copied = attended_and_gradients()
    monkeypatch.setattr(attention, "placed", None)  # a copy would call it
    assert all(map(torch.equal, attended_and_gradients(), copied))
