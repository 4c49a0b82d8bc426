"""Write and read files of a model that is sharded over several ranks: published weights,
checkpoints.

All ranks write one safetensors file of weights together: each copies its shard of every tensor and
writes the copy to the shard's place in the file. So no rank gathers the weights, and a rank needs
memory for one shard. The file's tensors are, byte for byte, those that one process would write.

The optimizer's moments and the float32 masters of a checkpoint are written and read by
torch.distributed.checkpoint: each rank writes its shards into a safetensors file of its own, which
states their places in the whole tensors. So a checkpoint can be read by another number of ranks, of
which each reads its own part alone.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import torch
from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedModel

from mage_async.errors import RunError
from mage_async.learning.lora import trained_tensors
from mage_async.learning.ranked_trainer import own_part
from mage_async.learning.trainer import Trainer
from mage_async.policy.snapshot import Place, on_host, places_of, published_tensors
from mage_async.policy.weight_digest import sum_digests, word_sum


def sharded_digests(model: PreTrainedModel) -> dict[str, str]:
    """Compute `weight_digest.tensor_digests` of a sharded model; all ranks call it together."""
    tensors = {name: tensor.detach() for name, tensor in trained_tensors(model).items()}
    parts = map(own_part, tensors.values())
    sums = torch.stack([word_sum(part, num_before) for num_before, part in parts])
    distributed.all_reduce(sums)
    return sum_digests(tensors, sums)


def file_places(model: PreTrainedModel) -> tuple[Place, ...]:
    """Return the place of each published tensor in a safetensors file, from the header's end on."""
    return tuple(places_of(published_tensors(model)))


def write_head(file: Path, head: bytes) -> None:
    """Write the header of a safetensors file whose tensors are written already."""
    _write_at(file, [(0, memoryview(head))])


def mapped(file: Path, places: tuple[Place, ...], start: int) -> torch.Tensor:
    """Map the tensors of a written file into memory, so that their digests are computed from the
    bytes on disk: uint8 [bytes], without the header.

    Args:
        start: Offset in bytes at which the tensors begin, after the header.
    """
    size = start + places[-1].end
    return torch.from_file(str(file), size=size, dtype=torch.uint8)[start:]


@dataclass(frozen=True, slots=True, eq=False)
class WeightShards:
    """Hold a copy of one rank's shards of all published tensors."""

    pieces: tuple[tuple[int, int], ...]
    """Offset of each shard among the file's tensors, and its size, in bytes."""
    data: torch.Tensor
    """All shards, one after the other: uint8 [bytes]."""
    ready: torch.cuda.Event | None = None
    """Event that is set once `data` holds the weights; None if `data` is not on a GPU."""

    @staticmethod
    @torch.no_grad()
    def of(
        model: PreTrainedModel, places: tuple[Place, ...], device: str | None = None
    ) -> "WeightShards":
        """Copy this rank's shards out of a model.

        Args:
            places: Places that `file_places` returns.
            device: Where the copy lies; None for the model's device.
        """
        tensors, pieces, parts = published_tensors(model), [], []
        for place in places:
            num_before, part = own_part(tensors[place.name])  # elements before the shard
            if part.numel():
                start = place.start + num_before * part.element_size()
                pieces.append((start, part.numel() * part.element_size()))
                part = part.detach().to(device or part.device)
                parts.append(part.contiguous().reshape(-1).view(torch.uint8))
        data = torch.cat(parts)
        ready = torch.cuda.current_stream(data.device).record_event() if data.is_cuda else None
        return WeightShards(tuple(pieces), data, ready)

    def write(self, file: Path, start: int) -> None:
        """Write the shards into a file whose tensors begin at byte `start`.

        Other ranks may write their shards to the same file at the same time.
        """
        parts = on_host(self.data, self.ready).split([size for _, size in self.pieces])
        starts = [start + place for place, _ in self.pieces]
        _write_at(file, [*zip(starts, (memoryview(each.numpy()) for each in parts), strict=True)])


def _write_at(file: Path, pieces: list[tuple[int, memoryview]]) -> None:
    """Write pieces of data at their offsets, in bytes."""
    # Not `open(file, "wb")`, which would truncate what other ranks have written.
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
    with os.fdopen(descriptor, "wb") as out:
        for place, data in pieces:
            out.seek(place)
            out.write(data)


MASTER = "master"
"""Prefix of the names of float32 masters, as in `master.0`. A moment is named by the number of its
weight and the optimizer's key, as in `0.exp_avg`.
"""


def named_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the trainer's masters and moments by name, the tensors themselves and no copies;
    before the first update the moments are zeros.
    """
    masters = {f"{MASTER}.{n}": each for n, each in enumerate(trainer.masters.tensors())}
    # The count of updates has no dimensions; files hold it as a tensor of one element. That view
    # shares memory with the count, so `read_state` fills the count itself.
    moments = {
        f"{number}.{key}": value.view(1) if value.dim() == 0 else value
        for number, weight in enumerate(trainer.masters.trained)
        for key, value in _moments(trainer.optimizer, weight).items()
    }
    return masters | moments


def copied_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return a copy of `named_state` in host memory, so that training can continue while the copy
    is written.
    """
    # torch.distributed.checkpoint would queue its copies from the GPU after the kernels of the next
    # step, and would synchronise with the writing thread's current GPU, which may be another
    # rank's.
    return {
        name: tensor.detach().to("cpu", copy=True) for name, tensor in named_state(trainer).items()
    }


def write_state(state: dict[str, torch.Tensor], folder: Path, group: ProcessGroup) -> None:
    """Write this rank's shards of a checkpoint; all ranks call it together.

    Raises:
        OSError: a rank cannot write.
        RuntimeError: another rank has ended.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(state, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {reason}") from error


def read_state(trainer: Trainer, folder: Path) -> None:
    """Restore the state that any number of ranks has written; each rank reads its own part.

    Raises:
        RunError: only one of the checkpoint and the trainer has float32 masters.
        OSError: the checkpoint is incomplete.
    """
    reader, present = HuggingFaceStorageReader(str(folder)), named_state(trainer)
    saved = reader.read_metadata().state_dict_metadata
    num_saved, num_present = (
        sum(name.startswith(MASTER) for name in names) for names in (saved, present)
    )
    # A checkpoint without any state lacks its files, which is reported below.
    if saved and bool(num_saved) != bool(num_present):
        raise RunError(
            f"the checkpoint has {num_saved} float32 masters, the model {num_present}: leave "
            "learner.float32_masters as it was"
        )
    # PyTorch raises no error for elements that no file holds, and would not change them.
    incomplete = [
        name
        for name, tensor in present.items()
        if name not in saved or _num_elements(saved[name]) < math.prod(tensor.shape)
    ]
    if incomplete:
        raise OSError(
            f"{folder} lacks files: {len(incomplete)} of the {len(present)} tensors of the "
            f"optimizer are not whole, such as {incomplete[0]!r}"
        )
    try:
        # `no_dist` lets each rank read alone; PyTorch warns of it in every call.
        with catch_warnings(action="ignore", category=UserWarning):
            load(present, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise OSError(f"{folder}: {error}") from error


def _num_elements(saved: STORAGE_TYPES) -> int:
    """Return how many elements of a tensor the files of a checkpoint hold."""
    assert isinstance(saved, TensorStorageMetadata), "the files hold nothing but tensors"
    # If several ranks hold the whole tensor, the files may hold it several times.
    shards = {(chunk.offsets, chunk.sizes) for chunk in saved.chunks}
    return sum(math.prod(sizes) for _, sizes in shards)


def _moments(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> dict[str, Any]:
    """Return the optimizer's state of a weight; before the first update, fill it with AdamW's
    zeros.
    """
    state: dict[str, Any] = optimizer.state[weight]
    if not state:
        # The zeros are stored in the optimizer, so that `read_state` can load into them.
        # AdamW keeps the number of updates on the GPU only where it is fused.
        device = weight.device if optimizer.param_groups[0].get("fused") else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        state["exp_avg"] = torch.zeros_like(weight)
        state["exp_avg_sq"] = torch.zeros_like(weight)
    return state
