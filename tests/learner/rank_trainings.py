"""Trainings of one process and of several ranks, and what they leave on disk."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed

from mage_async.algorithm import prepare
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.policy.sharded_files import WeightShards, named_state
from mage_async.results.run_directory import RunDirectory, checkpoint_at
from mage_services.learner.rank_processes import RankProcesses
from mage_services.learner.trainer_thread import Training
from mage_services.weights.weight_store import weights_file
from tests.helpers.random_models import sequence

if TYPE_CHECKING:
    from concurrent.futures import Future

LENGTHS = (40, 31, 22, 40, 13, 37, 29)
SMALL = ("warm_start=none", "learner.minibatches=2", "learner.threads=1", "learner.entropy=0.01")


def config_of(*changes: str) -> Config:
    return config_file.load(config_file.find(None), [*SMALL, *changes])


def new_run(folder: Path) -> RunDirectory:
    """A run with a policy of random weights."""
    run = RunDirectory(folder)
    prepare(config_of(), folder).rename(run.policy)
    return run


def on_one(run: RunDirectory, *changes: str, checkpoint: Path | None = None) -> Training:
    return Training.of(run, config_of(*changes), checkpoint)


def on_ranks(
    run: RunDirectory, ranks: RankProcesses, *changes: str, checkpoint: Path | None = None
) -> Training:
    config = config_of(f"learner.ranks={ranks.count}", *changes)
    return Training.of(run, config, checkpoint, ranks.begin(config, checkpoint))


def steps(training: Training, count: int = 3) -> list[dict[str, float]]:
    batch = [sequence(each) for each in LENGTHS]
    if training.trainer.config.learner.kl:  # as under `learner.average = "trial"`
        batch = [replace(each, weights=each.advantages.abs()) for each in batch]
    return [training.trainer.step(batch) for _ in range(count)]


def begun_checkpoint(training: Training) -> "Future[Path]":
    """A checkpoint of it that is being written, in place of another training's of the same step."""
    # Another rank may still be loading that other checkpoint: it has taken part in a digest only
    # after it has loaded it.
    training.digest()
    other = checkpoint_at(training.run.checkpoints, training.trainer.version)
    shutil.rmtree(other, ignore_errors=True)
    return training.checkpoint({})


def saved(training: Training) -> Path:
    """A checkpoint of it."""
    return begun_checkpoint(training).result()


def file_of(training: Training) -> Path:
    """Its weights as they are published."""
    folder = training.run.weights
    folder.mkdir(exist_ok=True)
    file = weights_file(folder, training.trainer.version)
    training.snapshot()[0].write(file)
    return file


def published(training: Training) -> dict[str, torch.Tensor]:
    return load_file(file_of(training))


def assert_equal(one: Training, two: Training) -> None:
    """Weights, moments and masters of two processes, to the bit."""
    assert one.digest() == two.digest()
    first, second = named_state(one.trainer), named_state(two.trainer)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert any(name.endswith("exp_avg") and value.any() for name, value in first.items())


def gathered_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what this rank is given of all ranks' tensors, as they are gathered."""
    sizes = list[int]()

    def measure(gather: Callable[..., object]) -> Callable[..., object]:
        def measured(*args: object, **kwargs: object) -> object:
            tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
            sizes.append(max(one.nbytes for one in tensors))
            return gather(*args, **kwargs)

        return measured

    def refused(*args: object, **kwargs: object) -> None:
        raise AssertionError("a publication gathers nothing")

    for name in ("all_gather_into_tensor", "all_gather_single"):  # by the version of torch
        if hasattr(distributed, name):
            monkeypatch.setattr(distributed, name, measure(getattr(distributed, name)))
    for name in ("all_gather", "gather", "recv", "broadcast"):
        monkeypatch.setattr(distributed, name, refused)
    return sizes


def copied_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what this rank copies of the weights, to be published."""
    sizes, copy = list[int](), WeightShards.of

    def measured(*args: object) -> WeightShards:
        made = copy(*args)
        sizes.append(made.data.nbytes)
        return made

    monkeypatch.setattr(WeightShards, "of", staticmethod(measured))
    return sizes
