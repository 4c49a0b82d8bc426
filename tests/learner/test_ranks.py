"""A step on two ranks, or four, is that of one process, to rounding."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from mage_async.algorithm import prepare
from mage_async.assembly import check
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.config.sections.corrections import AnyCorrection
from mage_async.config.shape import kinds
from mage_async.errors import ConfigError, RunError
from mage_async.learning.packing import pack
from mage_async.learning.ranks.shares import dealt, packed, unpacked
from mage_async.results.run_directory import RunDirectory
from mage_services.learner.ranks.gang import Gang
from mage_services.learner.training import Training
from tests.helpers.random_models import sequence

LENGTHS = (40, 31, 22, 40, 13, 37, 29)
SMALL = ("warm_start=none", "learner.minibatches=2", "learner.threads=1", "learner.entropy=0.01")


def config_of(*changes: str) -> Config:
    return config_file.load(config_file.find(None), [*SMALL, *changes])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run with a policy of random weights."""
    folder = tmp_path_factory.mktemp("ranks")
    run = RunDirectory(folder)
    prepare(config_of(), folder).rename(run.policy)
    return run


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def gang(run: RunDirectory, request: pytest.FixtureRequest) -> Iterator[Gang]:
    threads = torch.get_num_threads()
    with Gang(run, config_of(f"learner.ranks={request.param}")) as gang:
        yield gang
    torch.set_num_threads(threads)


def on_one(run: RunDirectory, *changes: str) -> Training:
    return Training.of(run, config_of(*changes), None)


def on_ranks(
    run: RunDirectory, gang: Gang, *changes: str, checkpoint: Path | None = None
) -> Training:
    config = config_of(f"learner.ranks={gang.count}", *changes)
    return Training.of(run, config, checkpoint, gang.begin(config, checkpoint))


def steps(training: Training, count: int = 3) -> list[dict[str, float]]:
    return [training.trainer.step([sequence(each) for each in LENGTHS]) for _ in range(count)]


def assert_alike(one: Training, many: Training, num_steps: int = 3) -> None:
    for expected, found in zip(steps(one, num_steps), steps(many, num_steps), strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    weights = dict(many.trainer.whole().named_parameters())
    for name, weight in one.trainer.model.named_parameters():
        assert torch.allclose(weight, weights[name], rtol=0, atol=1e-5), name


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("decoupled", "gspo", "m2po") else pytest.mark.slow)
        for name in kinds(AnyCorrection)
    ],
)
def test_every_correction_is_that_of_one_process(run: RunDirectory, gang: Gang, name: str) -> None:
    changes = [f"learner.correction={name}"]
    if name == "m2po":
        changes.append("learner.correction.max_second_moment=0.5")
    assert_alike(on_one(run, *changes), on_ranks(run, gang, *changes))


@pytest.mark.parametrize(
    "changes",
    [
        ["learner.kl=0.1"],
        ["learner.tokens_per_pass=60", "engine.max_tokens=60"],
        ["learner.shared_opening=true", "learner.activation_checkpointing=true"],
        ["learner.minibatches=7"],  # of one sequence each, so that a rank has none
        ["learner.minibatches=7", "learner.correction=m2po"],
    ],
)
def test_so_is_whatever_else_a_step_does(run: RunDirectory, gang: Gang, changes: list[str]) -> None:
    assert_alike(on_one(run, *changes), on_ranks(run, gang, *changes))


def test_two_runs_make_the_same_bits(run: RunDirectory, gang: Gang) -> None:
    digests = []
    for _ in range(2):
        training = on_ranks(run, gang)
        before = training.digest()
        steps(training)
        digests.append(training.digest())
        assert digests[-1] != before
    assert digests[0] == digests[1]


def kept(training: Training) -> dict[str, torch.Tensor]:
    """Weights and moments by name."""
    named = dict(training.trainer.whole().named_parameters())
    moments = training.trainer.state()["optimizer"]["state"]
    return {name: weight.detach() for name, weight in named.items()} | {
        f"{number}.{key}": value for number, own in moments.items() for key, value in own.items()
    }


def assert_equal(one: Training, two: Training) -> None:
    first, second = kept(one), kept(two)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_what_ranks_save_one_process_goes_on_with_and_back(run: RunDirectory, gang: Gang) -> None:
    saved = on_ranks(run, gang)
    steps(saved)
    checkpoint = saved.checkpoint({})
    alone = Training.of(run, config_of(), checkpoint)
    assert_equal(alone, saved)
    first, second = alone.snapshot(), saved.snapshot()
    assert first.places == second.places
    assert torch.equal(first.data, second.data)
    (undisturbed,) = steps(saved, 1)
    digest = saved.digest()
    assert steps(alone, 1)[0]["loss"] == pytest.approx(undisturbed["loss"], abs=1e-5)
    back = on_ranks(run, gang, checkpoint=alone.checkpoint({}))
    assert_equal(alone, back)
    resumed = on_ranks(run, gang, checkpoint=checkpoint)
    assert steps(resumed, 1) == [undisturbed]
    assert resumed.digest() == digest


def test_masters_in_float32_are_sharded_and_saved(run: RunDirectory, gang: Gang) -> None:
    changes = ("policy.dtype=bfloat16", "learner.float32_masters=true")
    saved = on_ranks(run, gang, *changes)
    steps(saved)
    checkpoint = saved.checkpoint({})
    alone = Training.of(run, config_of(*changes), checkpoint)
    assert_equal(alone, saved)
    found = zip(alone.trainer.state()["masters"], saved.trainer.state()["masters"], strict=True)
    assert all(torch.equal(one, two) for one, two in found)
    expected, got = steps(on_one(run, *changes), 1)[0], steps(on_ranks(run, gang, *changes), 1)[0]
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02)


def test_log_probs_of_the_last_weights_are_those_of_one_process(
    run: RunDirectory, gang: Gang
) -> None:
    given = [sequence(each) for each in LENGTHS]
    many = on_ranks(run, gang)
    found = many.trainer.parity(given)
    assert found == pytest.approx(on_one(run).trainer.parity(given), rel=1e-5)
    steps(many, 1)  # weights were taken apart again


@pytest.mark.parametrize(
    "changes",
    [
        ["policy.lora.rank=4"],
        ["learner.optimizer_state=8bit"],
        ["transport.weights=nccl", "learner.device=cuda:7", "engine.devices=[0]"],
    ],
)
def test_what_ranks_cannot_do_is_refused_before_the_run(changes: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"learner\.ranks = 2: .* works in one process alone"):
        check(config_of("learner.ranks=2", *changes))


@pytest.mark.parametrize("method", ["sac_glam", "stepagent_implicit"])
def test_so_are_methods_with_more_than_one_model(method: str) -> None:
    config = config_file.load(config_file.find(None), ["learner.ranks=2"], method)
    with pytest.raises(ConfigError, match=r"learner\.ranks = 2: .* works in one process alone"):
        check(config)


def test_a_process_without_followers_does_not_pretend(run: RunDirectory) -> None:
    with pytest.raises(RunError, match=r"learner\.ranks = 2 needs the processes of `mage train`"):
        Training.of(run, config_of("learner.ranks=2"), None)


def test_tokens_are_dealt_evenly_and_in_order() -> None:
    shares = dealt([sequence(each) for each in LENGTHS], 2)
    lengths = [[len(each.tokens) for each in share] for share in shares]
    assert lengths == [[40, 22, 13, 37], [31, 40, 29]]
    assert [len(share) for share in dealt([sequence(9)], 3)] == [1, 0, 0]


def test_a_share_comes_back_from_its_bytes() -> None:
    given = [sequence(each) for each in LENGTHS]
    found = unpacked(packed(given), torch.device("cpu"))
    expected, got = pack(given), pack(found)
    for name in ("sources", "targets", "turns", "turn_lengths", "advantages"):
        one, two = getattr(expected, name), getattr(got, name)
        assert one.dtype == two.dtype
        assert (one == two).all()
    for name, one in asdict(expected.sampled).items():
        assert (one == getattr(got.sampled, name)).all()
    assert unpacked(packed([]), torch.device("cpu")) == []
