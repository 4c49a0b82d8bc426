"""Small real runs in one process that are well for some steps, and are then made sick.

They are played and trained by the parts of `mage_async/algorithm.py`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from mage_async.algorithm import InProcessRun, prepare
from mage_async.assembly import environment_of
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.doctor import Doctor, Finding
from mage_async.learning.packing import training_sequences
from mage_async.results.metrics import batch_metrics

SMALL = (
    "warm_start.steps=30",
    "warm_start.max_steps=30",
    "warm_start.gate=1.0",
    "warm_start.trials=96",
    "admission.groups_per_step=4",
    "admission.trials_per_group=6",
    "learner.steps=60",
)
FAST = {
    "learning_rate": 0.05,
    "final_learning_rate": 0.05,
    "entropy": 0.0,
    "final_entropy": 0.0,
}
WELL = 6
"""Steps."""


@dataclass
class Patient:
    """A run, and what the doctor finds on it."""

    config: Config
    run: InProcessRun
    follows: bool = True
    """Whether the engine draws with the weights that it says it has."""
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._doctor, self._environment = Doctor.of(self.config), environment_of(self.config)

    def train(self, num_steps: int) -> None:
        """Steps as `InProcessRun.step` takes them; each is shown to the doctor."""
        run = self.run
        for _ in range(num_steps):
            groups = run.play_batch()
            metrics = run._trainer.step(training_sequences(groups, self.config, "cpu", version=0))
            metrics |= batch_metrics(groups, self._environment, 1.0, self.config.trial.episodes)
            self.findings += self._doctor.step({"step": run.version, **metrics})
            if self.follows:
                run._publish()
            else:
                run._engine.swap(run.version, run._engine.model.weights)

    def adopt(self, **changes: Any) -> None:
        """Train by other keys of `[learner]` from here on."""
        rules = msgspec.structs.replace(self.config.learner, **changes)
        self.run._trainer.adopt(msgspec.structs.replace(self.config, learner=rules))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(load(), tmp_path_factory.mktemp("policies"))


def load() -> Config:
    # The findings are of policies that may write anything.
    return config_file.load(config_file.find(None), [*SMALL, "sampling.restricted=false"])


@pytest.fixture
def patient(policy: Path) -> Any:
    """A run that has been well for some steps."""
    threads = torch.get_num_threads()
    patient = Patient(load(), InProcessRun(load(), policy))
    patient.train(WELL)
    assert patient.findings == []
    yield patient
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_too_large_a_learning_rate_without_a_bonus_ends_exploration(patient: Patient) -> None:
    """Then the trials of a group are alike, too."""
    patient.adopt(**FAST)
    patient.train(24)
    assert {found.name for found in patient.findings} == {"entropy_collapse", "no_variance"}


@pytest.mark.slow
def test_too_large_a_bonus_of_entropy_is_found_with_what_it_does_to_actions(
    patient: Patient,
) -> None:
    patient.adopt(**FAST)
    patient.train(3)
    patient.adopt(learning_rate=0.01, entropy=20.0, final_entropy=20.0, entropy_ceiling=0.0)
    patient.train(10)
    assert {found.name for found in patient.findings} == {"entropy_runaway", "invalid_actions"}
    assert all(found.onset > WELL + 3 for found in patient.findings)


@pytest.mark.slow
def test_an_engine_that_keeps_old_weights_is_found(patient: Patient) -> None:
    patient.follows = False
    patient.adopt(learning_rate=0.005)
    patient.train(6)
    first, *others = patient.findings
    assert first.name == "engine_mismatch"
    assert first.onset == WELL + 2  # the first step that is not drawn by its own weights
    assert {found.name for found in others} <= {"off_policy"}
