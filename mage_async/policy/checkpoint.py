"""Checkpoints: a HuggingFace folder a step, with the optimizer and the counters beside the weights.

A checkpoint is written under a temporary name, synced, and renamed when it is whole. A crash
therefore leaves the last good checkpoint, and journal segments before it may be deleted.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from mage_async.errors import RunError
from mage_async.learning.trainer import Trainer
from mage_async.policy.load import export_hf
from mage_async.results.durable_files import sync

OPTIMIZER, COUNTERS = "optimizer.pt", "counters.json"


@contextmanager
def writing(what: str) -> Iterator[None]:
    """A disk that is full or gone is said in one line; torch says it as a RuntimeError."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(f"cannot write {what}: {reason}; make room, then --resume") from error


def save_checkpoint(
    trainer: Trainer, chat_source: Path, folder: Path, counters: dict[str, Any], keep: int
) -> Path:
    """Write `folder/step_N` and delete all but the newest `keep`."""
    final = folder / f"step_{trainer.version:06d}"
    working = folder / f".{final.name}.part"
    shutil.rmtree(working, ignore_errors=True)
    export_hf(trainer.model, chat_source, working)
    torch.save(trainer.state(), working / OPTIMIZER)
    (working / COUNTERS).write_text(json.dumps(counters | {"version": trainer.version}, indent=2))
    for file in working.iterdir():
        sync(file)
    sync(working)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(working, final)
    sync(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(folder.glob("step_*"))


def restore_checkpoint(trainer: Trainer, checkpoint: Path) -> dict[str, Any]:
    """Take back optimizer and counters (the model was loaded from the folder itself)."""
    try:
        state = torch.load(checkpoint / OPTIMIZER, map_location="cpu", weights_only=True)
        counters = json.loads((checkpoint / COUNTERS).read_text())
    except (OSError, ValueError, RuntimeError) as error:
        raise RunError(
            f"{checkpoint}: not a whole checkpoint: {error}; remove the folder"
        ) from error
    trainer.restore(state)
    return counters
