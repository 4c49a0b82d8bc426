"""What ranks save, another number of ranks goes on with."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mage_async.learning.rank_orders import Save
from mage_async.policy import sharded_files
from mage_async.policy.sharded_files import WeightShards, copied_state
from mage_async.policy.snapshot import places_of
from mage_async.policy.weight_digest import ROW, word_sum
from mage_services.learner import rank_writers
from mage_services.learner.rank_processes import RankProcesses
from mage_services.learner.rank_writers import ShardedFiles
from tests.learner.rank_trainings import (
    assert_equal,
    config_of,
    new_run,
    on_one,
    on_ranks,
    saved,
    steps,
)


@pytest.mark.slow  # three learners of several processes
@pytest.mark.timeout(600)
def test_two_ranks_four_two_and_one_process_take_over_from_each_other(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    began = on_one(run)
    steps(began)
    checkpoint = saved(began)
    for count in (2, 4, 2):
        with RankProcesses(run, config_of(f"learner.ranks={count}")) as ranks:
            checkpoint = saved(on_ranks(run, ranks, checkpoint=checkpoint))
            assert not (checkpoint / "optimizer.pt").exists()
            assert len(list((checkpoint / "optimizer").iterdir())) == count
            assert_equal(began, on_one(run, checkpoint=checkpoint))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_word_sums_of_parts_add_up(dtype: torch.dtype) -> None:
    whole = torch.randn(3 * ROW + 7).to(dtype)
    cuts = [0, 1, ROW - 1, ROW, 2 * ROW + 5, len(whole), len(whole)]
    parts = [word_sum(whole[a:b], a) for a, b in pairwise(cuts)]
    assert int(np.sum([part.numpy() for part in parts])) == int(word_sum(whole))


def test_the_state_of_a_gpu_is_in_host_memory_before_it_is_written(monkeypatch) -> None:
    with FakeTensorMode():
        state = {"0.exp_avg": torch.zeros(3, device="cuda:1"), "0.step": torch.zeros(1)}
        monkeypatch.setattr(sharded_files, "named_state", lambda trainer: state)
        copies = copied_state(object())  # type: ignore[arg-type]
    assert {name: copy.device.type for name, copy in copies.items()} == dict.fromkeys(state, "cpu")


@pytest.mark.parametrize(("device", "expected"), [(None, "cuda"), ("cpu", "cpu")])
def test_a_checkpoint_copies_the_weights_of_a_gpu_to_host_memory(
    monkeypatch, device: str | None, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(record_event=int))
    with FakeTensorMode():
        weights = {"a": torch.zeros(3, device="cuda:1"), "b": torch.zeros(2, 2, device="cuda:1")}
        monkeypatch.setattr(sharded_files, "published_tensors", lambda model: weights)
        monkeypatch.setattr(sharded_files, "own_part", lambda tensor: (0, tensor))
        shards = WeightShards.of(object(), tuple(places_of(weights)), device)  # type: ignore[arg-type]
    assert (shards.data.device.type, len(shards.data)) == (expected, 28)
    assert (shards.ready is None) == (expected == "cpu")


def test_the_copy_of_the_state_does_not_change_with_it(monkeypatch) -> None:
    state = {"master.0": torch.zeros(3)}
    monkeypatch.setattr(sharded_files, "named_state", lambda trainer: state)
    copies = copied_state(object())  # type: ignore[arg-type]
    state["master.0"].fill_(1.0)
    assert not copies["master.0"].any()


@pytest.mark.parametrize(("device", "chosen"), [("cuda:3", [torch.device("cuda:3")]), ("cpu", [])])
def test_a_rank_writes_its_checkpoint_with_its_own_gpu(
    monkeypatch, tmp_path: Path, device: str, chosen: list[torch.device]
) -> None:
    did: list[Any] = []
    trainer: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device(device)))
    shards = SimpleNamespace(write=lambda file, start: None)
    saving = SimpleNamespace(begin=lambda what, work, then: work(None))
    monkeypatch.setattr(torch.cuda, "set_device", did.append)
    monkeypatch.setattr(rank_writers, "file_places", lambda model: ())
    monkeypatch.setattr(rank_writers, "WeightShards", SimpleNamespace(of=lambda *_: shards))
    monkeypatch.setattr(rank_writers, "copied_state", lambda trainer: {})
    monkeypatch.setattr(rank_writers, "write_state", lambda *_: did.append("written"))
    joined: Any = SimpleNamespace(saving=saving)
    ShardedFiles(trainer, joined).save(Save(str(tmp_path), 0), lambda: None)
    assert did == [*chosen, "written"]
