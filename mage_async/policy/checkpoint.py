"""Choose, write and read checkpoints. A checkpoint is a HuggingFace folder with the optimizer state
and counters.

If the learner has several ranks, each rank writes its shards
(`mage_async/policy/sharded_files.py`). A checkpoint of a model with adapters holds the adapters
alone, as peft reads them; the merged model is added at the last step, and on demand
(`whole_policy`). A checkpoint is written under a temporary name, synced, and renamed when it is
complete. So every folder under its final name is whole, a crash leaves the last good checkpoint,
and journal segments before it may be deleted. `complete_checkpoint` renames it, and deletes the
oldest checkpoints if there are too many, except the best one (`best_checkpoint` of
`mage_async/results/summary.py`).
"""

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

from safetensors import SafetensorError

from mage_async.config.schema import Config
from mage_async.errors import RunError, first_line
from mage_async.policy.full_disk import DISK_ERRORS, writing
from mage_async.results.run_directory import (
    COUNTERS,
    OPTIMIZER,
    SHARDS,
    RunDirectory,
    checkpoint_at,
    checkpoints,
    step_of,
)
from mage_async.results.run_files import sync
from mage_async.results.summary import best_checkpoint

# torch is imported in the functions that write and read weights: a command that names a checkpoint
# which the run does not have is refused before that import, which takes seconds.
if TYPE_CHECKING:
    from mage_async.learning.trainer import Trainer

MERGED = "merged"
"""Name of the folder of a checkpoint's merged model."""
MERGE_AGAIN = "make room, then repeat the command"
"""Advice where the disk is full while adapters are merged."""
STATE = "optimizer_state"
"""Key of the counters for `learner.optimizer_state`, the way in which the optimizer stores its
moments.
"""


def chosen_checkpoint(run: RunDirectory, config: Config, checkpoint: str) -> tuple[Path, int]:
    """Return the folder and the version of the checkpoint that a user chose, to evaluate, serve,
    push or play it, or to start from it.

    Args:
        checkpoint: "newest", "best" (`best_checkpoint`), or the number of a step. In a run without
            a checkpoint the first two are the policy that the run began with, version 0.

    Raises:
        RunError: the run has no checkpoint of that step.
    """
    found = {str(step_of(folder)): folder for folder in checkpoints(run.checkpoints)}
    if checkpoint == "newest" and found:
        checkpoint = list(found)[-1]
    elif checkpoint == "best" and (best := best_checkpoint(run, config)):
        checkpoint = str(step_of(best.path))
    if checkpoint in ("newest", "best"):
        return run.policy, 0
    if checkpoint not in found:
        raise RunError(
            f"{run.root}: no checkpoint of step {checkpoint}; the run has kept those of steps "
            f"{', '.join(found) or 'none'}"
        )
    return found[checkpoint], int(checkpoint)


def save_checkpoint(
    trainer: "Trainer",
    chat_source: Path,
    folder: Path,
    counters: dict[str, Any],
    best: Path | None = None,
) -> Path:
    """Write `folder/step_N` and delete all but the newest checkpoints. The last one of a run also
    has the merged model, if the model has adapters.

    Args:
        best: A checkpoint that is not deleted.

    Raises:
        OSError, SafetensorError, RuntimeError: the disk has failed; a caller turns these into a
            RunError (`writing`).
    """
    import torch

    from mage_async.learning.lora import adapted_layers, save_adapters
    from mage_async.policy.load import export_hf

    learner, working = trainer.config.learner, new_checkpoint(folder, trainer.version)
    try:
        if adapted_layers(trainer.model):
            save_adapters(trainer.model, working)
            if trainer.version == learner.steps:
                export_hf(trainer.model, chat_source, working / MERGED)
        else:
            export_hf(trainer.model, chat_source, working)
        # torch writes into a file that Python has opened: if the disk is full, Python's errors say
        # so, and those of torch's own files do not.
        with (working / OPTIMIZER).open("wb") as out:
            torch.save(trainer.state(), out)
        content = counters | {"version": trainer.version, STATE: trainer.optimizer_state}
        return complete_checkpoint(working, content, learner.keep_checkpoints, best)
    except DISK_ERRORS:
        shutil.rmtree(working, ignore_errors=True)  # on a full disk other files need its space
        raise


def new_checkpoint(folder: Path, version: int) -> Path:
    """Make the empty folder in which a checkpoint is written, and delete unfinished checkpoints of
    processes that were killed.
    """
    for unfinished in folder.glob(".step_*"):
        shutil.rmtree(unfinished)
    working = folder / f".{checkpoint_at(folder, version).name}.part"
    working.mkdir(parents=True)
    return working


def complete_checkpoint(
    working: Path, counters: dict[str, Any], num_kept: int, best: Path | None
) -> Path:
    """Write the counters, make a checkpoint durable, and delete all but `best` and the newest
    `num_kept`.
    """
    # `.step_N.part`, as `new_checkpoint` names it, becomes `step_N`.
    final, folder = working.with_name(working.name[1:].removesuffix(".part")), working.parent
    (working / COUNTERS).write_text(json.dumps(counters, indent=2))
    _rename_durably(working, final)
    for old in checkpoints(folder)[:-num_kept]:
        if old != best:
            # Renamed before it is deleted, so that a kill in between leaves no half-deleted folder
            # under a checkpoint's name.
            renamed = old.with_name(f".{old.name}.old")
            os.replace(old, renamed)
            shutil.rmtree(renamed)
    return final


def _rename_durably(working: Path, final: Path) -> None:
    """Rename a folder once all its files are synced, so that no crash leaves a torn one.

    Raises:
        OSError: `final` exists already and is not empty; it is left as it is.
    """
    for file in (*working.rglob("*"), working):
        sync(file)
    os.replace(working, final)
    sync(final.parent)


def whole_policy(config: Config, policy: Path, checkpoint: Path) -> Path:
    """Return a checkpoint as a model directory: the checkpoint itself or, if it holds adapters, its
    merged model, which the first call writes.

    Args:
        policy: Model directory that the run began from.

    Raises:
        PolicyError: the model lacks the configured layers or adapters.
        RunError: the adapters cannot be read, or the merged model cannot be written.
    """
    from mage_async.learning.lora import holds_adapters
    from mage_async.policy.load import export_hf, load_trained

    if not holds_adapters(checkpoint):
        return checkpoint
    final, working = checkpoint / MERGED, checkpoint / f".{MERGED}.part"
    if not final.is_dir():
        shutil.rmtree(working, ignore_errors=True)
        try:
            model = load_trained(config, policy, checkpoint, device="cpu")
        except (OSError, SafetensorError, RuntimeError) as error:
            raise RunError(
                f"{checkpoint}: its adapters cannot be read: {first_line(error)}; take an older "
                "checkpoint"
            ) from error
        with writing(f"the merged model to {final}", MERGE_AGAIN):
            export_hf(model, policy, working)
            _rename_durably(working, final)
    return final


def restore_checkpoint(trainer: "Trainer", checkpoint: Path) -> dict[str, Any]:
    """Restore the optimizer state, and return the counters. The model is loaded separately.

    Raises:
        RunError: the checkpoint is incomplete, or was written with another
            `learner.optimizer_state` than the trainer's.
    """
    import torch

    from mage_async.policy.sharded_files import read_state

    try:
        counters: dict[str, Any] = json.loads((checkpoint / COUNTERS).read_text())
        if counters[STATE] != trainer.optimizer_state:
            raise RunError(
                f"{checkpoint} was written with learner.optimizer_state = {counters[STATE]!r}, and "
                f"the run has {trainer.optimizer_state!r}: leave the key as it was"
            )
        if (checkpoint / SHARDS).is_dir():
            read_state(trainer, checkpoint / SHARDS)
            trainer.version = counters["version"]
            return counters
        # `torch.save` writes a zip file. For any other file torch.load raises errors of many kinds.
        if not is_zipfile(checkpoint / OPTIMIZER):
            raise ValueError(f"{OPTIMIZER} is missing or cut off")
        state = torch.load(checkpoint / OPTIMIZER, map_location="cpu", weights_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise RunError(
            f"{checkpoint}: not a whole checkpoint: {error}; remove the folder"
        ) from error
    trainer.restore(state)
    return counters
