"""Steps of the journal that are computed again, and come out otherwise."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.cuda._utils import _get_device_index
from transformers import Qwen3Config, Qwen3ForCausalLM

from mage_async.admission.ledger import Ledger
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import DeterministicFailure, RunError
from mage_async.learning.trainer import Trainer
from mage_async.methods.method import Methods
from mage_async.policy.weight_digest import overall, tensor_digests
from mage_async.protocol.journal_records import (
    Commit,
    Record,
    Segment,
    first_segment_header,
)
from mage_async.protocol.messages import TrialResult
from mage_async.results.run_directory import RunDirectory
from mage_async.tasks.league import League
from mage_async.trajectory import Task, Trial
from mage_services.learner import resume, trainer_thread
from mage_services.learner.trainer_thread import Training, less_memory


class Journal:
    """One step of no groups, whose weights are said to have had a digest."""

    def __init__(
        self,
        config: Config,
        digest: str,
        tensors: dict[str, str],
        later: Sequence[Record] = (),
        sources: dict[str, str] | None = None,
    ) -> None:
        self.segments, self._later = [Segment(1, 0, 0, 1)], later
        self._config, self._sources = config_file.dump(config), sources or {}
        self._commit = Commit(
            version=1,
            grants=(),
            digest=digest,
            tensors=tensors,
            time_s=1.0,
        )

    def records(self, first: int) -> Iterator[Record]:
        head = first_segment_header(0, 0)
        head = msgspec.structs.replace(head, config=self._config, sources=self._sources)
        return iter([head, self._commit, *self._later])


def small_model() -> Qwen3ForCausalLM:
    """A model whose steps take no time."""
    shape = Qwen3Config(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    return Qwen3ForCausalLM(shape)


@pytest.fixture
def training(tmp_path: Path, request: pytest.FixtureRequest) -> Training:
    """Training on a device, with a step that changes nothing."""
    config = config_file.load(config_file.find(None), [f"learner.device={request.param}"])
    made = Training(Trainer(small_model(), config), RunDirectory(tmp_path), config, {})
    made.step = lambda groups: {"loss": 0.0}  # type: ignore[method-assign]
    return made


def recover(training: Training, digest: str, tensors: dict[str, str]) -> int:
    journal: Any = Journal(training.config, digest, tensors)
    ledger, methods, notes = Ledger(2, 1, 2), Methods(training.config), list[str]()
    steps = resume.recover(training, journal, ledger, League(), methods, notes.append, {})
    (note,) = notes
    assert note.startswith("trains step 1 again, from the trials in the journal: the newest")
    return len(steps)


@pytest.mark.parametrize("training", ["cpu", "cuda:0"], indirect=True)
def test_a_step_that_comes_out_as_it_was_is_taken(training: Training) -> None:
    tensors = tensor_digests(training.trainer.model)
    assert recover(training, overall(tensors), tensors) == 1
    assert training.difference == ""


@pytest.mark.parametrize("training", ["cpu"], indirect=True)
def test_on_a_processor_other_weights_end_the_run_with_the_first_tensor(training: Training) -> None:
    tensors = tensor_digests(training.trainer.model)
    tensors["model.norm.weight"] = "other"
    with pytest.raises(RunError, match="step 1 computed again gives other weights, first in model"):
        recover(training, "other", tensors)


@pytest.mark.parametrize("training", ["cpu"], indirect=True)
def test_an_edited_class_is_named_where_a_step_comes_out_otherwise(training: Training) -> None:
    tensors = tensor_digests(training.trainer.model) | {"model.norm.weight": "other"}
    journal: Any = Journal(training.config, "other", tensors, (), {"a:B": "0"})
    given = (training, journal, Ledger(2, 1, 2), League(), Methods(training.config), print)
    with pytest.raises(RunError, match=r"step 1 .* other weights, .*; a:B was edited since: undo"):
        resume.recover(*given, {"a:B": "1"})


@pytest.mark.parametrize("training", ["cuda:0"], indirect=True)
def test_on_a_gpu_other_weights_are_said_and_the_run_goes_on(training: Training) -> None:
    tensors = tensor_digests(training.trainer.model)
    tensors["model.norm.weight"] = "other"
    assert recover(training, "other", tensors) == 1
    assert "first in model.norm.weight" in training.difference


@pytest.mark.parametrize("training", ["cpu"], indirect=True)
def test_groups_that_another_configuration_drops_are_counted_in_a_note(training: Training) -> None:
    before, task = Ledger(2, 1, 2), Task("rps", "m", 0)
    before.replay_commit(Commit(version=1, grants=(), digest="", tensors={}, time_s=1.0))
    grant = before.grant(task, num_episodes=3, peer="a", now=0.0, deadline_s=9.0)
    later = before.grant_record(grant), TrialResult(0, 0, Trial(task, 0, 3, (), ()))
    tensors = tensor_digests(training.trainer.model)
    for changed, dropped in (("environment.retries=9", 0), ("seed=7", 1)):
        config = config_file.load(config_file.find(None), [changed])
        journal: Any = Journal(config, overall(tensors), tensors, later)
        ledger, methods, notes = Ledger(2, 1, 2), Methods(training.config), list[str]()
        resume.recover(training, journal, ledger, League(), methods, notes.append, {})
        assert ledger.counts().groups.dropped == dropped
        assert len(notes) == 1 + dropped, "the first one says that the step is trained again"
    assert notes[-1].endswith("flight are dropped: 1, with 1 trials that had arrived")
    # An edited class drops them too; a digest that the journal lacks does not.
    for known, dropped in (({"a:B": "0"}, 1), ({"a:B": "1"}, 0), ({}, 0)):
        journal = Journal(training.config, overall(tensors), tensors, later, known)
        ledger, notes = Ledger(2, 1, 2), list[str]()
        resume.recover(training, journal, ledger, League(), methods, notes.append, {"a:B": "1"})
        assert ledger.counts().groups.dropped == dropped
        assert [note for note in notes if note.startswith("a:B was edited, so the")] == notes[1:]


@pytest.mark.parametrize(("device", "index"), [("cuda:7", 7), ("cuda", 0)])
def test_a_learner_on_a_gpu_launches_its_kernels_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, index: int
) -> None:
    chosen: list[int] = []

    class Chosen(Exception):
        """Before anything is loaded."""

    def choose(device: str | int) -> None:
        chosen.append(_get_device_index(device))  # the check with which torch's function begins
        raise Chosen

    monkeypatch.setattr(torch.cuda, "set_device", choose)
    config = config_file.load(config_file.find(None), [f"learner.device={device}"])
    with pytest.raises(Chosen):
        Training.of(RunDirectory(tmp_path), config, None)
    assert chosen == [index]


def test_a_copy_of_the_weights_without_enough_memory_names_the_keys_that_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_file.load(config_file.find(None), ["engine.max_tokens=300"])
    training = Training(Trainer(small_model(), config), RunDirectory(tmp_path), config, {})

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(trainer_thread, "tensor_digests", fail)
    with pytest.raises(
        DeterministicFailure,
        match=r"^a copy of the weights does not fit .*learner\.max_tokens_per_microbatch = 300",
    ):
        training.snapshot()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        MemoryError(),
    ],
)
def test_a_step_without_enough_memory_names_the_keys_that_help(
    error: Exception, tmp_path: Path
) -> None:
    config = config_file.load(config_file.find(None), ["engine.max_tokens=300"])
    trainer, failures = Trainer(small_model(), config), [error]
    training = Training(trainer, RunDirectory(tmp_path), config, {})

    def train(groups: Any) -> dict[str, float]:
        raise failures[0]

    trainer.train = train  # type: ignore[method-assign]
    training.snapshot()  # of the policy that the run begins with
    with pytest.raises(
        DeterministicFailure, match=r"^step 1 does not fit into the memory of cpu"
    ) as caught:
        training.step([])
    for words in (
        "learner.max_tokens_per_microbatch = 300",
        "learner.activation_checkpointing = true",
        "policy.lora.rank",
        f"mage train --resume --run-dir {tmp_path} --set",
    ):
        assert words in str(caught.value)
    # After a step that fitted, the cause may be memory in pieces, which a restart gives back.
    training.snapshot()
    with pytest.raises(RunError, match="does not fit") as later:
        training.step([])
    assert not later.value.is_deterministic
    failures[0] = RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match="shapes do not match"):
        training.step([])


def test_keys_that_are_set_already_are_not_named_against_a_lack_of_memory() -> None:
    assignments = ["learner.activation_checkpointing=true", "policy.lora.rank=8"]
    assignments += ["engine.max_tokens=300", "learner.max_tokens_per_microbatch=300"]
    advice = less_memory(config_file.load(config_file.find(None), assignments))
    assert advice == "let no other program use the memory of this machine, or take a larger one"
