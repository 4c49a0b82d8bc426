"""What is written of a model that lies on several ranks: a publication, and a checkpoint.

Each rank copies its shards, which takes a moment, and writes the copies beside the training.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from msgspec.structs import replace
from torch.distributed import ProcessGroup

from mage_async.inference.receipts.receipt import Receipt
from mage_async.learning.ranks.orders import Publish, Save
from mage_async.learning.trainer import Trainer
from mage_async.policy.checkpoint import SHARDS, STATE, begun, completed, writing
from mage_async.policy.load import WEIGHTS, export_without_weights
from mage_async.policy.places import Place, head_of
from mage_async.policy.shards.state import copied_state, write_state
from mage_async.policy.shards.weights import (
    WeightShards,
    file_places,
    mapped,
    sharded_digests,
    write_head,
)
from mage_async.policy.snapshot import part_of, receipt_of
from mage_async.policy.weight_digest import Method
from mage_services.learner.ranks.beside import Joined

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")
NO_DIGEST = "0" * 16
"""In the place of a digest, until the tensors are written."""


@dataclass(frozen=True, eq=False)
class SharedSnapshot:
    """The weights of one version, which all ranks are writing; it takes a `Snapshot`'s place."""

    version: int
    places: tuple[Place, ...]
    start: int
    """Where the file's tensors begin, in bytes."""
    logprobs: list[float]
    """Of the check tokens, in nats; empty: not scored."""
    file: Path
    """Where the ranks write it."""
    written: "Future[None]"
    made: None = None
    """What is in a file is there."""

    @property
    def data(self) -> torch.Tensor:
        """The tensors, mapped: uint8 [bytes]. Waits for all ranks.

        Raises:
            RankGone: a rank has ended.
        """
        self.written.result()
        working = part_of(self.file)
        return mapped(working if working.exists() else self.file, self.places, self.start)

    def receipt(self) -> Receipt:
        """As of a `Snapshot`, without spots. Waits for all ranks."""
        return self._receipt

    @cached_property
    def _receipt(self) -> Receipt:
        """It may read all bytes, and stands both in the file and in a manifest."""
        return receipt_of(self.version, self.places, self.data, self.logprobs)

    def write(self, file: Path) -> None:
        """Wait for all ranks, and give the file its head and its name; another file is a copy.

        Raises:
            RankGone: a rank has ended.
        """
        self.written.result()
        if part_of(self.file).exists():
            self._complete()
        if file != self.file:
            working = part_of(file)
            shutil.copyfile(self.file, working)
            working.replace(file)

    def _complete(self) -> None:
        head = published_head(self.places, self.version, self.receipt().text())
        assert len(head) == self.start
        working = part_of(self.file)
        write_head(working, head)
        working.chmod(0o644)
        working.replace(self.file)


def published_head(places: tuple[Place, ...], version: int, receipt: str) -> bytes:
    """What stands before the tensors of a published file."""
    return head_of(places, version=str(version), receipt=receipt)


class ShardedFiles:
    """One rank's part in that. Rank 0 begins it, and tells the others; they do as it says."""

    def __init__(self, trainer: Trainer, joined: Joined) -> None:
        self._trainer, self._joined = trainer, joined

    def digests(self, method: Method) -> dict[str, str]:
        """Digests of all tensors, by all ranks at once."""
        return sharded_digests(self._trainer.model, method)

    def snapshot(self, file: Path, logprobs: torch.Tensor | None) -> SharedSnapshot:
        """Begin to write the weights of this version.

        Args:
            file: where they will be published.
            logprobs: float32 [check tokens - 1], by this very model; None: not scored
        """
        trainer, places = self._trainer, file_places(self._trainer.model)
        scored = [] if logprobs is None else logprobs.tolist()
        receipt = receipt_of(trainer.version, places, None, scored)
        digests = {place.name: NO_DIGEST for place in places}
        draft = replace(receipt, **({"tensors": digests} if scored else {"sample": NO_DIGEST}))
        start = len(published_head(places, trainer.version, draft.text()))
        part_of(file).unlink(missing_ok=True)
        order = Publish(str(part_of(file)), start)
        self._joined.ranks.tell_all(order)
        return SharedSnapshot(trainer.version, places, start, scored, file, self.publish(order))

    def publish(self, order: Publish) -> "Future[None]":
        """Write this rank's shards of the weights into a file."""
        file, model = Path(order.file), self._trainer.model
        shards = WeightShards.of(model, file_places(model))
        return self._joined.publishing.begin(
            f"weights to {file}", lambda _: shards.write(file, order.start), lambda: None
        )

    def checkpoint(
        self, chat_source: Path, folder: Path, counters: dict[str, Any], keep: int, digest: str
    ) -> "Future[Path]":
        """Begin a checkpoint of this version; its folder, when it is durable.

        Args:
            digest: of the weights, by which whoever reads them knows that they are whole.
        """
        trainer = self._trainer
        with writing(f"a checkpoint to {folder}"):
            working, head = begun(folder, trainer.version), head_of(file_places(trainer.model))
            export_without_weights(trainer.model, chat_source, working)
            write_head(working / WEIGHTS, head)
        kept = {"version": trainer.version, STATE: trainer.optimizer_state, "digest": digest}
        order = Save(str(working), len(head))
        self._joined.ranks.tell_all(order)
        return self.save(order, lambda: completed(working, counters | kept, keep))

    def save(self, order: Save, then: Callable[[], T]) -> "Future[T]":
        """Write this rank's shards of all that a checkpoint keeps."""
        folder, model = Path(order.folder), self._trainer.model
        shards, state = WeightShards.of(model, file_places(model)), copied_state(self._trainer)

        def write(group: ProcessGroup) -> None:
            shards.write(folder / WEIGHTS, order.start)
            write_state(state, folder / SHARDS, group)

        return self._joined.saving.begin(f"a checkpoint to {folder}", write, then)
