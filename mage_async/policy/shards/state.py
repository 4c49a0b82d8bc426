"""What a checkpoint of ranks keeps beside the weights: the optimizer's moments, and masters. It is
written and read by torch.distributed.checkpoint.

Each rank writes its shards into a safetensors file of its own, which says where in the whole
tensors they lie. So any number of ranks reads what any other has written, each rank its part alone.
"""

from pathlib import Path
from typing import Any
from warnings import catch_warnings

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from mage_async.errors import RunError
from mage_async.learning.trainer import Trainer

MASTER = "master"
"""How names of masters begin; a moment is `NUMBER.KEY`."""


def named_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The trainer's own tensors by name; moments are zeros before the first update."""
    masters = {f"{MASTER}.{n}": each for n, each in enumerate(trainer.masters.tensors())}
    moments = {
        f"{number}.{key}": value.view(1) if value.dim() == 0 else value
        for number, weight in enumerate(trainer.masters.trained)
        for key, value in _moments(trainer.optimizer, weight).items()
    }
    return masters | moments


def copied_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The same, which may be trained on meanwhile."""
    return {name: tensor.detach().clone() for name, tensor in named_state(trainer).items()}


def write_state(state: dict[str, torch.Tensor], folder: Path, group: ProcessGroup) -> None:
    """Write the shards of all ranks, by all of them together.

    Raises:
        OSError: a rank cannot write.
        RuntimeError: a rank has ended.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(state, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {reason}") from error


def read_state(trainer: Trainer, folder: Path) -> None:
    """Take back what ranks have written, be it of another number; each rank reads its own part.

    Raises:
        RunError: masters are there and the trainer has none, or the other way round.
        OSError: it is not whole.
    """
    reader, own = HuggingFaceStorageReader(str(folder)), named_state(trainer)
    kept = reader.read_metadata().state_dict_metadata
    if sum(map(_is_master, kept)) != sum(map(_is_master, own)):
        raise RunError(
            f"the checkpoint has {sum(map(_is_master, kept))} float32 masters, the model "
            f"{sum(map(_is_master, own))}: leave learner.float32_masters as it was"
        )
    try:
        with catch_warnings(action="ignore", category=UserWarning):  # it warns of `no_dist`
            load(own, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise OSError(f"{folder}: {error}") from error


def _is_master(name: str) -> bool:
    return name.startswith(MASTER)


def _moments(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> dict[str, Any]:
    """The optimizer's own dictionary of a weight, filled as AdamW begins."""
    own = optimizer.state[weight]
    if not own:
        device = weight.device if optimizer.param_groups[0].get("fused") else "cpu"
        own["step"] = torch.zeros((), dtype=torch.float32, device=device)
        own["exp_avg"] = torch.zeros_like(weight)
        own["exp_avg_sq"] = torch.zeros_like(weight)
    return own
