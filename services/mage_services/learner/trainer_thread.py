"""Train a step, copy the weights, write checkpoints and metrics: the work of the trainer's thread.

`training_loop.py` decides on the event loop what is done next, and calls the methods of `Training`
in the one `TrainerThread`, one after the other. So no lock is needed. None of the calls waits for
an actor or the evaluator.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mage_async.admission.replay import Committed, first_difference
from mage_async.attribution import JournalStep, attributed
from mage_async.config import config_file
from mage_async.config.schema import Config, Embedded
from mage_async.errors import ConfigError, DeterministicFailure, RunError, first_line
from mage_async.inference.chat_files import load_chat
from mage_async.learning.lora import publishes_adapters
from mage_async.learning.packing import training_sequences
from mage_async.learning.rank_orders import Adopt, Digest, Order
from mage_async.learning.trainer import Trainer, trainer_of
from mage_async.methods.method import Methods
from mage_async.policy.checkpoint import restore_checkpoint, save_checkpoint
from mage_async.policy.full_disk import writing
from mage_async.policy.load import load_frozen_policies, load_trained, loading_device
from mage_async.policy.snapshot import Snapshot, base_of
from mage_async.policy.weight_digest import is_scored, overall, probe_logprobs, tensor_digests
from mage_async.protocol.journal_records import Commit
from mage_async.results.run_directory import RunDirectory, checkpoint_at
from mage_async.results.summary import best_checkpoint
from mage_async.trajectory import Group
from mage_services.journal.export import trial_row
from mage_services.processes.process import append_lines
from mage_services.weights.weight_store import weights_file

if TYPE_CHECKING:
    from mage_async.inference.weight_fingerprint import AdapterBase
    from mage_services.learner.rank_writers import JoinedRank, SharedSnapshot


COPY = "a copy of the weights"
"""Subject of the error if the memory does not suffice for a publication, or for a checkpoint of
several ranks."""


class Training:
    """Train, copy and save the policy of a run.

    If the learner has several ranks, every rank has a `Training` for its shards of the model.
    Whatever computes on the model must run on every rank, so rank 0 sends an order to the other
    ranks first: `trainer` sends it before a forward or a step, `sharded` before it writes, and this
    class in all other cases. On the other ranks, which execute the orders (`RankWorker`), the same
    methods send nothing. `of` is called on every rank, after the order `Begin`.
    """

    def __init__(
        self,
        trainer: Trainer,
        run: RunDirectory,
        config: Config,
        counters: dict[str, Any],
        joined: "JoinedRank | None" = None,
    ) -> None:
        self.trainer = trainer
        self._ranks = joined.ranks if joined else None
        """Sends orders to the other ranks, on rank 0; drops them on the others; None on one rank.
        """
        self.sharded = joined.files(trainer) if joined else None
        """Writes the model's files if the model lies on several ranks; None on one rank."""
        self.num_published = 0
        """Number of versions that this process has copied for publication: the one that it began
        with, and that of each new step. Steps of the journal that it trained again do not count."""
        self._base: AdapterBase | None = None
        """The base that published adapters are added to; None before the first publication, and if
        whole weights are published."""
        self.counters = counters
        """Counters of the checkpoint that was loaded: `next_grant`, `train_s`, `totals`, and
        `digest` if several ranks wrote it. Empty without a checkpoint."""
        self.digests: dict[int, str] = {}
        """Digests of the weights by version, for each step that was read from the journal;
        `resume.py` fills it."""
        self.difference = ""
        """Sentence of `redo` about the first step whose weights differ from the journal's, if the
        run goes on nevertheless (on a GPU, or with another number of ranks); empty if none does.
        `resume.py` sets it."""
        self.run = run
        self.config = config
        """The run's own configuration; a step that is trained again sets its own in `trainer`."""

    @staticmethod
    def of(
        run: RunDirectory,
        config: Config,
        checkpoint: Path | None,
        joined: "JoinedRank | None" = None,
    ) -> "Training":
        """Load a checkpoint, or the run's prepared policy if `checkpoint` is None; with several
        ranks, on every rank at the same time.

        Raises:
            RunError: the checkpoint is not whole.
        """
        torch.set_num_threads(config.learner.threads)
        if is_on_gpu(config):
            # Each thread has its own current GPU. torch wants a number: "cuda" is GPU 0.
            torch.cuda.set_device(torch.device(config.learner.device).index or 0)
        model = load_trained(config, run.policy, checkpoint, device=loading_device(config))
        chat = load_chat(run.policy)
        ranks = joined.ranks if joined else None
        trainer = trainer_of(config, model, chat, ranks)
        counters = restore_checkpoint(trainer, checkpoint) if checkpoint else {}
        training = Training(trainer, run, config, counters, joined)
        if checkpoint:
            training.check_whole(checkpoint)
        # On rank 0 `adopt` also sends an order. The other ranks adopt this configuration here
        # themselves, so executing the order changes nothing.
        training.adopt(config)
        return training

    def check_whole(self, checkpoint: Path) -> None:
        """Compare the weights with the digest in a checkpoint that several ranks wrote. A
        checkpoint of a single rank has no digest.

        Raises:
            RunError: the weights have another digest.
        """
        # No order is sent: the other ranks call `Training.of` too, and so compute their digests.
        digest = self.counters.get("digest")
        if digest and digest != overall(self.own_digests()):
            raise RunError(
                f"{checkpoint}: not a whole checkpoint: its weights have another digest than its "
                "counters say; remove the folder"
            )

    def redo(self, committed: Committed, names: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
        """Train a step of the journal again.

        Args:
            names: the user's own classes that were edited since the step was trained.

        Returns:
            The metrics, and a sentence about the first tensor that differs from the committed
            weights; empty if none does.

        Raises:
            DeterministicFailure: trials of the step are missing.
        """
        commit = committed.commit
        if committed.groups is None:
            raise DeterministicFailure(
                f"step {commit.version}: the journal lacks trials that it trained"
            )
        self.adopt(config_file.loads(committed.config))
        metrics = self.step(committed.groups)
        digests = self._digests()
        if overall(digests) == commit.digest:
            return metrics, ""
        cause = "the cause may be another machine, library, or number of threads or ranks"
        if names:
            cause = (
                f"{', '.join(names)} was edited since: undo that, or begin a new run from the "
                f"newest checkpoint (`mage train --from {self.run.root}`)"
            )
        return metrics, (
            f"step {commit.version} computed again gives other weights, first in "
            f"{first_difference(commit, digests)}: {overall(digests)} instead of "
            f"{commit.digest}; {cause}"
        )

    def adopt(self, config: Config) -> None:
        """Train under another configuration from here on: a resumed run may have changed it."""
        self._send_order(Adopt(config_file.as_tables(config)))
        load_frozen_policies(self.trainer, config, self.run.policy)
        self.trainer.adopt(config)

    def commit(
        self, groups: Sequence[Group], time_s: float
    ) -> "tuple[Commit, Snapshot | SharedSnapshot]":
        """Return the journal's record of the step that was just trained, and a copy of its
        weights.

        Args:
            groups: the batch of the step.
            time_s: training time of the run so far, in seconds.
        """
        snapshot, digests = self.snapshot()
        commit = Commit(
            version=self.trainer.version,
            grants=tuple(group.grant for group in groups),
            digest=overall(digests),
            tensors=digests,
            time_s=time_s,
        )
        return commit, snapshot

    def step(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Train one batch and return its metrics.

        Raises:
            RunError: the memory did not suffice.
        """
        began = time.monotonic()
        with self.limited_memory():
            metrics = self.trainer.train(groups)
        trials = [trial for group in groups for trial in group.trials]
        of_methods = Methods(self.trainer.config).batch_metrics(trials)
        if both := metrics.keys() & of_methods.keys():
            raise DeterministicFailure(
                f"metric {min(both)!r} of a method has the name of a metric of every run: give it "
                "another name"
            )
        return metrics | of_methods | {"train_s": time.monotonic() - began}

    def limited_memory(self, what: str = "") -> AbstractContextManager[None]:
        """Return a context that turns a failed allocation of this run into an error with advice
        (`limited_memory` of this module).

        Args:
            what: What needs the memory; empty for the next step.
        """
        # The first version was published before the first new step.
        is_first = self.num_published < 2
        what = what or f"step {self.trainer.version + 1}"
        return limited_memory(what, self.trainer.config, self.run, is_first=is_first)

    def parity(self, groups: Sequence[Group]) -> dict[str, float]:
        """Compare the engine's log-probs with the learner's, for tokens sampled with the current
        weights.

        Returns:
            The metrics `logprob_mismatch_...`, in nats.
        """
        trainer = self.trainer
        sequences = training_sequences(
            groups, trainer.config, trainer.model.device, version=trainer.version
        )
        return trainer.parity(sequences)

    def snapshot(self) -> "tuple[Snapshot | SharedSnapshot, dict[str, str]]":
        """Copy the current weights, to be published while the next step is trained, and compute
        the digest of each tensor.

        Some versions are scored: their copy also has the learner's log-probs of a few fixed tokens,
        the probe tokens, with which engines compare their own.
        """
        version, is_sent = self.trainer.version, self.trainer.config.transport.weights.is_sent
        # Embedded engines compare checksums of the weights' rows, which only the snapshot of a
        # single rank has; versions with such checksums are scored less often.
        has_rows = isinstance(self.trainer.config.engine, Embedded) and not self.sharded
        is_due = is_scored(version, has_row_checksums=has_rows)
        # Weights sent to process groups are always scored: the engines have no digests to compare.
        with_logprobs = is_due or is_sent or not self.num_published
        self.num_published += 1
        model = self.trainer.model
        if self._base is None and publishes_adapters(self.config):
            self._base = base_of(model)
        if not self.sharded:
            with self.limited_memory(COPY):
                logprobs = probe_logprobs(model) if with_logprobs else None
                return Snapshot.of(model, version, logprobs, self._base), tensor_digests(model)
        digests, logprobs = self._digests(), None
        if with_logprobs:
            with self.trainer.read(num_forwards=1) as model:
                logprobs = probe_logprobs(model)
        file = weights_file(self.config.transport.weights.folder(self.run), version)
        with self.limited_memory(COPY):
            return self.sharded.snapshot(file, logprobs), digests

    def digest(self) -> str:
        """Return the digest of the current weights, as a commit records it."""
        return overall(self._digests())

    def own_digests(self) -> dict[str, str]:
        """Return the digest of each tensor, by name. If there are several ranks, all must call it
        at the same time.
        """
        if self.sharded:
            return self.sharded.digests()
        return tensor_digests(self.trainer.model)

    def _digests(self) -> dict[str, str]:
        """Return the digest of each tensor, after an order to the other ranks to compute theirs."""
        self._send_order(Digest())
        return self.own_digests()

    def _send_order(self, order: Order) -> None:
        """Send an order to the other ranks, if there are any; a rank other than 0 sends nothing."""
        if self._ranks:
            self._ranks.send_all(order)

    def checkpoint(self, counters: dict[str, Any]) -> "Future[Path]":
        """Write a checkpoint of the current version, unless there is one.

        Returns:
            A future of the checkpoint's folder, done once the checkpoint is durable. With one rank
            it is done already; several ranks write while the next steps are trained.

        Raises:
            RunError: the checkpoint cannot be written.
        """
        folder, trainer, policy = self.run.checkpoints, self.trainer, self.run.policy
        written, present = Future[Path](), checkpoint_at(folder, trainer.version)
        if present.exists():  # it is whole; to write it again would put it at risk
            written.set_result(present)
            return written
        best = best_checkpoint(self.run, self.config)
        kept = best.path if best else None
        if self.sharded:
            digest = self.digest()
            with self.limited_memory(COPY):
                return self.sharded.checkpoint(policy, folder, counters, kept, digest)
        with writing(f"a checkpoint to {folder}"):
            written.set_result(save_checkpoint(trainer, policy, folder, counters, kept))
        return written

    def record(self, file: Path, line: dict[str, Any]) -> None:
        """Append one line of JSON to a file.

        Raises:
            RunError: the line cannot be written.
        """
        with writing(f"a line to {file}"):
            append_lines(file, [line])

    def sample(self, groups: Sequence[Group], version: int) -> None:
        """Write the first trial of a step as text."""
        chat = load_chat(self.run.policy)
        step = JournalStep(version, groups, self.trainer.config, is_whole=True)
        row = trial_row(next(attributed(step, chat.decode)), chat)
        self.record(self.run.samples, row | {"version": version})


@contextmanager
def limited_memory(
    what: str, config: Config, run: RunDirectory, *, is_first: bool
) -> Iterator[None]:
    """Turn a failed allocation within the context into an error that names the keys to change.

    Args:
        what: Subject of the error's sentence, such as "step 3".
        is_first: Whether this process has trained no new step yet.

    Raises:
        DeterministicFailure: `is_first`, so a restarted process would fail in the same way.
        RunError: earlier steps fitted, so a restart may help: it gives back fragmented memory.
    """
    try:
        yield
    # A failed allocation in a user's own loss arrives as a `ConfigError` with torch's text.
    except (RuntimeError, MemoryError, ConfigError) as error:
        # torch raises an error class of its own only for some allocations on a GPU; otherwise only
        # the text of the error tells.
        is_full = isinstance(error, MemoryError) or any(
            phrase in str(error) for phrase in ("out of memory", "can't allocate memory")
        )
        if not is_full:
            raise
        kind = DeterministicFailure if is_first else RunError
        raise kind(
            f"{what} does not fit into the memory of {config.learner.device} "
            f"({first_line(error)}): {less_memory(config)}. Keys of [learner] can be changed by "
            f"`{run.resume_command} --set KEY=VALUE`, those of [policy] for a new run"
        ) from error


def less_memory(config: Config) -> str:
    """Return a clause that names the keys by which a step needs less memory."""
    learner, longest = config.learner, config.engine.max_tokens
    budget, ways = learner.max_tokens_per_microbatch, list[str]()
    if not learner.correction.needs_whole_minibatch and not 0 < budget <= longest:
        now = f"{budget:,}" if budget else "0, no bound"
        ways.append(
            f"set learner.max_tokens_per_microbatch = {longest} (it is {now}), so that fewer "
            "trials are computed at a time"
        )
    if not learner.activation_checkpointing:
        ways.append("set learner.activation_checkpointing = true")
    if config.policy.lora is None:
        ways.append("train adapters (policy.lora.rank = 16)")
    place = "GPU" if is_on_gpu(config) else "machine"
    ways.append(f"let no other program use the memory of this {place}, or take a larger one")
    return "; ".join(ways)


def is_on_gpu(config: Config) -> bool:
    """Return whether the learner computes on a GPU."""
    return torch.device(config.learner.device).type == "cuda"


class TrainerThread:
    """Run the learner's computations in one thread, one call after the other."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    async def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run `work` in the thread, and return its result. If cancelled, work that has begun is
        finished.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def close(self) -> None:
        """End the thread; calls that have not begun are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
