"""The weights of a model that lies on several ranks: digested where they are, and written as one
safetensors file by all ranks together.

Each rank copies its shard of every tensor, and writes the copy to where it belongs in the file. So
a rank holds an Nth of the weights beside the model, and nobody gathers them. The tensors of the
file are those that one process would write, byte for byte.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed
from transformers import PreTrainedModel

from mage_async.learning.adapters import trained_tensors
from mage_async.learning.ranks.sharding import own_part, whole
from mage_async.policy.beside_training import on_host
from mage_async.policy.places import Place, places_of
from mage_async.policy.snapshot import published_tensors
from mage_async.policy.weight_digest import Method, bytes_digest, sum_digests, word_sum


def sharded_digests(model: PreTrainedModel, method: Method) -> dict[str, str]:
    """`weight_digest.tensor_digests` of a sharded model, by all ranks together. A `blake2b`, as old
    journals have it, makes one tensor after the other whole.
    """
    tensors = {name: tensor.detach() for name, tensor in trained_tensors(model).items()}
    if method == "blake2b":
        return {name: bytes_digest(name, whole(one)) for name, one in tensors.items()}
    sums = torch.stack([_own_sum(tensor) for tensor in tensors.values()])
    distributed.all_reduce(sums)
    return sum_digests(tensors, sums)


def _own_sum(tensor: torch.Tensor) -> torch.Tensor:
    first, part = own_part(tensor)
    return word_sum(part, first)


def file_places(model: PreTrainedModel) -> tuple[Place, ...]:
    """Where the tensors of a model lie in a file."""
    return tuple(places_of(published_tensors(model)))


def write_head(file: Path, head: bytes) -> None:
    """Write the head of a file whose tensors are there."""
    _write_at(file, [(0, memoryview(head))])


def mapped(file: Path, places: tuple[Place, ...], start: int) -> torch.Tensor:
    """The tensors of a file without its head, mapped, not read: uint8 [bytes]"""
    size = start + places[-1].end
    return torch.from_file(str(file), size=size, dtype=torch.uint8)[start:]


@dataclass(frozen=True, slots=True, eq=False)
class WeightShards:
    """A rank's shards of all tensors; the model may change from here on."""

    pieces: tuple[tuple[int, int], ...]
    """Of each shard, where it belongs among the tensors of the file, and its size: bytes."""
    data: torch.Tensor
    """uint8 [bytes], on the model's device: one shard after the other"""
    made: torch.cuda.Event | None = None
    """Happens when `data` holds the weights; None where the model is not on a GPU."""

    @staticmethod
    @torch.no_grad()
    def of(model: PreTrainedModel, places: tuple[Place, ...]) -> "WeightShards":
        """Copy this rank's shards out of a model.

        Args:
            places: those of `file_places`.
        """
        tensors, pieces, parts = published_tensors(model), [], []
        for place in places:
            first, part = own_part(tensors[place.name])
            if part.numel():
                start = place.start + first * part.element_size()
                pieces.append((start, part.numel() * part.element_size()))
                parts.append(part.detach().contiguous().reshape(-1).view(torch.uint8))
        data = torch.cat(parts)
        made = torch.cuda.current_stream(data.device).record_event() if data.is_cuda else None
        return WeightShards(tuple(pieces), data, made)

    def write(self, file: Path, start: int) -> None:
        """Write the shards into a file whose tensors begin at `start`, while other ranks do."""
        data = memoryview(on_host(self.data, self.made).numpy())
        written, pieces = 0, []
        for place, size in self.pieces:
            pieces.append((start + place, data[written : written + size]))
            written += size
        _write_at(file, pieces)


def _write_at(file: Path, pieces: list[tuple[int, memoryview]]) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
    with os.fdopen(descriptor, "wb") as out:
        for place, data in pieces:
            out.seek(place)
            out.write(data)
