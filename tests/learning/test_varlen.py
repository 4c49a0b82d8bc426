"""Attention without padding computes what folded attention computes.

torch's kernel runs on a GPU only. A slow one of the same arguments stands in for it, in float64 and
with the kernel's causal mask; torch's own is asked for shapes, which need no GPU.
"""

from dataclasses import replace
from fnmatch import fnmatch
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig

from mage_async.learning import attention
from mage_async.learning.attention import Boundaries, Extents, packed_attention

LENGTHS = (3, 7, 1, 4)
HEADS, KEY_HEADS, SIZE, SCALE = 4, 2, 8, 0.3


def exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Sequence by sequence; the last query sees the last key, each one before it a key less."""
    before, behind = window_size
    assert behind == 0
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert most_queries == query_ends.diff().max()
    assert most_keys == key_ends.diff().max()
    assert (query_ends[-1], key_ends[-1]) == (len(query), len(key))
    out = []
    bounds = [list(pairwise(each)) for each in (query_ends, key_ends)]
    for (first, last), (begin, end) in zip(*bounds, strict=True):
        count, seen = int(last - first), int(end - begin)
        own, shared = query[first:last], query.shape[1] // key.shape[1]
        keys, values = (x[begin:end].repeat_interleave(shared, 1) for x in (key, value))
        logits = torch.einsum("qnd,knd->nqk", own, keys) * scale
        visible = torch.ones(count, seen, dtype=torch.bool).tril(seen - count)
        if before >= 0:  # keys before a query that it sees
            visible = visible.triu(seen - count - before)
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        out.append(torch.einsum("nqk,knd->qnd", weights, values))
    return torch.cat(out)


def attended(opening: int, window: int | None, *, is_folded: bool) -> list[Tensor]:
    """Attention over a row of sequences, and the gradients of queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    count, lengths = opening + sum(LENGTHS), torch.tensor(LENGTHS)

    def drawn(heads: int) -> Tensor:
        return torch.randn(1, heads, count, SIZE, generator=generator, dtype=torch.float64)

    given = [drawn(heads).requires_grad_() for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    boundaries = Boundaries.of(lengths, opening)
    if not is_folded:
        extents = Extents.of(lengths, opening)
        boundaries = replace(boundaries, visible=None, extents=extents)
    out, _ = packed_attention(
        nn.Module(), *given, None, scaling=SCALE, boundaries=boundaries, sliding_window=window
    )
    (out * drawn(1)[0, 0, :, None]).sum().backward()
    return [out.detach(), *(tensor.grad for tensor in given)]


@pytest.mark.parametrize("window", [None, 1, 3, 16])
@pytest.mark.parametrize("opening", [0, 1, 2, 9])
def test_outputs_and_gradients_are_those_of_folded_attention(
    opening: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded = attended(opening, window, is_folded=True)
    monkeypatch.setattr(attention, "kernel", lambda: exact)
    monkeypatch.setattr(attention, "kernel_takes", lambda query, dropout: True)
    monkeypatch.setattr(attention, "_fold", None)  # nothing is folded
    for one, other in zip(attended(opening, window, is_folded=False), folded, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_extents_of_sequences_and_of_an_opening() -> None:
    lengths = torch.tensor([3, 1])
    plain = Extents.of(lengths)
    assert plain.queries.tolist() == plain.keys.tolist() == [0, 3, 4]
    shared = Extents.of(lengths, 2)
    assert shared.queries.tolist() == [0, 2, 5, 6]
    assert shared.keys.tolist() == [0, 2, 7, 10]
    assert (shared.most_queries, shared.most_keys) == (3, 5)
    assert shared.copies.tolist() == [[0, 1], [2, 3], [7, 8]]
    assert shared.own.tolist() == [4, 5, 6, 9]


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("opening", [0, 2])
def test_torchs_kernel_takes_our_arguments(opening: int, window: int) -> None:
    assert attention.kernel() is not None
    extents = Extents.of(torch.tensor(LENGTHS), opening)
    count = opening + sum(LENGTHS)
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [
            torch.empty(count, heads, SIZE, dtype=torch.bfloat16, requires_grad=True)
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        ]
        out = attention.attend_by_kernel(*given, extents, SCALE, window)
        out.sum().backward()
    assert out.shape == given[0].shape
    assert [each.grad.shape for each in given] == [each.shape for each in given]


@pytest.mark.parametrize(
    ("changes", "capability", "is_taken"),
    [
        ({}, (8, 0), True),
        ({"dtype": torch.float16}, (9, 0), True),
        ({}, (7, 5), False),
        ({"dtype": torch.float32}, (9, 0), False),
        ({"size": 12}, (9, 0), False),
        ({"size": 512}, (9, 0), False),
        ({"dropout": 0.1}, (9, 0), False),
    ],
)
def test_the_kernel_is_taken_where_it_can_compute_that(
    changes: dict[str, Any],
    capability: tuple[int, int],
    is_taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    attention.why_padded.cache_clear()  # the capability is another one in each case
    found = {"dtype": torch.bfloat16, "size": 64, "dropout": 0.0} | changes
    on_cpu = torch.empty(1, 4, 3, found["size"], dtype=found["dtype"])
    assert not attention.kernel_takes(on_cpu, 0.0)
    with FakeTensorMode():
        query = torch.empty(1, 4, 3, found["size"], dtype=found["dtype"], device="cuda")
    assert attention.kernel_takes(query, found["dropout"]) == is_taken
    attention.why_padded.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "kernel", "text"),
    [
        (torch.bfloat16, len, "attention by varlen_attn"),
        (torch.bfloat16, None, "because torch 2.* has no `varlen_attn` that shares key heads"),
        (torch.float32, len, "because the kernel takes 16 bits, not torch.float32"),
    ],
)
def test_a_learner_on_a_gpu_says_how_it_computes_attention(
    dtype: torch.dtype, kernel: object, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model:
        """What is read of a model on a GPU."""

        config = LlamaConfig(hidden_size=64, num_attention_heads=4)

        def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
            self.device, self.dtype = device, dtype

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "kernel", lambda: kernel)
    attention.why_padded.cache_clear()
    assert fnmatch(attention.attention_report(Model(torch.device("cuda"), dtype)), f"*{text}")
    attention.why_padded.cache_clear()
    assert attention.attention_report(Model(torch.device("cpu"), dtype)) == ""
