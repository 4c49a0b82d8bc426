"""How much of a run a tracker has been told: a small file a tracker, `tracking/NAME.json`."""

import os
import time
import uuid
from pathlib import Path

import msgspec

from mage_async.errors import RunError
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import Record


class Position(msgspec.Struct):
    """Where the next life of a tracker's process goes on."""

    id: str
    """Of the tracker's own run."""
    began: float
    """When training began, in seconds since 1970: what a point's time is added to."""
    step: int = 0
    """The last step that was told."""
    metrics_bytes: int = 0
    """Of `metrics.jsonl`, up to the end of a line."""
    curve_bytes: int = 0
    """Of `evaluations.jsonl`."""
    end_step: int = 0
    """The step of the last summary that was told; 0: none was."""
    fault: str = ""
    """What the tracker raised last, where that is not over."""
    num_faults: int = 0
    """How often the tracker raised, in all lives of the run."""


def read_position(run: RunDirectory, name: str) -> Position | None:
    """What one tracker has been told; None: nothing yet.

    Raises: RunError: the file is damaged.
    """
    file = _file(run, name)
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Position)
    except msgspec.DecodeError as error:
        raise RunError(f"{file}: damaged: {error}; without it the tracker begins anew") from None


def new_position(metrics: list[Record]) -> Position:
    """That of a tracker that is told of a run for the first time, now, after these steps."""
    trained_s = metrics[-1]["time_s"] if metrics else 0.0
    return Position(uuid.uuid4().hex, time.time() - trained_s)


def write_position(run: RunDirectory, name: str, position: Position) -> None:
    """Write down what a tracker has been told, whole.

    The file is not synced to the disk: the run's journal is, just then, and would wait. A machine
    that loses power tells a few points again.
    """
    file = _file(run, name)
    draft = file.with_suffix(".part")
    draft.write_bytes(msgspec.json.encode(position))
    os.replace(draft, file)


def _file(run: RunDirectory, name: str) -> Path:
    return run.tracking / f"{name}.json"
