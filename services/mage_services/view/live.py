"""What follows the runs: files that grow are noticed, indexes catch up, open pages hear of it.

Looking at files happens in a thread, `EVERY_S` after the last look; nothing sleeps.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

from mage_async.errors import RunError
from mage_async.results.run_directory import RunDirectory
from mage_services.processes.line_process import LineProcess
from mage_services.view.found_runs import found_runs

EVERY_S = 0.5
States = dict[str, tuple[tuple[int, int], ...]]
"""Size and time of the files of each run, by name."""


def look(root: Path) -> tuple[dict[str, RunDirectory], States]:
    """The runs that are there, and how their files are now; in a thread."""
    try:
        runs = found_runs(root)
    except (RunError, OSError):  # the folder was deleted; pages say so
        runs = {}
    return runs, {name: tuple(map(_state, _followed(run))) for name, run in runs.items()}


def _followed(run: RunDirectory) -> list[Path]:
    """Files that grow or change while a run goes on."""
    segments = sorted(run.journal.glob("*.log"))[-1:]
    documents = (run.learner, run.evaluation, run.summary, run.events, run.times)
    return [run.metrics, run.curve, *documents, *segments]


def _state(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


@dataclass(slots=True)
class Live:
    """The runs below a folder, and who follows them."""

    root: Path
    threads: Executor
    indexer: LineProcess
    runs: Mapping[str, RunDirectory]
    opened: set[str] = field(default_factory=set)
    """Runs that somebody has looked at: they are indexed."""
    faults: dict[str, str] = field(default_factory=dict)
    """Why a run's index does not grow any more, by name."""
    listeners: dict[asyncio.Queue[str], str] = field(default_factory=dict)
    """Open pages and the run that each follows; "" follows all."""
    _states: States = field(default_factory=dict)

    def open(self, name: str) -> None:
        """Somebody looks at a run: index it from now on."""
        if name not in self.opened:
            self.opened.add(name)
            self.indexer.say({"run": str(self.runs[name].root)})

    def tell(self, name: str) -> None:
        """Open pages of a run hear that there is news; one that has not read the last need not."""
        for queue, wanted in self.listeners.items():
            if wanted in ("", name) and queue.empty():
                queue.put_nowait(name)

    def follow(self) -> None:
        """Look at the files, and again for as long as the loop runs."""
        loop = asyncio.get_running_loop()
        looking = loop.run_in_executor(self.threads, look, self.root)
        looking.add_done_callback(self._seen)

    def _seen(self, looking: "asyncio.Future[tuple[dict[str, RunDirectory], States]]") -> None:
        if looking.cancelled():
            return
        runs, states = looking.result()
        changed = {name for name in runs if self._states.get(name) != states[name]}
        gone = self.runs.keys() - runs.keys()
        self.runs, self._states = runs, states
        for name in changed & self.opened:  # told once the index has it: a page shows the index
            self.faults.pop(name, None)
            self.indexer.say({"run": str(runs[name].root)})
        for name in changed - self.opened | gone:
            self.tell(name)
        asyncio.get_running_loop().call_later(EVERY_S, self.follow)

    def name_of(self, root: Path) -> str:
        """The name of a run by its folder; "" for one that is gone."""
        return next((name for name, run in self.runs.items() if run.root == root), "")
