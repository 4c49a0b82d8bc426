"""AdamW with moments in 8 bits, by torchao: what is refused, learned, gone on with, and planned."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from mage_async.config import config_file, schema
from mage_async.config.schema import Config, Learner, check_installed
from mage_async.errors import ConfigError, RunError
from mage_async.learning.optimizer import optimizer_of, set_decays, set_rate
from mage_async.learning.trainer import Trainer
from mage_async.plan.update_memory import PlannedEightBit
from mage_async.policy.checkpoint import restore_checkpoint, save_checkpoint
from mage_async.policy.load import load_policy
from mage_async.policy.weight_digest import overall, tensor_digests
from tests.helpers.random_models import random_model, sequence

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's, of torch's own older parts
FULL = config_file.load(config_file.find(None), ["learner.minibatches=2"]).learner
EIGHT = msgspec.structs.replace(FULL, optimizer_state="8bit")
SHAPES = (64, 128), (64,), (65, 100)
"""In 8 bits, too small for that, and of broken blocks."""


@pytest.fixture
def _torchao() -> None:
    pytest.importorskip("torchao.optim", reason="pip install 'mage_async[8bit]'")


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def updated(rules: Learner, *, steps: int) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Weights after updates by drawn gradients, at a rate that was set."""
    weights = [nn.Parameter(values) for values in drawn(0)]
    optimizer = optimizer_of(weights, rules, torch.device("cpu"))
    for step in range(steps):
        set_rate(optimizer, 0.01)
        for weight, gradient in zip(weights, drawn(1 + step), strict=True):
            weight.grad = gradient
        optimizer.step()
    return [weight.detach() for weight in weights], optimizer


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)


def test_decays_are_those_of_the_configuration_for_vectors_too() -> None:
    weights = [nn.Parameter(torch.ones(shape)) for shape in ((4, 4), (4,))]
    rules = Learner(learning_rate=0.1, weight_decay=0.5, beta2=0.9)
    optimizer = optimizer_of(weights, rules, torch.device("cpu"))
    set_decays(optimizer, rules.beta2, rules.weight_decay)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert all((weight == 1.0 - 0.1 * 0.5).all() for weight in weights)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.9)]


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed(FULL)
    monkeypatch.setattr(schema, "find_spec", lambda name: None)
    check_installed(FULL)
    with pytest.raises(ConfigError, match=r"torchao, which is not .* 'mage_async\[8bit\]'"):
        check_installed(EIGHT)


@pytest.mark.usefixtures("_torchao")
def test_weights_move_as_they_do_by_moments_in_float32() -> None:
    begun = drawn(0)
    (exact, _), (rounded, _) = updated(FULL, steps=4), updated(EIGHT, steps=4)
    assert not torch.equal(exact[0], rounded[0])
    for start, one, other in zip(begun, exact, rounded, strict=True):
        assert (one - other).norm() < 0.1 * (one - start).norm()


@pytest.mark.usefixtures("_torchao")
def test_a_plan_counts_what_the_library_holds() -> None:
    weights, optimizer = updated(EIGHT, steps=1)
    planned = PlannedEightBit([nn.Parameter(weight) for weight in weights])
    planned.step()
    for weight, own in zip(
        optimizer.param_groups[0]["params"], planned.state.values(), strict=True
    ):
        for name in ("exp_avg", "exp_avg_sq"):
            held = optimizer.state[weight][name]
            parts = [held.codes, held.scale, held.qmap] if hasattr(held, "codes") else [held]
            assert num_bytes(own[name]) == num_bytes(parts)


def trainer(rules: Learner, source: Path, checkpoint: Path | None = None) -> Trainer:
    model = load_policy(checkpoint or source, "float32", "cpu")
    taught = Trainer(model, Config(learner=rules))
    if checkpoint:
        restore_checkpoint(taught, checkpoint)
    return taught


def steps(taught: Trainer, count: int) -> str:
    for _ in range(count):
        taught.step([sequence(length) for length in (40, 31, 22, 17)])
    return overall(tensor_digests(taught.model))


@pytest.mark.usefixtures("_torchao")
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    source = tmp_path / "policy"
    random_model("Qwen3", head_dim=64).save_pretrained(source)
    undisturbed, stopped = trainer(EIGHT, source), trainer(EIGHT, source)
    steps(undisturbed, 2)
    steps(stopped, 2)
    checkpoint = save_checkpoint(stopped, source, tmp_path / "checkpoints", {})
    moments = [kept["exp_avg"] for kept in stopped.optimizer.state.values()]
    assert any(hasattr(moment, "codes") for moment in moments)
    assert steps(trainer(EIGHT, source, checkpoint), 2) == steps(undisturbed, 2)
    with pytest.raises(RunError, match="'8bit', and the run has 'full': leave the key as it was"):
        trainer(FULL, source, checkpoint)
