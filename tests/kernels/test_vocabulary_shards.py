"""A head split over ranks: shards against the whole, against fp64, and over real processes."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, multiprocessing

from mage_kernels import (
    combined_partials,
    logprob_and_entropy,
    reference,
    shard_gradients,
    shard_partials,
)
from tests.helpers.random_heads import (
    Head,
    Results,
    random_gradients,
    random_head,
    relative_error,
    truth,
)

T, V, D = 70, 700, 64
SPLITS = [(333,), (64, 65, 640), (699,)]
"""Where shards begin, 0 apart: ragged, one row thin, and with one row at the end."""


def by_shards(arguments: Head, gradients: tuple[Tensor, Tensor], cuts, *, module=None) -> Results:
    """Forward and backward of all shards, one after the other."""
    partials_of = module.shard_partials if module else shard_partials
    gradients_of = module.shard_gradients if module else shard_gradients
    hidden, head, tokens, scale = arguments
    starts = [0, *cuts]
    shards = [shard.contiguous() for shard in head.tensor_split(cuts)]
    pairs = list(zip(shards, starts, strict=True))
    whole = combined_partials(
        torch.stack([partials_of(hidden, shard, tokens, start, scale) for shard, start in pairs])
    )
    slopes = [slope.to(whole.dtype) for slope in gradients]
    parts = [
        gradients_of(hidden, shard, tokens, start, whole, *slopes, scale) for shard, start in pairs
    ]
    d_hidden, d_head = sum(part[0] for part in parts), torch.cat([part[1] for part in parts])
    return Results(*logprob_and_entropy(whole), d_hidden, d_head)


def last_columns(arguments: Head) -> Head:
    """Tokens at both ends of the vocabulary and of every shard among them."""
    tokens = arguments.tokens.clone()
    tokens[:8] = torch.tensor([0, 63, 64, 65, 332, 333, 698, 699])
    return arguments._replace(tokens=tokens)


@pytest.mark.parametrize("cuts", SPLITS)
def test_shards_give_what_the_whole_gives(device: str, cuts: tuple[int, ...]) -> None:
    scale = torch.linspace(0.6, 1.6, T)
    arguments = last_columns(random_head(T, V, D, device=device, inverse_temperature=scale))
    gradients = random_gradients(T, device)
    ours, true = by_shards(arguments, gradients, cuts), truth(arguments, gradients)
    assert (ours.logprob - true.logprob).abs().max() <= 2e-5
    assert (ours.entropy - true.entropy).abs().max() <= 2e-5
    assert relative_error(ours.d_hidden, true.d_hidden) <= 6e-3
    assert relative_error(ours.d_head, true.d_head) <= 6e-3


@pytest.mark.parametrize("cuts", SPLITS)
def test_the_specification_of_shards_is_that_of_the_whole(cuts: tuple[int, ...]) -> None:
    arguments = last_columns(random_head(T, V, D, device="cpu")).double()
    gradients = random_gradients(T, "cpu")
    true = truth(arguments, gradients)
    for module in (reference, None):  # and in fp64 the bounded form is as exact
        ours = by_shards(arguments, gradients, cuts, module=module)
        for one, other in zip(ours, true, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_partials_may_be_combined_in_any_grouping() -> None:
    hidden, head, tokens, _ = random_head(T, V, D, device="cpu").double()
    parts = torch.stack(
        [shard_partials(hidden, head[at : at + 175], tokens, at) for at in range(0, V, 175)]
    )
    pairs = torch.stack([combined_partials(parts[2:]), combined_partials(parts[:2])])
    torch.testing.assert_close(combined_partials(pairs), combined_partials(parts))


def test_a_nearly_certain_token_keeps_its_gradient(device: str) -> None:
    arguments = random_head(T, V, D, device=device, largest_logit=80.0)
    best = (arguments.hidden.float() @ arguments.head.float().T).argmax(1)
    arguments = arguments._replace(tokens=best)
    slopes = random_gradients(T, device)[0], torch.zeros(T, device=device)
    ours, true = by_shards(arguments, slopes, (300,)), truth(arguments, slopes)
    assert (ours.logprob - true.logprob).abs().max() <= 2e-4
    assert relative_error(ours.d_hidden, true.d_hidden) <= 6e-3


def test_rows_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from mage_kernels import shards

    arguments, gradients = random_head(T, V, D, device="cpu").double(), random_gradients(T, "cpu")
    at_once = by_shards(arguments, gradients, (333,))
    monkeypatch.setattr(shards, "CHUNK_BYTES", 1)
    for one, other in zip(by_shards(arguments, gradients, (333,)), at_once, strict=True):
        torch.testing.assert_close(one, other)


def test_partials_of_tiles_merge_to_the_whole(triton_kernels: str) -> None:
    from mage_kernels.fused.logit_partials import logit_partials
    from mage_kernels.fused.merged_partials import merged_partials

    hidden, head, tokens, _ = random_head(20, 700, 64, device=triton_kernels)
    ones = torch.ones(20, device=triton_kernels)
    shards = [logit_partials(hidden, part.contiguous(), ones) for part in (head[:333], head[333:])]
    whole = merged_partials(logit_partials(hidden, head, ones), hidden, head, tokens, ones)
    merged = merged_partials(torch.cat(shards, 1), hidden, head, tokens, ones)
    for ours, theirs in zip(merged, whole, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5


def rank_main(rank: int, folder: Path) -> None:
    """One rank of two: its half of the head, one all_gather, one all_reduce."""
    torch.set_num_threads(1)
    meeting = {"init_method": f"file://{folder}/store", "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", rank=rank, world_size=2, **meeting)
    hidden, head, tokens, scale = random_head(T, V, D, device="cpu").double()
    first_row = (0, 333)[rank]
    shard = head.tensor_split((333,))[rank]
    mine = shard_partials(hidden, shard, tokens, first_row, scale)
    everyones = [torch.empty_like(mine) for _ in range(2)]
    distributed.all_gather(everyones, mine)
    whole = combined_partials(torch.stack(everyones))
    slopes = (slope.double() for slope in random_gradients(T, "cpu"))
    d_hidden, d_shard = shard_gradients(hidden, shard, tokens, first_row, whole, *slopes, scale)
    distributed.all_reduce(d_hidden)
    found = (*logprob_and_entropy(whole), d_hidden, d_shard)
    torch.save(found, folder / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    multiprocessing.spawn(rank_main, (tmp_path,), nprocs=2)
    true = truth(random_head(T, V, D, device="cpu"), random_gradients(T, "cpu"))
    for rank, d_head in enumerate(true.d_head.tensor_split((333,))):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for ours, theirs in zip(found, (*true[:3], d_head), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
