"""Write publications and checkpoints of a model that is sharded over several ranks.

Every rank copies its shards, which is fast, and writes the copies while the next steps are trained.
All ranks write the weights into the same file, each at the offsets of its shards.
"""

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from msgspec.structs import replace
from torch import distributed
from torch.distributed import ProcessGroup

from mage_async.errors import DiskFull, RunError
from mage_async.inference.weight_fingerprint import WeightFingerprint
from mage_async.learning.rank_orders import Publish, Ranks, Save
from mage_async.learning.trainer import Trainer
from mage_async.policy.checkpoint import STATE, complete_checkpoint, new_checkpoint
from mage_async.policy.full_disk import writing
from mage_async.policy.load import WEIGHTS, export_without_weights
from mage_async.policy.sharded_files import (
    WeightShards,
    copied_state,
    file_places,
    mapped,
    sharded_digests,
    write_head,
    write_state,
)
from mage_async.policy.snapshot import Place, fingerprint_of, head_of, part_of
from mage_async.results.run_directory import SHARDS

T = TypeVar("T")


class RankGone(Exception):
    """Another rank has ended; `RankProcesses.watch` reports which one, and how."""


class WriterThread:
    """Write this rank's part of a file in a thread, while the training goes on.

    Every rank has a thread for publications and one for checkpoints, so that neither waits for the
    other. All ranks must create their threads in the same order, because each creates a process
    group. The publishing threads of all ranks work together, and so do the checkpoint threads: they
    get the same pieces of work in the same order, and a piece is done when all ranks have done
    their part.
    """

    def __init__(self, name: str) -> None:
        # A process group of its own, so that its barrier meets the same thread of other ranks only.
        self._group = distributed.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def begin(
        self, what: str, work: Callable[[ProcessGroup], None], then: Callable[[], T]
    ) -> "Future[T]":
        """Do this rank's part in the thread, and call `then` when all ranks have done theirs.

        Args:
            what: What is written, for the message of an error.
            work: This rank's part, called with the process group of these threads.

        Returns:
            The result of `then`. Its `result()` raises RunError if a file cannot be written, and
            RankGone if a rank has ended.
        """

        def write_together() -> T:
            try:
                with writing(what):
                    self._do_together(work)
                    return then()
            # The learner would repeat its own part after a DiskFull, but no other rank would.
            except DiskFull as full:
                raise RunError(str(full)) from full

        return self._thread.submit(write_together)

    def _do_together(self, work: Callable[[ProcessGroup], None]) -> None:
        """Do this rank's part, and wait until all ranks have done theirs.

        Raises:
            RankGone: a rank has ended.
        """
        try:
            work(self._group)
            distributed.barrier(group=self._group)
        except RuntimeError as error:  # a lost connection; a file raises OSError instead
            raise RankGone(str(error)) from error


@dataclass(frozen=True, slots=True)
class JoinedRank:
    """Hold this rank's connection to the other ranks, and its two writer threads."""

    ranks: Ranks
    publishing: WriterThread
    saving: WriterThread

    @classmethod
    def of(cls, ranks: Ranks) -> Self:
        """Create the writer threads of this rank. All ranks must call it at the same time."""
        return cls(ranks, WriterThread("publish"), WriterThread("checkpoint"))

    def files(self, trainer: Trainer) -> "ShardedFiles":
        """Return the writer of a sharded model's files."""
        return ShardedFiles(trainer, self)


NO_DIGEST = "0" * 16
"""Placeholder for a digest that is not known yet; as long as a digest."""


@dataclass(frozen=True, eq=False)
class SharedSnapshot:
    """Give access to the weights of one version while all ranks write them, with the methods of a
    `Snapshot`.
    """

    version: int
    places: tuple[Place, ...]
    start: int
    """Offset of the tensors in the file, in bytes."""
    logprobs: list[float]
    """Log-probs of the probe tokens, in nats, with which an engine checks the weights that it has
    loaded; empty for a version that is published without them."""
    file: Path
    """Where the weights are published."""
    written: "Future[None]"
    """Done once all ranks have written their shards; its `result()` raises as `WriterThread.begin`
    says."""
    ready: None = None
    """Always None, because `data` itself waits. (A `Snapshot` may have an event here that is set
    once its `data` may be read.)"""

    @property
    def data(self) -> torch.Tensor:
        """The bytes of all tensors, a memory-mapped uint8 tensor [bytes]. Waits for all ranks.

        Raises:
            RankGone: a rank has ended.
        """
        self.written.result()
        working = part_of(self.file)  # the file's name until `write` has renamed it
        return mapped(working if working.exists() else self.file, self.places, self.start)

    def fingerprint(self) -> WeightFingerprint:
        """Return the fingerprint, without row checksums. Waits for all ranks."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> WeightFingerprint:
        # Cached: computing it may read all tensors, and it is written twice, in the file and in a
        # manifest.
        return fingerprint_of(self.version, self.places, self.data, self.logprobs)

    def write(self, file: Path) -> None:
        """Wait for all ranks, then write the file's header and give the file its final name.

        If `file` is not the path that the ranks wrote to, it becomes a copy.

        Raises:
            RankGone: a rank has ended.
        """
        self.written.result()
        working = part_of(self.file)
        if working.exists():
            head = head_of(self.places, self.fingerprint())
            assert len(head) == self.start
            write_head(working, head)
            working.chmod(0o644)
            working.replace(self.file)
        if file != self.file:
            working = part_of(file)
            shutil.copyfile(self.file, working)
            working.replace(file)


class ShardedFiles:
    """Write the files of a sharded model, on every rank.

    Rank 0 calls `snapshot` and `checkpoint`, which send the others an order; these then call
    `publish` and `save` with it.
    """

    def __init__(self, trainer: Trainer, joined: JoinedRank) -> None:
        self._trainer, self._joined = trainer, joined

    def digests(self) -> dict[str, str]:
        """Return the digest of each tensor. All ranks must call it at the same time."""
        return sharded_digests(self._trainer.model)

    def snapshot(self, file: Path, logprobs: torch.Tensor | None) -> SharedSnapshot:
        """Begin to write the current weights on all ranks.

        Args:
            file: Where they will be published.
            logprobs: Log-probs of the probe tokens, float32 [probe tokens - 1], in nats; None if
                the version is published without them.
        """
        trainer, places = self._trainer, file_places(self._trainer.model)
        scored = [] if logprobs is None else logprobs.tolist()
        fingerprint = fingerprint_of(trainer.version, places, None, scored)  # not written yet
        digests = {place.name: NO_DIGEST for place in places}
        # The tensors are written before their digests are known. A header of the final length says
        # at which offset they begin. The fingerprint of a scored version has a digest of each
        # tensor, that of any other version a single digest of sampled bytes (`fingerprint_of`).
        if scored:
            draft = replace(fingerprint, tensors=digests)
        else:
            draft = replace(fingerprint, sample=NO_DIGEST)
        start = len(head_of(places, draft))
        part_of(file).unlink(missing_ok=True)
        order = Publish(str(part_of(file)), start)
        self._joined.ranks.send_all(order)
        return SharedSnapshot(trainer.version, places, start, scored, file, self.publish(order))

    def publish(self, order: Publish) -> "Future[None]":
        """Write this rank's shards of the weights into the ordered file."""
        file, model = Path(order.file), self._trainer.model
        shards = WeightShards.of(model, file_places(model))
        return self._joined.publishing.begin(
            f"weights to {file}", lambda _: shards.write(file, order.start), lambda: None
        )

    def checkpoint(
        self,
        chat_source: Path,
        folder: Path,
        counters: dict[str, Any],
        best: Path | None,
        digest: str,
    ) -> "Future[Path]":
        """Begin a checkpoint of the current version on all ranks; returns its folder once durable.

        Args:
            chat_source: Model directory whose tokenizer and chat template are copied.
            folder: Folder of all checkpoints of the run.
            counters: Counters that the checkpoint keeps for the learner (`Training.counters`).
            best: A checkpoint that is kept in addition to the newest ones.
            digest: Digest of the weights, by which a reader checks that they are whole.
        """
        trainer = self._trainer
        with writing(f"a checkpoint to {folder}"):
            working = new_checkpoint(folder, trainer.version)
            head = head_of(file_places(trainer.model))
            export_without_weights(trainer.model, chat_source, working)
            write_head(working / WEIGHTS, head)
        content = counters | {
            "version": trainer.version,
            STATE: trainer.optimizer_state,
            "digest": digest,
        }
        num_kept = trainer.config.learner.keep_checkpoints
        order = Save(str(working), len(head))
        self._joined.ranks.send_all(order)
        return self.save(order, lambda: complete_checkpoint(working, content, num_kept, best))

    def save(self, order: Save, then: Callable[[], T]) -> "Future[T]":
        """Write this rank's shards of weights and optimizer state into the ordered folder.

        Args:
            then: Called once all ranks have written their shards; the future gets its result.
        """
        folder, model = Path(order.folder), self._trainer.model
        # In host memory: on a GPU the copies would double the weights, masters and moments.
        shards = WeightShards.of(model, file_places(model), "cpu")
        state = copied_state(self._trainer)

        def write(group: ProcessGroup) -> None:
            # torch.distributed.checkpoint uses the thread's current GPU, by default rank 0's, on
            # which every rank would take memory for a CUDA context.
            if model.device.type == "cuda":
                torch.cuda.set_device(model.device)
            shards.write(folder / WEIGHTS, order.start)
            write_state(state, folder / SHARDS, group)

        return self._joined.saving.begin(f"a checkpoint to {folder}", write, then)
