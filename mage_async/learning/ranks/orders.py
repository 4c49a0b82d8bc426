"""What rank 0 tells the other ranks of a learner, the followers, to do along with it.

All ranks take part in every product of weights and in every sum of gradients, so each does the same
things in the same order; orders say which.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Load the policy, and shard it."""

    config: str
    """The configuration, in TOML."""
    checkpoint: str
    """Its folder; empty where the run begins."""


class Adopt(msgspec.Struct, frozen=True, tag=True):
    """Train under another configuration from here on."""

    config: str


class Step(msgspec.Struct, frozen=True, tag=True):
    """Train a share of a batch."""

    shares: list[bytes]
    """A minibatch each, as `shares.packed` makes them."""
    num_passes: list[int]
    """How many passes every rank makes of each minibatch."""
    scale: float
    """What the loss of a token is multiplied with: the same for all ranks."""


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Lend the weights to forwards of rank 0."""

    num_forwards: int


class Digest(msgspec.Struct, frozen=True, tag=True):
    """Take part in a digest of the weights."""

    method: Literal["blake2b", "sum64"]


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Copy the own shard of the weights, and write it beside the training."""

    file: str
    start: int
    """Where the file's tensors begin, in bytes."""


class Save(msgspec.Struct, frozen=True, tag=True):
    """Copy all that a checkpoint keeps of this rank, and write it beside the training."""

    folder: str
    start: int
    """Where the tensors of its file of weights begin, in bytes."""


Order = Begin | Adopt | Step | Forward | Digest | Publish | Save


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process among the ranks of a learner, which torch.distributed has joined."""

    number: int
    count: int
    device_type: str
    """Of every rank: "cpu" or "cuda"."""
    tell: Callable[[Sequence[Order]], None]
    """Give every follower its order, in the order of their numbers; of a follower it does
    nothing.
    """

    def tell_all(self, order: Order) -> None:
        """Give all followers the same order."""
        self.tell([order] * (self.count - 1))
