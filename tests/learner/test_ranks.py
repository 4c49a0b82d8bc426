"""A step on two ranks, or four, is that of one process, to rounding."""

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

import numpy as np
import pytest
import torch

from mage_async.assembly import check
from mage_async.config import config_file
from mage_async.config.schema import AnyCorrection
from mage_async.config.tables import kinds
from mage_async.errors import ConfigError, RunError
from mage_async.learning.forward import layers_of
from mage_async.learning.packing import MicroBatch
from mage_async.learning.ranked_trainer import deal, from_bytes, to_bytes
from mage_async.policy.snapshot import published_fingerprint, read_snapshot
from mage_async.restriction import AllowedSets
from mage_async.results.run_directory import SHARDS, RunDirectory
from mage_services.learner.rank_processes import RankProcesses, join, rank_store
from mage_services.learner.trainer_thread import Training
from tests.helpers.random_models import sequence
from tests.learner.rank_trainings import (
    LENGTHS,
    assert_equal,
    begun_checkpoint,
    config_of,
    copied_bytes,
    file_of,
    gathered_bytes,
    new_run,
    on_one,
    on_ranks,
    published,
    saved,
    steps,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return new_run(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(run: RunDirectory, request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    threads = torch.get_num_threads()
    with RankProcesses(run, config_of(f"learner.ranks={request.param}")) as ranks:
        yield ranks
    torch.set_num_threads(threads)


def assert_alike(one: Training, many: Training, num_steps: int = 3) -> None:
    for expected, found in zip(steps(one, num_steps), steps(many, num_steps), strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    weights = published(many)
    for name, weight in published(one).items():
        assert torch.allclose(weight, weights[name], rtol=0, atol=1e-5), name


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("decoupled", "gspo", "m2po") else pytest.mark.slow)
        for name in kinds(AnyCorrection)
        if name != "vcpo"  # refused: see below
    ],
)
def test_every_correction_is_that_of_one_process(
    run: RunDirectory, ranks: RankProcesses, name: str
) -> None:
    changes = [f"learner.correction={name}"]
    if name == "m2po":
        changes.append("learner.correction.max_second_moment=0.5")
    assert_alike(on_one(run, *changes), on_ranks(run, ranks, *changes))


@pytest.mark.parametrize(
    "changes",
    [
        ["learner.kl=5.0"],
        ["learner.max_tokens_per_microbatch=60", "engine.max_tokens=60"],
        ["learner.shared_opening=true", "learner.activation_checkpointing=true"],
        ["learner.minibatches=7"],  # of one sequence each, so that a rank has none
        ["learner.minibatches=7", "learner.correction=m2po"],
        ["learner.minibatches=3", "learner.proximal=interpolated"],
    ],
)
def test_so_is_whatever_else_a_step_does(
    run: RunDirectory, ranks: RankProcesses, changes: list[str]
) -> None:
    assert_alike(on_one(run, *changes), on_ranks(run, ranks, *changes))


def test_all_ranks_skip_an_update_together(run: RunDirectory, ranks: RankProcesses) -> None:
    one, many = on_one(run), on_ranks(run, ranks)
    for training in (one, many):
        batch = [sequence(each) for each in LENGTHS]
        batch[0].advantages[0] = torch.nan  # in one of two minibatches, on one of the ranks
        assert training.trainer.step(batch)["skipped_updates"] == 1.0
    assert_alike(one, many, 1)


def test_two_runs_make_the_same_bits(run: RunDirectory, ranks: RankProcesses) -> None:
    digests = []
    for _ in range(2):
        training = on_ranks(run, ranks)
        before = training.digest()
        steps(training)
        digests.append(training.digest())
        assert digests[-1] != before
    assert digests[0] == digests[1]


def test_what_one_process_saves_ranks_go_on_with_and_back(
    run: RunDirectory, ranks: RankProcesses
) -> None:
    alone = on_one(run)
    steps(alone)
    many = on_ranks(run, ranks, checkpoint=saved(alone))
    assert many.digest() == alone.digest()
    again = on_one(run, checkpoint=saved(many))
    assert_equal(alone, again)
    (undisturbed,) = steps(many, 1)
    assert steps(again, 1)[0]["loss"] == pytest.approx(undisturbed["loss"], abs=1e-5)


def test_ranks_that_were_saved_go_on_to_the_same_bits(
    run: RunDirectory, ranks: RankProcesses
) -> None:
    many = on_ranks(run, ranks)
    steps(many)
    checkpoint = saved(many)
    (undisturbed,) = steps(many, 1)  # while the checkpoint may still have been written
    digest = many.digest()
    resumed = on_ranks(run, ranks, checkpoint=checkpoint)
    assert steps(resumed, 1) == [undisturbed]
    assert resumed.digest() == digest


def test_a_checkpoint_holds_the_step_that_it_was_begun_at(
    run: RunDirectory, ranks: RankProcesses
) -> None:
    many = on_ranks(run, ranks)
    steps(many)
    saved_by_one = saved(on_one(run))
    digest, begun = many.digest(), begun_checkpoint(many)
    steps(many, 2)
    alone = on_one(run, checkpoint=begun.result())
    assert alone.trainer.version == 3
    assert alone.digest() == digest != many.digest()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (begun.result() / name).read_text() == (saved_by_one / name).read_text()


def test_masters_in_float32_are_sharded_and_saved(run: RunDirectory, ranks: RankProcesses) -> None:
    changes = ("policy.dtype=bfloat16", "learner.float32_masters=true")
    alone = on_one(run, *changes)
    steps(alone)
    many = on_ranks(run, ranks, *changes, checkpoint=saved(alone))
    checkpoint = saved(many)
    assert_equal(alone, on_one(run, *changes, checkpoint=checkpoint))
    expected, got = steps(alone, 1)[0], steps(many, 1)[0]
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02)
    with pytest.raises(RunError, match=r"float32 masters, the model 0: leave learner\.float32"):
        on_one(run, "policy.dtype=bfloat16", checkpoint=checkpoint)


@pytest.mark.parametrize("masters", [False, True])
def test_a_checkpoint_without_the_shards_of_one_rank_or_all_is_refused(
    run: RunDirectory, ranks: RankProcesses, masters: bool
) -> None:
    changes = ("policy.dtype=bfloat16", "learner.float32_masters=true") if masters else ()
    checkpoint = saved(on_ranks(run, ranks, *changes))
    for file in sorted((checkpoint / SHARDS).iterdir()):
        kept = file.read_bytes()
        file.unlink()
        with pytest.raises(RunError, match=r"not a whole checkpoint: .* lacks files: \d+ of the"):
            on_one(run, *changes, checkpoint=checkpoint)
        file.write_bytes(kept)
    for file in (checkpoint / SHARDS).iterdir():
        file.unlink()
    with pytest.raises(RunError, match=r"lacks files: (\d+) of the \1 tensors"):
        on_one(run, *changes, checkpoint=checkpoint)


def test_a_checkpoint_whose_weights_are_not_all_written_is_refused(
    run: RunDirectory, ranks: RankProcesses
) -> None:
    checkpoint = saved(on_ranks(run, ranks))
    file = checkpoint / "model.safetensors"
    with file.open("r+b") as out:
        out.seek(-8, os.SEEK_END)
        out.write(bytes(8))
    with pytest.raises(RunError, match="not a whole checkpoint: its weights have another digest"):
        on_one(run, checkpoint=checkpoint)


def test_ranks_publish_the_bytes_of_one_process_and_nobody_gathers_them(
    run: RunDirectory, ranks: RankProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = on_ranks(run, ranks)
    steps(many)
    alone = on_one(run, checkpoint=saved(many))
    gathered, copied = gathered_bytes(monkeypatch), copied_bytes(monkeypatch)
    found = file_of(many)
    monkeypatch.undo()
    expected = file_of(alone)
    places, data = read_snapshot(expected)
    ours, theirs = read_snapshot(found)
    assert ours == places
    assert torch.equal(theirs, data)
    one, two = published_fingerprint(expected), published_fingerprint(found)
    assert (one.version, one.tensors) == (two.version, two.tensors)
    assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)
    layers = [sum(map(_num_bytes, layer.parameters())) for layer in layers_of(alone.trainer.model)]
    outside = sum(map(_num_bytes, alone.trainer.model.parameters())) - sum(layers)
    assert 0 < max(gathered) <= max(outside, *layers)  # by the forward of the probe tokens
    assert copied == [pytest.approx(len(data) / ranks.count, rel=0.2)]


def _num_bytes(weight: torch.Tensor) -> int:
    return weight.numel() * weight.itemsize


def test_log_probs_of_the_last_weights_are_those_of_one_process(
    run: RunDirectory, ranks: RankProcesses
) -> None:
    given = [sequence(each) for each in LENGTHS]
    many = on_ranks(run, ranks)
    found = many.trainer.parity(given)
    assert found == pytest.approx(on_one(run).trainer.parity(given), rel=1e-5)
    steps(many, 1)  # weights were taken apart again


@pytest.mark.parametrize(
    "changes",
    [
        ["policy.lora.rank=4"],
        ["learner.optimizer_state=8bit"],
    ],
)
def test_what_ranks_cannot_do_is_refused_before_the_run(changes: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"learner\.ranks = 2: .* works in one process alone"):
        check(config_of("learner.ranks=2", *changes))


def test_a_baseline_among_whole_sequences_is_refused_on_ranks() -> None:
    with pytest.raises(ConfigError, match=r'"vcpo" takes its baseline .* \(got 2\)'):
        check(config_of("learner.ranks=2", "learner.correction=vcpo"))


@pytest.mark.parametrize("method", ["sac_glam", "stepagent_implicit"])
def test_so_are_methods_with_more_than_one_model(method: str) -> None:
    config = config_file.load(config_file.find(None), ["learner.ranks=2"], method)
    with pytest.raises(ConfigError, match=r"learner\.ranks = 2: .* works in one process alone"):
        check(config)


def test_a_process_without_followers_does_not_pretend(run: RunDirectory) -> None:
    with pytest.raises(RunError, match=r"learner\.ranks = 2 needs the processes of `mage train`"):
        Training.of(run, config_of("learner.ranks=2"), None)


def test_tokens_are_dealt_evenly_and_in_order() -> None:
    shares = deal([sequence(each) for each in LENGTHS], 2)
    lengths = [[len(each.tokens) for each in share] for share in shares]
    assert lengths == [[40, 22, 13, 37], [31, 40, 29]]
    assert [len(share) for share in deal([sequence(9)], 3)] == [1, 0, 0]


def test_a_share_comes_back_from_its_bytes() -> None:
    given = [sequence(each) for each in LENGTHS]
    drawn = given[0].tokens[given[0].places]
    sets = [np.array([token, token + 1], np.int32) for token in drawn]
    given[0] = replace(given[0], allowed=AllowedSets.of([None, *sets[1:]]))
    given = [replace(each, weights=0.5 * each.advantages) for each in given]
    found = from_bytes(to_bytes(given), torch.device("cpu"))
    for name in ("index", "offsets", "tokens"):
        assert (getattr(found[0].allowed, name) == getattr(given[0].allowed, name)).all()
    assert all(each.allowed is None for each in found[1:])
    expected, got = (MicroBatch.of(each, torch.device("cpu")) for each in (given, found))
    values = attrgetter(
        "row.sources", "row.targets", "turns", "turn_lengths", "advantages", "weights"
    )
    for one, two in zip(values(expected), values(got), strict=True):
        assert one.dtype == two.dtype
        assert (one == two).all()
    for name, one in expected.sampled._asdict().items():
        assert (one == getattr(got.sampled, name)).all()
    assert from_bytes(to_bytes([]), torch.device("cpu")) == []


def test_ranks_that_find_no_loopback_interface_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(2, "eth0")])
    with pytest.raises(RunError, match=r"lists only eth0: .* GLOO_SOCKET_IFNAME"):
        join(rank_store(0, is_rank_0=True), 0, config_of("learner.ranks=2"))
