"""Trials of a journal for others, by the ending of the file: see `docs/exports.md`.

ending    what is written                                           needs
.jsonl    a line of JSON a trial                                    –
.parquet  a row a trial, with every token                           the extra `export`
.dataset  a folder for HuggingFace's `datasets`, of the same rows   the extra `export`
.atif     a folder of trajectories, as a job of Harbor's            –

A row is a trial (`mage_async/attribution/rows.py`): its group and number, the step that consumed
it, everything a person reads of it, each turn's return, advantage and `info`, and in Parquet also
every token with its log-prob, version, staleness and advantage. A file or folder is whole or
absent.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from mage_async import __version__
from mage_async.attribution.atif import name_of, trajectory_of
from mage_async.attribution.rows import row_of
from mage_async.attribution.turns import AttributedTrial
from mage_async.errors import RunError
from mage_async.trials.chat_format import ChatFormat
from mage_services.journal.export_parquet import write_dataset, write_parquet


def export(
    trials: Iterable[AttributedTrial], chat: ChatFormat, file: Path, *, run: str = "run"
) -> int:
    """Write trials to `file`, by its ending; returns how many.

    Args:
        run: the name of the run, for formats that have a place for it.

    Raises:
        RunError: another ending, pyarrow is not installed, or the file cannot be written, as where
            a folder of that name is there already.
    """
    if file.suffix not in WRITERS:
        known = " or ".join([", ".join([*WRITERS][:-1]), [*WRITERS][-1]])
        raise RunError(f"{file}: an export ends in {known}, got {file.suffix!r}")
    working = file.with_name(f".{file.name}.part")
    try:
        _remove(working)
        count = WRITERS[file.suffix](trials, chat, working, run)
        os.replace(working, file)
    except OSError as fault:
        raise RunError(f"{file} cannot be written: {fault.strerror}") from fault
    finally:
        _remove(working)
    return count


def _remove(working: Path) -> None:
    if working.is_dir():
        shutil.rmtree(working)
    else:
        working.unlink(missing_ok=True)


def _write_lines(trials: Iterable[AttributedTrial], chat: ChatFormat, file: Path, run: str) -> int:
    count = 0
    with file.open("w") as out:
        for trial in trials:
            out.write(json.dumps(row_of(trial, chat)) + "\n")
            count += 1
    return count


def _write_trajectories(
    trials: Iterable[AttributedTrial], chat: ChatFormat, folder: Path, run: str
) -> int:
    """Write a folder a trial, with the two files that Harbor's viewer looks for."""
    folder.mkdir()
    count = 0
    for trial in trials:
        name, task = name_of(trial), trial.trial.task
        agent = folder / name / "agent"
        agent.mkdir(parents=True)
        (agent / "trajectory.json").write_text(json.dumps(trajectory_of(trial, run, __version__)))
        config = {"task": {"path": f"{task.environment}/{task.member}"}, "trial_name": name}
        (folder / name / "config.json").write_text(json.dumps(config))
        count += 1
    return count


WRITERS: dict[str, Callable[[Iterable[AttributedTrial], ChatFormat, Path, str], int]] = {
    ".jsonl": _write_lines,
    ".parquet": write_parquet,
    ".dataset": write_dataset,
    ".atif": _write_trajectories,
}
"""By ending."""
