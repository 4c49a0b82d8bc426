"""`mage plan`, and what `mage train` does with a plan before a launch on a GPU."""

from pathlib import Path

import pytest
import torch

from mage_async.config import config_file
from mage_async.errors import ConfigError, DeterministicFailure
from mage_async.plan.plan import GB, check_gpu, device_for
from mage_services.actor.preflight import run_preflight
from mage_services.cli.main import main
from mage_services.processes import child_process

QUICK = ["--set", "policy.layers=1", "--set", "admission.groups_per_step=1"]
SMALL_GPU = (
    "policy.source=Qwen/Qwen3-0.6B",
    "engine.kind=sglang",
    "learner.device=cuda:0",
    "learner.minibatches=128",
    "engine.max_tokens=1024",
)


def test_a_plan_says_parts_operations_and_that_it_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "WAIT_NOTICE_S", 0.01)
    assert main(["plan", *QUICK, "--memory-gb", "10", "--tflops", "0.1"]) == 0
    said, waited = capsys.readouterr()
    assert waited.startswith("waiting for the plan, of an update without weights: 0 s\n")
    for word in (
        "learner on this machine, GB:",
        "engine of actor-3 on this machine",
        "activations",
        "optimizer",
        "TFLOP/s, given",
        "; 3 versions at once need ",
    ):
        assert word in said
    assert said.splitlines()[-1].startswith("fits, with 8")


def test_a_plan_that_does_not_fit_ends_with_the_part_and_the_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    many = ["--set", "engine.max_contexts=20000"]
    assert main(["plan", *QUICK, *many, "--memory-gb", "1"]) != 0
    said = capsys.readouterr().err
    assert said.startswith("mage plan: this machine would need ")
    assert "lower engine.max_contexts" in said
    assert main(["plan", "--actors", "100", "--memory-gb", "8"]) != 0
    assert "take fewer --actors" in capsys.readouterr().err


@pytest.mark.parametrize(
    "impossible", [("--actors", "0"), ("--memory-gb", "-5"), ("--tflops", "-1")]
)
def test_a_plan_of_impossible_hardware_is_refused(
    impossible: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *QUICK, *impossible])
    assert f"argument {impossible[0]}: must be a " in capsys.readouterr().err


def test_without_a_gpu_a_run_on_one_is_refused(tmp_path: Path) -> None:
    config = config_file.load(config_file.find(None), list(SMALL_GPU))
    with pytest.raises(ConfigError, match=r'learner.device = "cuda:0", but PyTorch finds no GPU'):
        check_gpu(config, 1, machine_bytes=GB)
    with pytest.raises(ConfigError, match="the GPU is not known: set hardware"):
        device_for(config, machine_bytes=GB)
    assert device_for(config, machine_bytes=GB, memory_gb=10).memory_bytes == 10**10


@pytest.mark.parametrize("keys", [["learner.device=cuda:2"], ["learner.ranks=3"]])
def test_a_gpu_that_the_machine_has_not_is_refused(
    keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = config_file.load(config_file.find(None), [*SMALL_GPU, *keys])
    with pytest.raises(ConfigError, match=r"needs GPU 2, but PyTorch finds 2 GPUs here: GPUs are"):
        check_gpu(config, 1, machine_bytes=GB)


@pytest.mark.slow
def test_a_run_that_would_not_fit_is_refused_before_anything_is_downloaded() -> None:
    config = config_file.load(
        config_file.find(None), [*SMALL_GPU, "hardware.gpu=t4", "policy.dtype=float32"]
    )
    with pytest.raises(DeterministicFailure, match=r"GPU 0 would need .* GB and has 16: "):
        run_preflight(config, 1, say=print)
