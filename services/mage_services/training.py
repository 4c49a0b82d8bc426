"""What the learner's worker thread does: prepare the policy, train a step, write weights and
checkpoints.

Nothing here waits for a peer. All of it runs in one thread, one call at a time, so it needs no
lock.
"""

import json
import time
from collections.abc import Callable, Sequence
from hashlib import blake2s
from pathlib import Path
from typing import Any

import torch

from mage_async.batch import training_sequences
from mage_async.inference.chat_files import load_chat
from mage_async.learning.checkpoint import (
    checkpoints,
    restore_checkpoint,
    save_checkpoint,
    save_weights,
    writing,
)
from mage_async.learning.forward import backend_report
from mage_async.learning.policy import load_policy
from mage_async.learning.prepare import prepare_policy
from mage_async.learning.trainer import Trainer
from mage_async.learning.warm_start import Progress
from mage_async.readable import readable
from mage_async.trajectory import Group, Trial
from mage_async.wire import Publication
from mage_services.startup import Startup

KEPT_WEIGHTS = 8
"""Versions whose weights stay beside the newest, for peers that are still reading them."""


class Training:
    """The trainer of a run and its files."""

    def __init__(self, trainer: Trainer, startup: Startup, counters: dict[str, Any]) -> None:
        self.trainer = trainer
        self.counters = counters
        """What a checkpoint remembered: `next_grant`, `train_s`."""
        self._run, self._config = startup.run, startup.config

    @staticmethod
    def begin(startup: Startup, report: Callable[[Progress], None]) -> tuple["Training", str]:
        """Load the newest checkpoint, or make the policy; says where the weights came from."""
        config, run = startup.config, startup.run
        run.weights.mkdir(exist_ok=True)
        origin = "as prepared before"
        if not run.policy.exists():
            origin = prepare_policy(config, run.policy, startup.build, report)
        found = checkpoints(run.checkpoints)
        source = found[-1] if found else run.policy
        torch.set_num_threads(config.learner.threads)
        model = load_policy(source, config.policy.dtype, config.learner.device)
        trainer = Trainer(
            model,
            config.learner,
            config.sampling.temperature,
            config.seed,
            max_staleness=config.admission.max_staleness + config.admission.lag,
        )
        counters = restore_checkpoint(trainer, found[-1]) if found else {}
        _forget_after(run.metrics, "step", trainer.version)
        _forget_after(run.curve, "version", trainer.version)
        if found:
            origin = f"from checkpoint {found[-1].name}"
        return Training(trainer, startup, counters), origin

    def describe(self) -> str:
        """Model and kernels in one line."""
        return f"{self.trainer.describe()}; {backend_report()}"

    def step(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Train one batch and publish nothing yet; returns the trainer's metrics."""
        began = time.monotonic()
        metrics = self.trainer.step(training_sequences(groups, self._config))
        return metrics | {"train_s": time.monotonic() - began}

    def parity(self, groups: Sequence[Group]) -> dict[str, float]:
        """How far the engine's log-probs are from the learner's, at equal version."""
        return self.trainer.parity(training_sequences(groups, self._config))

    def write_weights(self) -> Publication:
        """Publish the current weights as a file, and delete those nobody can still want."""
        version = self.trainer.version
        file = self._run.weights_of(version)
        with writing(f"weights of version {version} to {self._run.weights}"):
            save_weights(self.trainer, file)
        for old in sorted(self._run.weights.glob("v*.safetensors"))[: -KEPT_WEIGHTS - 1]:
            if not self._is_measured(int(old.stem[1:])):
                old.unlink()
        digest = blake2s(file.read_bytes(), digest_size=8).hexdigest()
        return Publication(version=version, path=str(file.resolve()), digest=digest)

    def checkpoint(self, counters: dict[str, Any]) -> Path:
        """Write a checkpoint of the current version."""
        with writing(f"a checkpoint to {self._run.checkpoints}"):
            return save_checkpoint(
                self.trainer,
                self._run.policy,
                self._run.checkpoints,
                counters,
                self._config.learner.keep_checkpoints,
            )

    def record(self, file: Path, line: dict[str, Any]) -> None:
        """Append one line of JSON."""
        with writing(f"a line to {file}"), file.open("a") as out:
            out.write(json.dumps(line) + "\n")

    def sample(self, trial: Trial, version: int) -> None:
        """Write a trial down as text, for people to read."""
        self.record(self._run.samples, readable(trial, load_chat(self._run.policy), version))

    def _is_measured(self, version: int) -> bool:
        every = self._config.evaluation.every
        return every > 0 and version % every == 0


def _forget_after(file: Path, key: str, version: int) -> None:
    """A resumed run plays on from its checkpoint: what came after it has not happened."""
    if file.is_file():
        lines = [line for line in file.read_text().splitlines() if json.loads(line)[key] <= version]
        file.write_text("".join(line + "\n" for line in lines))
