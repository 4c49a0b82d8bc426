"""Run the cells of `mage ablate` and `mage sweep`: several at once, each in processes of its own.

A cell of the matrix is one run: a combination of values with one seed. An asyncio task for each
waits until fewer than `parallel` runs go on, starts the run, waits for its end and writes the
report again. A run that fails has no row in the report, and makes the exit status 1. SIGINT,
SIGTERM and SIGHUP end the current runs, and so does a kill of this process. The next command runs
those cells again.
"""

import asyncio
import csv
import itertools
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from mage_async.assembly import edited, own_sources
from mage_async.config import config_file
from mage_async.errors import RunError
from mage_async.pages.charts import counted, duration
from mage_async.pages.sweep import render_matrix
from mage_async.policy.full_disk import writing
from mage_async.results.run_files import alike_and_different, read_document
from mage_async.results.sweep import (
    Cell,
    FinishedRun,
    Matrix,
    is_done,
    unreached_bounds_sentence,
)
from mage_async.trajectory import num_decimals
from mage_services.processes.child_process import PARENT
from mage_services.processes.process import until_signalled
from mage_services.processes.run_lock import hold, take_lock
from mage_services.terminal import lasting_output

GOING_S = 30.0
"""Seconds without a finished run after which the terminal gets a line for each current run."""

MOST_KEYS = 3
"""Number of keys that are named where a configuration differs."""


@dataclass(slots=True)
class Progress:
    """Make lines for the terminal: finished runs, and an estimate of the remaining time."""

    num_runs: int
    num_done: int
    """Number of finished runs, including those of earlier commands."""
    parallel: int
    """Number of runs at once."""
    _took_s: list[float] = field(default_factory=list)
    """Durations of the runs of this command, in seconds."""

    def begin(self) -> str:
        """Return the line before the first run of this command."""
        return f"{self.num_done} of {self.num_runs} runs done"

    def done(self, run: FinishedRun, took_s: float) -> str:
        """Count a run that was done in `took_s` seconds, and return its line."""
        self.num_done += 1
        self._took_s.append(took_s)
        reached, left = run.figures["heldout_last_return"], ""
        returned = f"last held-out episode {reached:.{num_decimals([reached]) - 1}f}"
        if num_left := self.num_runs - self.num_done:
            # Runs are assumed to be as long as those of this command so far.
            left_s = statistics.fmean(self._took_s) * num_left / self.parallel
            left = f"; about {duration(left_s)} left"
        return f"{self._place(run.cell)}: {returned}, {took_s:.0f} s{left}"

    def going(self, cell: Cell, log: Path) -> str:
        """Return the line of a run that goes on: the last line of its log."""
        return f"{self._place(cell)}: {_last_line(log) or 'begins'}"

    def failed(self, cell: Cell, log: Path) -> str:
        """Return the line of a run that failed, with the last line of its log."""
        return f"{self._place(cell)}: failed, see {log}: {_last_line(log)}"

    def _place(self, cell: Cell) -> str:
        """Return the number of finished runs, and the name of a cell."""
        return f"[{self.num_done}/{self.num_runs}] {cell.name()}"


def _last_line(log: Path) -> str:
    """Return the last line of a log; "" if there is none yet."""
    if not log.is_file():
        return ""
    text = log.read_bytes()[-4096:].decode("utf-8", errors="replace")
    return text.rstrip().rpartition("\n")[2]


def write_files(matrix: Matrix) -> list[FinishedRun]:
    """Write `report.html` and `runs.csv` of the runs that are done; return these runs."""
    finished = matrix.finished_runs()
    if finished:
        num_cells, title, subject = len(matrix.configs), matrix.title, matrix.subject
        page = render_matrix(finished, num_cells=num_cells, title=title, subject=subject)
        rows = [each.row() for each in finished]
        with writing(str(matrix.root), "make room, then run the same command again"):
            (matrix.root / "report.html").write_text(page, encoding="utf-8")
            with (matrix.root / "runs.csv").open("w", newline="", encoding="utf-8") as out:
                # A run of an earlier version may lack columns.
                table = csv.DictWriter(out, list(dict.fromkeys(itertools.chain(*rows))))
                table.writeheader()
                table.writerows(rows)
    return finished


RunEnd = Literal["done", "failed", "left for later"]
"""How a cell's run ended; it is left for later if the time `--for-s` was over before it began."""


def run_matrix(matrix: Matrix) -> int:
    """Run the missing cells of a matrix, and write the report.

    Returns:
        1 if a run failed, 128 + N if signal N ended the runs, else 0.

    Raises:
        RunError: a cell's directory holds another run or a damaged one, or another process runs the
            same matrix or a cell of it.
    """
    with lock_folder(matrix.root), lasting_output():
        return run_missing(matrix)


def run_missing(matrix: Matrix) -> int:
    """Do the work of `run_matrix`, in a folder that this process has locked."""
    if matrix.note:
        print(matrix.note, file=sys.stderr)
    missing = [cell for cell in matrix.configs if not _is_finished(matrix, cell)]
    for cell in missing:
        # The folder of a cell is removed before its run. So this raises an error if a run is still
        # going on there, such as one of an earlier command that was killed.
        if matrix.run_of(cell).root.is_dir():
            os.close(take_lock(matrix.run_of(cell)))
    num_runs = len(matrix.configs)
    progress = Progress(num_runs, num_runs - len(missing), matrix.parallel)
    print(progress.begin(), flush=True)
    outcomes = list[RunEnd]()
    all_runs = _run_all(matrix, missing, progress, outcomes)
    try:
        ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if number := asyncio.run(until_signalled(all_runs, *ends)):
            print("stopped; run the same command again to continue")
            return 128 + number
    finally:
        finished = write_files(matrix)
        if finished and matrix.subject.is_about_staleness:
            reached = (
                "in every setting with a bound, some token reached the age of the bound "
                "(max_staleness + lag)"
            )
            print(unreached_bounds_sentence(finished) or reached, flush=True)
        if different := alike_and_different([run.made_with for run in finished])[1]:
            print(different, flush=True)
    left = outcomes.count("left for later")
    if left:
        print(f"{counted(left, 'run')} left; run the same command again")
    elif finished:  # without a finished run there is no report
        print(f"report: {matrix.root / 'report.html'}")
    if num_failed := outcomes.count("failed"):
        print(f"{counted(num_failed, 'run')} failed; the same command runs them again")
    return 1 if num_failed else 0


def lock_folder(root: Path) -> IO[str]:
    """Make and lock the folder of a matrix until the returned file is closed, or the process
    ends.
    """
    root.mkdir(parents=True, exist_ok=True)
    refusal = f"{root}: another `mage sweep` or `mage ablate` runs there; wait for it"
    return os.fdopen(hold(root / ".lock", refusal))


async def _run_all(
    matrix: Matrix, missing: Sequence[Cell], progress: Progress, outcomes: list[RunEnd]
) -> None:
    """Run the missing cells, `matrix.parallel` at once, and add how each ended to `outcomes`.

    Cancellation ends the current runs.
    """
    may_run, may_write = asyncio.Semaphore(matrix.parallel), asyncio.Lock()
    latest_start = time.monotonic() + matrix.for_s
    going = list[Cell]()

    async def one(cell: Cell) -> None:
        """Run a cell once fewer than `parallel` runs go on, and print how it ended."""
        async with may_run:
            began = time.monotonic()
            going.append(cell)
            outcome = await _run(matrix, cell) if began < latest_start else "left for later"
            going.remove(cell)
            took_s = time.monotonic() - began
        if outcome == "done":
            async with may_write:
                # A page of many runs takes seconds, in which other runs may end or Ctrl-C arrive.
                finished = await asyncio.to_thread(write_files, matrix)
            found = next(run for run in finished if run.cell == cell)
            print(progress.done(found, took_s), flush=True)
        elif outcome == "failed":
            with matrix.failures_of(cell).open("a") as failures:
                failures.write(f"{time.time():.0f}: see {matrix.log_of(cell).name}\n")
            print(progress.failed(cell, matrix.log_of(cell)), flush=True)
        outcomes.append(outcome)

    async with asyncio.TaskGroup() as tasks:
        waiting = {tasks.create_task(one(cell), name=cell.name()) for cell in missing}
        try:
            while waiting:
                ended, waiting = await asyncio.wait(
                    waiting, timeout=GOING_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not ended:
                    for cell in going:
                        print(progress.going(cell, matrix.log_of(cell)), flush=True)
        except asyncio.CancelledError:
            print(f"stopping {counted(len(going), 'run')}, which takes seconds", flush=True)
            raise


async def _run(matrix: Matrix, cell: Cell) -> RunEnd:
    """Run one cell by `mage train`. Cancellation ends the run and all its processes."""
    run = matrix.run_of(cell)
    shutil.rmtree(run.root, ignore_errors=True)  # remains of an interrupted run
    config = matrix.root / f"{cell.name()}.toml"
    config.write_text(config_file.dump(matrix.configs[cell]), encoding="utf-8")
    command = [sys.executable, "-m", "mage_async.launch", "--config", str(config)]
    command += ["--run-dir", str(run.root), "--actors", str(matrix.num_actors)]
    try:
        with matrix.log_of(cell).open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # PYTHONSAFEPATH: a file of the current directory does not replace a module of the
                # program. PARENT: the run ends if this process is killed.
                env=os.environ | {"PYTHONSAFEPATH": "1", PARENT: str(os.getpid())},
            )
            try:
                code = await process.wait()
                # A process that was killed, perhaps by the kernel for its memory, logs no reason.
                if code < 0:
                    log.write(f"killed by {signal.Signals(-code).name}\n".encode())
            finally:
                if process.returncode is None:
                    process.terminate()
                    await process.wait()
    finally:
        config.unlink()
    return "done" if code == 0 and is_done(run) else "failed"


def _is_finished(matrix: Matrix, cell: Cell) -> bool:
    """Return whether a cell is done.

    Raises:
        RunError: its directory holds a run of another configuration or number of actors, or of
            a class of the user's own that was edited since.
    """
    run = matrix.run_of(cell)
    if not is_done(run):
        return False
    recorded = config_file.load_recorded(run.config)
    if recorded != matrix.configs[cell]:
        found = config_file.differences(recorded, matrix.configs[cell], absent="none")
        keys = [f"{key} was {was} and is {now}" for key, was, now in found[:MOST_KEYS]]
        if len(found) > MOST_KEYS:
            keys.append(f"{len(found) - MOST_KEYS} more")
        raise RunError(
            f"{run.root} is done, but was run with another configuration "
            f"({', '.join(keys)}): give the same --config and --set, or another --run-dir"
        )
    launch = read_document(run.launch)
    if names := edited(launch.get("sources", {}), own_sources(matrix.configs[cell])):
        raise RunError(
            f"{run.root} is done, and {', '.join(names)} was edited since: undo that, or give "
            "another --run-dir"
        )
    # More actors play staler trials in less time, and the report compares both.
    num_actors = launch.get("actors", matrix.num_actors)
    if num_actors != matrix.num_actors:
        raise RunError(
            f"{run.root} is done, and had {num_actors} actors: give --actors {num_actors}, or "
            "another --run-dir"
        )
    return True
