"""The learner's worker thread: prepare the policy, train a step, copy weights, write checkpoints.

Nothing here waits for a peer. Every call runs in one thread, one after the other, so no lock is
needed.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mage_async.admission.recovery import (
    Committed,
    first_difference,
)
from mage_async.attribution.journal_steps import JournalStep
from mage_async.attribution.rows import row_of
from mage_async.attribution.turns import attributed
from mage_async.config import config_file
from mage_async.config.schema import Config, Embedded
from mage_async.credit.discriminator import agreement
from mage_async.errors import DeterministicFailure, RunError
from mage_async.inference.chat_files import load_chat
from mage_async.learning.forward import backend_report
from mage_async.learning.packing import Sequenced
from mage_async.learning.ranks.orders import Adopt, Digest, Order
from mage_async.learning.soft_actor_critic.choice import trainer_of
from mage_async.learning.trainer import Trainer
from mage_async.learning.training_sequences import training_sequences
from mage_async.policy.check_tokens import check_logprobs, is_scored
from mage_async.policy.checkpoint import (
    restore_checkpoint,
    save_checkpoint,
    writing,
)
from mage_async.policy.load import load_frozen_beside, loads_on
from mage_async.policy.lora import load_trained
from mage_async.policy.snapshot import Snapshot
from mage_async.policy.weight_digest import NEWEST, Method, overall, tensor_digests
from mage_async.protocol.journal_records import Commit
from mage_async.results.run_directory import RunDirectory
from mage_async.trajectory import Group
from mage_services.processes.json_lines import append_lines
from mage_services.weights.weight_files import weights_file
from mage_services.weights.weight_transport import weights_folder

if TYPE_CHECKING:
    from mage_services.learner.ranks.beside import Joined
    from mage_services.learner.ranks.sharded_files import ShardedFiles, SharedSnapshot


class Training:
    """The trainer of a run and its files."""

    def __init__(
        self,
        trainer: Trainer,
        run: RunDirectory,
        config: Config,
        counters: dict[str, Any],
        joined: "Joined | None" = None,
    ) -> None:
        self.trainer = trainer
        self._ranks = joined.ranks if joined else None
        self.sharded = _sharded(trainer, joined) if joined else None
        """What writes the model's files where it lies on several ranks."""
        self._has_published = False
        self.counters = counters
        """What a checkpoint remembered: `next_grant`, `train_s`, `totals`."""
        self.digests: dict[int, str] = {}
        """Digests of the weights after each step that was read from the journal."""
        self.difference = ""
        """On a GPU: the first difference of steps that were computed again."""
        self.run, self.own_config = run, config
        self._config = config
        """The one it trains under: that of a step that is computed again, or the own."""

    @staticmethod
    def of(
        run: RunDirectory,
        config: Config,
        checkpoint: Path | None,
        joined: "Joined | None" = None,
    ) -> "Training":
        """A trainer at a checkpoint, or where the run began; one of a learner's ranks, if any.

        Raises:
            RunError: the checkpoint is not whole.
        """
        torch.set_num_threads(config.learner.threads)
        if is_on_gpu(config):
            torch.cuda.set_device(config.learner.device)  # where this thread's kernels are launched
        model = load_trained(config, run.policy, checkpoint, device=loads_on(config))
        chat = load_chat(run.policy)
        ranks = joined.ranks if joined else None
        trainer = trainer_of(config, model, chat, max_staleness=_bound(config), ranks=ranks)
        counters = restore_checkpoint(trainer, checkpoint) if checkpoint else {}
        training = Training(trainer, run, config, counters, joined)
        if checkpoint:
            training.check_whole(checkpoint)
        training.adopt(config)
        return training

    def check_whole(self, checkpoint: Path) -> None:
        """Compare the weights with the digest that a checkpoint of several ranks has.

        Raises:
            RunError: they are others.
        """
        digest = self.counters.get("digest")
        if digest and digest != overall(self.own_digests(NEWEST)):
            raise RunError(
                f"{checkpoint}: not a whole checkpoint: its weights have another digest than its "
                "counters say; remove the folder"
            )

    def redo(self, committed: Committed) -> tuple[dict[str, Any], str]:
        """Train a step of the journal again; its metrics, and where other weights come out than
        were committed, a sentence with the first tensor that differs.

        Raises:
            DeterministicFailure: trials of the step are gone.
        """
        commit = committed.commit
        if committed.groups is None:
            raise DeterministicFailure(
                f"step {commit.version}: the journal lacks trials that it trained"
            )
        self.adopt(config_file.loads(committed.config))
        metrics = self.step(committed.groups)
        tensors = self._digests(commit.digest_method)
        if overall(tensors) == commit.digest:
            return metrics, ""
        return metrics, (
            f"step {commit.version} computed again gives other weights, first in "
            f"{first_difference(commit, tensors)}: {overall(tensors)} instead of "
            f"{commit.digest}; another machine, library or number of threads or ranks computes "
            "otherwise"
        )

    def adopt(self, config: Config) -> None:
        """Train under another configuration from here on: a resumed run may change it."""
        self._config = config
        self._tell(Adopt(config_file.dump(config)))
        temperature, bound = config.sampling.temperature, _bound(config)
        load_frozen_beside(self.trainer, config, self.run.policy)
        self.trainer.adopt(
            config.learner,
            temperature,
            config.seed,
            max_staleness=bound,
            strategy_temperature=config.sampling.strategy_temperature,
            expert=config.expert,
        )

    def commit(self, groups: Sequence[Group], time_s: float) -> Commit:
        """What the journal has to say of the step just trained."""
        tensors = self._digests()
        return Commit(
            version=self.trainer.version,
            grants=tuple(group.grant for group in groups),
            digest=overall(tensors),
            tensors=tensors,
            time_s=time_s,
            digest_method=NEWEST,
        )

    def describe(self) -> str:
        """Model and kernels in one line."""
        return f"{self.trainer.describe()}; {backend_report()}"

    def step(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Train one batch and publish nothing yet; returns the trainer's metrics."""
        began = time.monotonic()
        metrics = self.trainer.train(groups, self._config)
        asked = agreement([trial for group in groups for trial in group.trials])
        return metrics | asked | {"train_s": time.monotonic() - began}

    def parity(self, groups: Sequence[Group]) -> dict[str, float]:
        """How far the engine's log-probs are from the learner's, at equal version."""
        return self.trainer.parity(self._sequences(groups))

    def _sequences(self, groups: Sequence[Group]) -> list[Sequenced]:
        return training_sequences(groups, self._config, self.trainer.model.device)

    def snapshot(self) -> "Snapshot | SharedSnapshot":
        """A copy of the current weights, to be published while the next step is trained; with the
        log-probs of the check tokens where this version is scored, or is sent: of weights that are
        sent an engine has no digests.
        """
        version, is_sent = self.trainer.version, self._config.transport.weights == "nccl"
        has_spots = isinstance(self._config.engine, Embedded) and not self.sharded
        scores = is_scored(version, has_spots=has_spots) or is_sent or not self._has_published
        self._has_published, logprobs = True, None
        if scores:
            with self.trainer.read(1) as model:
                logprobs = check_logprobs(model)
        if self.sharded:
            folder = weights_folder(self.run, self.own_config)
            return self.sharded.snapshot(weights_file(folder, version), logprobs)
        return Snapshot.of(self.trainer.model, version, logprobs)

    def digest(self) -> str:
        """Digest of the current weights, as a commit records it."""
        return overall(self._digests())

    def own_digests(self, method: Method) -> dict[str, str]:
        """Digests of all tensors; of a sharded model every rank asks at once."""
        if self.sharded:
            return self.sharded.digests(method)
        return tensor_digests(self.trainer.model, method)

    def _digests(self, method: Method = NEWEST) -> dict[str, str]:
        self._tell(Digest(method))
        return self.own_digests(method)

    def _tell(self, order: Order) -> None:
        """Have the other ranks do the same, if there are any."""
        if self._ranks:
            self._ranks.tell_all(order)

    def checkpoint(self, counters: dict[str, Any]) -> "Future[Path]":
        """Write a checkpoint of the current version; its folder. One process has written it when
        this returns, ranks write it beside the next steps.
        """
        folder, keep = self.run.checkpoints, self.own_config.learner.keep_checkpoints
        if self.sharded:
            digest = self.digest()
            return self.sharded.checkpoint(self.run.policy, folder, counters, keep, digest)
        is_last, written = self.trainer.version == self.own_config.learner.steps, Future[Path]()
        with writing(f"a checkpoint to {folder}"):
            written.set_result(
                save_checkpoint(
                    self.trainer, self.run.policy, folder, counters, keep, is_last=is_last
                )
            )
        return written

    def record(self, file: Path, line: dict[str, Any]) -> None:
        """Append one line of JSON."""
        with writing(f"a line to {file}"):
            append_lines(file, [line])

    def sample(self, groups: Sequence[Group], version: int) -> None:
        """Write the first trial of a step down, for people to read."""
        chat = load_chat(self.run.policy)
        step = JournalStep(version, groups, self._config, is_whole=True)
        row = row_of(next(attributed(step, chat.decode)), chat)
        self.record(self.run.samples, row | {"version": version})


def _sharded(trainer: Trainer, joined: "Joined") -> "ShardedFiles":
    from mage_services.learner.ranks.sharded_files import ShardedFiles  # takes a second

    return ShardedFiles(trainer, joined)


def is_on_gpu(config: Config) -> bool:
    """Whether the learner computes on one."""
    return torch.device(config.learner.device).type == "cuda"


def _bound(config: Config) -> int:
    """The largest staleness that the rule of admission means to allow, in steps."""
    return config.admission.max_staleness + config.admission.lag
