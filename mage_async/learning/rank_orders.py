"""Declare the orders that rank 0 of a learner sends to the other ranks.

All ranks take part in every forward and in every sum of gradients, so all must do the same things
in the same order. Rank 0 decides what comes next, and sends it to the others as an order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Load the policy and shard it."""

    tables: dict[str, Any]
    """The configuration, as `config_file.as_tables` returns it."""
    checkpoint: str
    """Folder of the checkpoint; empty at the beginning of a run."""


class Adopt(msgspec.Struct, frozen=True, tag=True):
    """Train under another configuration from the next step on."""

    tables: dict[str, Any]
    """The configuration, as in `Begin`."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """Train on a share of a batch."""

    shares: list[bytes]
    """The rank's share of each minibatch, as `ranked_trainer.to_bytes` encodes it."""
    num_micro_batches: list[int]
    """Micro-batches of each minibatch; the same number for all ranks."""
    scale: float
    """Factor of every token's loss; the same for all ranks."""


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Take part in `num_forwards` forwards of rank 0, which need the shards of all ranks."""

    num_forwards: int


class Digest(msgspec.Struct, frozen=True, tag=True):
    """Add up the rank's shard of the weights: the sums of all ranks give the weights' digests."""


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Copy the rank's shard of the weights, and write it into `file` while training goes on."""

    file: str
    start: int
    """Offset in bytes at which the tensors of the whole model begin in the file, the same for all
    ranks."""


class Save(msgspec.Struct, frozen=True, tag=True):
    """Copy the rank's part of a checkpoint, and write it into `folder` while training goes on."""

    folder: str
    start: int
    """Offset in bytes at which the tensors of the whole model begin in the checkpoint's file of
    weights, the same for all ranks."""


Order = Begin | Adopt | Step | Forward | Digest | Publish | Save


@dataclass(frozen=True, slots=True)
class Ranks:
    """Describe this process as one of a learner's ranks, which torch.distributed has connected."""

    number: int
    """Number of this process, from 0."""
    count: int
    """Number of all ranks."""
    device_type: str
    """"cpu" or "cuda", the same on every rank."""
    send: Callable[[Sequence[Order]], None]
    """Send each other rank its order, by ascending rank; on another rank this does nothing."""

    def send_all(self, order: Order) -> None:
        """Send all other ranks the same order."""
        self.send([order] * (self.count - 1))
