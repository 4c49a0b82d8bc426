"""Checkpoints of whole models and of adapters: what they hold, and how training goes on."""

import errno
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import DiskFull, RunError
from mage_async.learning.trainer import Trainer
from mage_async.policy import checkpoint as checkpoint_files
from mage_async.policy.checkpoint import (
    restore_checkpoint,
    save_checkpoint,
    whole_policy,
)
from mage_async.policy.full_disk import writing
from mage_async.policy.load import load_trained
from mage_async.policy.weight_digest import overall, tensor_digests
from mage_async.results.run_directory import RunDirectory, checkpoint_at, checkpoints, step_of
from mage_services.actor.play_session import model_directory
from mage_services.learner.trainer_thread import Training
from tests.helpers.random_models import random_model, sequence

ADAPTERS = ("policy.lora.rank=4", "learner.kl=0.1")


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    random_model("Qwen3").save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def begin(config: Config, policy: Path, checkpoint: Path | None = None) -> Trainer:
    model = load_trained(config, policy, checkpoint, device="cpu")
    trainer = Trainer(model, config)
    if not config.policy.lora:
        trainer.reference = model
    if checkpoint:
        assert restore_checkpoint(trainer, checkpoint)["next_grant"] == 7
    return trainer


def steps(trainer: Trainer, count: int) -> str:
    for _ in range(count):
        trainer.step([sequence(length) for length in (40, 31, 22, 17)])
    return overall(tensor_digests(trainer.model))


@pytest.mark.parametrize("changes", [(), ADAPTERS])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    changes: tuple[str, ...], policy: Path, tmp_path: Path
) -> None:
    config = config_file.load(config_file.find(None), changes)
    undisturbed = begin(config, policy)
    first, last = steps(undisturbed, 2), steps(undisturbed, 2)
    stopped = begin(config, policy)
    assert steps(stopped, 2) == first != last
    checkpoint = save_checkpoint(stopped, policy, tmp_path, {"next_grant": 7})
    assert steps(begin(config, policy, checkpoint), 2) == last


def test_a_checkpoint_of_adapters_holds_no_weight_of_the_model(
    policy: Path, tmp_path: Path
) -> None:
    config = config_file.load(config_file.find(None), ADAPTERS)
    trainer = begin(config, policy)
    steps(trainer, 1)
    checkpoint = save_checkpoint(trainer, policy, tmp_path, {})
    assert {file.name for file in checkpoint.iterdir()} >= {"adapter_config.json", "optimizer.pt"}
    assert not (checkpoint / "model.safetensors").exists()
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["optimizer"]["state"]
    assert len(state) == 2 * 7 * 3


def test_a_merged_model_lies_beside_the_last_adapters_and_beside_others_on_demand(
    policy: Path, tmp_path: Path
) -> None:
    config = config_file.load(config_file.find(None), [*ADAPTERS, "learner.steps=3"])
    trainer = begin(config, policy)
    steps(trainer, 2)
    found = []
    for is_last in (False, True):
        trainer.version += is_last
        folder = tmp_path / f"{is_last}"
        checkpoint = save_checkpoint(trainer, policy, folder, {})
        assert (checkpoint / "merged").is_dir() == is_last
        merged = AutoModelForCausalLM.from_pretrained(whole_policy(config, policy, checkpoint))
        found.append(overall(tensor_digests(merged)))
    assert found[0] == found[1]
    assert whole_policy(config, policy, policy) == policy


def test_a_merged_model_is_synced_and_written_once_however_many_ask_for_it(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_file.load(config_file.find(None), ADAPTERS)
    checkpoint = save_checkpoint(begin(config, policy), policy, tmp_path, {})
    synced: list[Path] = []
    monkeypatch.setattr(checkpoint_files, "sync", synced.append)
    together = Barrier(2)

    def merged(_: int) -> Path:
        together.wait(60)
        return model_directory(RunDirectory(tmp_path), config, checkpoint)

    with ThreadPoolExecutor(2) as threads:
        assert {*threads.map(merged, range(2))} == {checkpoint / "merged"}
    files = {each.name for each in (checkpoint / "merged").iterdir()}
    assert "model.safetensors" in files
    assert sorted(each.name for each in synced) == sorted([*files, ".merged.part", checkpoint.name])


@pytest.mark.parametrize("content", [b"", b"no state of an optimizer"])
def test_a_file_that_is_no_optimizer_state_is_an_error_of_one_line(
    content: bytes, policy: Path, tmp_path: Path
) -> None:
    config = config_file.load(config_file.find(None))
    trainer = begin(config, policy)
    checkpoint = save_checkpoint(trainer, policy, tmp_path, {})
    (checkpoint / "optimizer.pt").write_bytes(content)
    with pytest.raises(RunError, match=r"not a whole checkpoint: .+; remove the folder"):
        restore_checkpoint(trainer, checkpoint)


def test_adapters_that_cannot_be_read_are_no_full_disk(policy: Path, tmp_path: Path) -> None:
    config = config_file.load(config_file.find(None), ADAPTERS)
    checkpoint = save_checkpoint(begin(config, policy), policy, tmp_path, {})
    (checkpoint / "adapter_model.safetensors").write_bytes(b"cut off")
    with pytest.raises(
        RunError, match=r"its adapters cannot be read: .+; take an older checkpoint"
    ):
        model_directory(RunDirectory(tmp_path), config, checkpoint)


def test_the_newest_checkpoint_has_the_highest_step_however_many_digits_it_has(
    tmp_path: Path,
) -> None:
    for step in (999_999, 1_000_000, 7):
        checkpoint_at(tmp_path, step).mkdir()
    assert [step_of(each) for each in checkpoints(tmp_path)] == [7, 999_999, 1_000_000]


def test_the_best_checkpoint_is_kept_and_one_at_most(policy: Path, tmp_path: Path) -> None:
    config = config_file.load(config_file.find(None), ["learner.keep_checkpoints=1"])
    run = RunDirectory(tmp_path)
    training, kept = Training(begin(config, policy), run, config, {}), []
    returns = {step: 1.0 if 10 < step <= 30 else 0.1 for step in range(1, 61)}
    for version in (10, 20, 40, 60):
        lines = [{"step": step, "return_by_episode": [returns[step]]} for step in returns]
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines[:version]))
        training.trainer.version = version
        training.checkpoint({}).result()
        kept.append([step_of(each) for each in checkpoints(run.checkpoints)])
    assert kept == [[10], [10, 20], [20, 40], [20, 60]]


class Killed(BaseException):
    """The end of a process by SIGKILL."""


def test_a_kill_at_any_moment_leaves_whole_checkpoints_alone_and_the_newest_of_them(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_file.load(config_file.find(None), ["learner.keep_checkpoints=1"])
    num_left = 0  # calls that change the disk, until the kill

    def killed_at(call: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: Any, **options: Any) -> None:
            nonlocal num_left
            num_left -= 1
            if num_left < 0:
                raise Killed
            call(*args, **options)

        return counted

    for name in ("replace", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, killed_at(getattr(os, name)))
    num_kills = 0
    while True:
        run = RunDirectory(tmp_path / f"{num_kills}")
        training, num_left = Training(begin(config, policy), run, config, {}), 1000
        for version in (10, 20):  # without metrics the oldest counts as the best
            training.trainer.version = version
            training.checkpoint({}).result()
        num_left = num_kills
        try:
            training.checkpoint({}).result()  # as at the end of a run, and of one resumed there
            training.trainer.version = 30
            training.checkpoint({}).result()  # deletes the one of step 20
        except Killed:
            num_kills += 1
            found = checkpoints(run.checkpoints)
            assert step_of(found[-1]) >= 20
            for each in found:
                restore_checkpoint(training.trainer, each)
                load_trained(config, policy, each, device="cpu")
            num_left = 1000
            training.trainer.version = 40
            training.checkpoint({}).result()
            assert checkpoint_at(run.checkpoints, 40).exists()
            assert not [name for name in os.listdir(run.checkpoints) if name.startswith(".")]
            continue
        break
    assert num_kills > 5


def test_a_full_disk_is_told_from_another_error_of_the_disk() -> None:
    full = Path("/dev/full")
    with pytest.raises(DiskFull, match="cannot write weights: I/O error"), writing("weights"):
        raise SafetensorError("I/O error: No space left on device (os error 28)")
    with (
        pytest.raises(DiskFull, match=r"cannot write moments: .*No space left on device"),
        writing("moments"),
        full.open("wb") as out,
    ):
        torch.save(torch.zeros(1_000_000), out)
    with pytest.raises(RunError, match="Not a directory") as caught, writing("a file"):
        (full / "file").write_text("")
    assert not isinstance(caught.value, DiskFull)


def test_a_checkpoint_that_finds_no_space_leaves_it_to_others(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = config_file.load(config_file.find(None))
    training = Training(begin(config, policy), RunDirectory(tmp_path), config, {})
    monkeypatch.setattr(torch, "save", refuse)
    with pytest.raises(DiskFull):
        training.checkpoint({})
    assert os.listdir(training.run.checkpoints) == []
    monkeypatch.undo()
    training.checkpoint({}).result()
    assert len(checkpoints(training.run.checkpoints)) == 1


def test_an_error_without_text_is_named_by_its_class() -> None:
    with (
        pytest.raises(RunError, match="cannot write a file: OSError; make room"),
        writing("a file"),
    ):
        raise OSError
