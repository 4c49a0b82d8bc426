"""Which runs lie below a folder, and what a list says of each."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mage_async.config import config_file
from mage_async.errors import MageError, RunError
from mage_async.pages.processes import Lives, lives_of, state_of
from mage_async.pages.run_lists import ListedRun
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_document, read_lines
from mage_services.processes.run_lock import is_held

DEEPEST = 3
"""Folders between the one that was named and a run."""
TAIL_BYTES = 1 << 16
_Known = tuple[tuple[float, ...], bool | None]
_listed: dict[Path, tuple[_Known, ListedRun]] = {}
"""What a list said of a run last, beside what its files were then. Pages are made in threads, so an
entry is replaced whole and never removed.
"""


def found_runs(root: Path) -> dict[str, RunDirectory]:
    """Runs by name, which is made of their path below `root`; of a run itself its own name.

    Raises:
        RunError: there is no such folder, or this user may not read it.
    """
    if not root.is_dir():
        raise RunError(f"{root}: no such folder of runs")
    if not os.access(root, os.R_OK | os.X_OK):
        raise RunError(f"{root} cannot be read: permission denied")
    if RunDirectory(root).config.is_file():
        return {root.resolve().name: RunDirectory(root)}
    return {
        _name(path.relative_to(root)): RunDirectory(path)
        for path in sorted(_runs_below(root, DEEPEST))
    }


def _name(path: Path) -> str:
    """A path as one part of an address; two paths never have the same."""
    return str(path).replace("%", "%25").replace("~", "%7E").replace("/", "~")


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    """Runs in a folder; folders that this user may not read, or that go meanwhile, have none."""
    try:
        paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return
    for path in paths:
        if not path.is_dir() or not os.access(path, os.R_OK | os.X_OK):
            continue
        if RunDirectory(path).config.is_file():
            yield path
        elif depth > 1:
            yield from _runs_below(path, depth - 1)


def listed_run(name: str, run: RunDirectory) -> ListedRun:
    """A run in a list; one that cannot be read says why."""
    files = (run.config, run.metrics, run.curve, run.summary, run.events)
    now = (tuple(map(changed_at, files)), is_held(run.lock))
    known = _listed.get(run.root)
    if known is None or known[0] != now:
        known = _listed[run.root] = now, _list(name, run)
    return known[1]


def _list(name: str, run: RunDirectory) -> ListedRun:
    try:
        config = config_file.load_recorded(run.config)
        curve = read_lines(run.curve)
        last = last_line(run.metrics)
        state = run_state(run, lives(run))
    except MageError as error:
        return ListedRun(name, fault=str(error))
    return ListedRun(
        name,
        config.environment.name,
        config.seed,
        state,
        last.get("step", 0),
        config.learner.steps,
        [_point(line) for line in curve if "heldout" in line["sets"]],
        changed_at(run.metrics),
    )


def _point(line: dict[str, Any]) -> tuple[int, float, float]:
    score = line["sets"]["heldout"]
    halves = score.get("ci95_by_episode") or [0.0]
    return line["version"], score["return_by_episode"][-1], halves[-1]


def lives(run: RunDirectory) -> Lives:
    """What became of the processes of a run."""
    return lives_of(read_lines(run.events))


def run_state(run: RunDirectory, lives: Lives) -> str:
    """What a run does now, in a word or two."""
    is_whole = bool(read_document(run.summary).get("complete"))
    return state_of(is_held(run.lock), is_whole, lives)


def last_line(file: Path) -> dict[str, Any]:
    """The last whole line of a file of JSON lines; empty where there is none."""
    if not file.is_file():
        return {}
    with file.open("rb") as source:
        source.seek(max(0, source.seek(0, 2) - TAIL_BYTES))
        *lines, _ = source.read().split(b"\n")
    try:
        return json.loads(lines[-1]) if lines else {}
    except ValueError as error:
        raise RunError(f"{file}: damaged in its last line: {error}") from error


def changed_at(file: Path) -> float:
    """When a file was written last; 0 where there is none."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
