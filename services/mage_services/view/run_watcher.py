"""List the state of the runs below a folder, and watch their files.

A thread scans the files, `INTERVAL_S` after the last scan. When the files of a run have changed,
the watcher asks the indexer to read the new records, and then notifies the open pages of the run. A
notified page fetches itself again, at most every 1.25 s (`LEAST_MS` in `static/view.js`).
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mage_async.config import config_file
from mage_async.errors import MageError, RunError
from mage_async.pages.curves import points_of
from mage_async.results.run_directory import RunDirectory, find_runs
from mage_async.results.run_files import (
    RunHistory,
    last_line,
    read_document,
    read_lines,
    run_history,
    run_state,
)
from mage_services.processes.child_process import ChildProcess
from mage_services.processes.run_lock import is_held
from mage_services.view.index import file_state
from mage_services.view.index_process import Indexed, ReadRun

INTERVAL_S = 0.5
"""Seconds between the end of a scan and the next one."""


class WatchedState(NamedTuple):
    """Describe a run at a scan. If it differs at the next scan, the run's pages are notified."""

    files: tuple[tuple[int, int], ...]
    """Size and time of change of each file."""
    is_running: bool | None
    """Whether a process holds the run's lock; None if that cannot be known."""


NOTHING_READ = WatchedState((), None)
"""State of a run whose files could not be read yet."""


def scan(
    root: Path, known: Mapping[str, WatchedState]
) -> tuple[dict[str, RunDirectory], dict[str, WatchedState]]:
    """Find the runs below a folder, and the state of each.

    Args:
        known: States at the last scan, by name of the run.
    """
    try:
        runs = find_runs(root)
    except (RunError, OSError):  # the folder was deleted, which pages report
        runs = {}
    return runs, {name: _state(run, known.get(name, NOTHING_READ)) for name, run in runs.items()}


def _state(run: RunDirectory, known: WatchedState) -> WatchedState:
    """Return the state of a run, or `known`, the last one, if its files cannot be read now."""
    try:
        files = tuple(map(file_state, _watched_files(run)))
        # A process that takes the lock also writes files, which shows above. But if the supervisor
        # is killed, the lock is released and no file changes. So the lock of a running run is read
        # at every scan.
        if files == known.files and not known.is_running:
            return known
        return WatchedState(files, is_held(run.lock))
    except OSError:  # such as an error of a network disk, which the next scan may not meet
        return known


def _watched_files(run: RunDirectory) -> list[Path]:
    """Return the files of a run that grow or are replaced; of the journal the newest segment."""
    segments = sorted(run.journal.glob("*.log"))[-1:]
    documents = (run.learner, run.evaluation, run.summary, run.events, run.times)
    return [run.metrics, run.curve, *documents, *segments]


@dataclass(slots=True)
class RunWatcher:
    """Watch the runs below a folder, and notify the open pages that follow them."""

    root: Path
    """The folder that `mage view` shows."""
    threads: Executor
    """Threads in which files are scanned and pages are made."""
    indexer: ChildProcess[Indexed]
    """The process that builds the indexes."""
    runs: Mapping[str, RunDirectory]
    """The runs of the last scan, by name."""
    opened: set[str] = field(default_factory=set)
    """Names of runs of which a page was opened. Only these runs are indexed."""
    faults: dict[str, str] = field(default_factory=dict)
    """Why the index of a run no longer grows, by the run's name."""
    listeners: dict[asyncio.Queue[str], str] = field(default_factory=dict)
    """Queues of open pages, with the name of the run that each follows; "" follows all runs."""
    changes: Counter[str] = field(default_factory=Counter)
    """Number of changes so far, by name of the run; under "" those of all runs together."""
    _states: Mapping[str, WatchedState] = field(default_factory=dict)
    """The states of the runs at the last scan, by name."""

    def run(self, name: str) -> RunDirectory:
        """Return the directory of a run.

        Raises:
            RunError: the run is gone.
        """
        if name not in self.runs:
            raise RunError(f"there is no run {name!r} below {self.root} any more")
        return self.runs[name]

    def open(self, name: str) -> None:
        """Index a run from now on.

        Raises:
            RunError: the run is gone.
        """
        run = self.run(name)
        if name not in self.opened:
            self.opened.add(name)
            self.indexer.send(ReadRun(str(run.root)))

    def notify(self, name: str) -> None:
        """Notify the open pages of a run, except those that have not handled the last notice."""
        self.changes.update((name, ""))
        for queue, followed in self.listeners.items():
            if followed in ("", name) and queue.empty():
                queue.put_nowait(name)

    def watch(self) -> None:
        """Scan the files, and again after each scan for as long as the loop runs."""
        loop = asyncio.get_running_loop()
        scanning = loop.run_in_executor(self.threads, scan, self.root, self._states)
        scanning.add_done_callback(self._scanned)

    def _scanned(
        self, scanning: "asyncio.Future[tuple[dict[str, RunDirectory], dict[str, WatchedState]]]"
    ) -> None:
        """Compare a scan with the one before, and react to the changes."""
        if scanning.cancelled():
            return
        runs, states = scanning.result()
        changed = {name for name in runs if self._states.get(name) != states[name]}
        gone = self.runs.keys() - runs.keys()
        self.runs, self._states = runs, states
        # A page of an opened run reads the index, so it is notified after the indexer has read on.
        for name in changed & self.opened:
            self.faults.pop(name, None)
            self.indexer.send(ReadRun(str(runs[name].root)))
        for name in changed - self.opened | gone:
            self.notify(name)
        asyncio.get_running_loop().call_later(INTERVAL_S, self.watch)

    def name_of(self, root: Path) -> str:
        """Return the name of a run by its folder; "" if it is gone."""
        return next((name for name, run in self.runs.items() if run.root == root), "")


# Find the runs below a folder, and make their entries in the list of runs.


@dataclass(frozen=True, slots=True)
class ListedRun:
    """Describe a run in the list of all runs; `fault` is the reason if it cannot be read."""

    name: str
    environment: str = ""
    seed: int = 0
    state: str = ""
    step: int = 0
    steps: int = 0
    curve: Sequence[tuple[int, float, float]] = ()
    """Points of the curve: version, held-out return of the last episode, and its 95 % half-width.
    """
    changed: int = 0
    """Time of the last write, in nanoseconds since 1970."""
    fault: str = ""


_listed: dict[Path, tuple[Any, ListedRun]] = {}
"""For each run: the state of its files, and its entry in the list. Threads share this table: an
entry is replaced as a whole and never removed.
"""


def listed_run(name: str, run: RunDirectory) -> ListedRun:
    """Return the entry of a run in the list; it is read again only if its files have changed."""
    files = (run.config, run.metrics, run.curve, run.evaluation, run.summary, run.events)
    try:
        now = (tuple(map(file_state, files)), is_held(run.lock))
        known = _listed.get(run.root)
        if known is None or known[0] != now:
            known = _listed[run.root] = now, _read_entry(name, run)
    except OSError as error:
        return ListedRun(name, fault=str(error))
    return known[1]


def _read_entry(name: str, run: RunDirectory) -> ListedRun:
    """Read the entry of a run; if the run is damaged, the entry has the reason only."""
    try:
        config = config_file.load_recorded(run.config, imports=False)
        points = points_of(read_lines(run.curve), read_document(run.evaluation), "heldout")
        last = last_line(run.metrics)
        state = state_of(run, history_of(run))
        heldout = [
            (version, score["return_by_episode"][-1], score["ci95_by_episode"][-1])
            for version, score in points
        ]
    except MageError as error:
        return ListedRun(name, fault=str(error))
    return ListedRun(
        name,
        config.environment.name,
        config.seed,
        state,
        last.get("step", 0),
        config.learner.steps,
        heldout,
        file_state(run.metrics).changed_ns,
    )


def history_of(run: RunDirectory) -> RunHistory:
    """Read what happened to the processes of a run."""
    return run_history(read_lines(run.events))


def state_of(run: RunDirectory, history: RunHistory) -> str:
    """Return the present state of a run, in one or two words."""
    is_complete = bool(read_document(run.summary).get("complete"))
    return run_state(is_held(run.lock), is_complete, history)
