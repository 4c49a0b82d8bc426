"""The runs of a matrix, side by side.

task      waits for                       then
a cell    room among `parallel` runs      starts its run, waits for its end, writes the report again

The picture of an ablation, which takes seconds to draw, is drawn once, when the call ends.

A run that fails costs the matrix its cell, and the exit status. SIGINT and SIGTERM end the runs
under way; the next call begins those anew.
"""

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from mage_async.config import config_file
from mage_async.errors import RunError
from mage_async.results.matrices.ablation import Cell, bounds_that_did_not_act, is_done
from mage_async.results.matrices.matrix import Matrix
from mage_async.results.run_directory import RunDirectory
from mage_services.cli.sweeps.files import write_files
from mage_services.cli.sweeps.plots import write_png
from mage_services.cli.sweeps.progress import Progress
from mage_services.processes.run_lock import hold, take_lock

RunEnd = Literal["done", "failed", "left for later"]


def run_matrix(matrix: Matrix) -> int:
    """Run what is missing, and write the report; 1 where a run failed.

    Raises: RunError: a run lies there that was another one, or is damaged, or somebody else runs
        the same matrix or a cell of it.
    """
    matrix.root.mkdir(parents=True, exist_ok=True)
    with _alone(matrix.root):
        missing = [cell for cell in matrix.configs if not _found(matrix, cell)]
        for cell in missing:
            _check_that_nobody_runs(matrix.run_of(cell))
        num_runs = len(matrix.configs)
        progress = Progress(num_runs, num_runs - len(missing), matrix.parallel)
        print(progress.begin(), flush=True)
        try:
            outcomes = asyncio.run(_run_all(matrix, missing, progress))
        except asyncio.CancelledError:
            print("stopped; the same call goes on")
            return 128 + signal.SIGTERM
        finally:
            finished = write_files(matrix)
            if finished and matrix.subject.is_about_age:
                write_png(matrix.root / "ablation.png", finished)
                print(bounds_that_did_not_act(finished) or "every bound was reached", flush=True)
    left = outcomes.count("left for later")
    print(f"{left} runs left; call again" if left else f"report: {matrix.root / 'report.html'}")
    return 1 if "failed" in outcomes else 0


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Lock this folder, so that no other process runs its cells; the lock ends with the process."""
    refusal = f"{root}: another `mage sweep` or `mage ablate` runs there; wait for it"
    lock = hold(root / ".lock", refusal)
    try:
        yield
    finally:
        os.close(lock)


async def _run_all(matrix: Matrix, missing: Sequence[Cell], progress: Progress) -> list[RunEnd]:
    """What became of each. Cancellation ends the runs under way."""
    room = asyncio.Semaphore(matrix.parallel)
    until = time.monotonic() + matrix.for_s

    async def one(cell: Cell) -> RunEnd:
        async with room:
            began = time.monotonic()
            outcome = await _run(matrix, cell) if began < until else "left for later"
            took_s = time.monotonic() - began
        if outcome == "done":
            found = next(run for run in write_files(matrix) if run.cell == cell)
            print(progress.done(found, took_s), flush=True)
        elif outcome == "failed":
            with matrix.failures_of(cell).open("a") as failures:
                failures.write(f"{time.time():.0f}: see {matrix.log_of(cell).name}\n")
            print(progress.failed(cell, str(matrix.log_of(cell))), flush=True)
        return outcome

    whole = asyncio.current_task()
    assert whole is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, whole.cancel)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(cell), name=cell.name()) for cell in missing]
    return [task.result() for task in running]


async def _run(matrix: Matrix, cell: Cell) -> RunEnd:
    """One run in a process of its own. Cancellation ends it and all its processes."""
    run = matrix.run_of(cell)
    shutil.rmtree(run.root, ignore_errors=True)  # it was interrupted
    config = matrix.root / f"{cell.name()}.toml"
    config.write_text(config_file.dump(matrix.configs[cell]))
    command = ["-m", "mage_async.launch", "--config", str(config), "--run-dir", str(run.root)]
    with matrix.log_of(cell).open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            "--actors",
            str(matrix.num_actors),
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"PYTHONSAFEPATH": "1"},
        )
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
    config.unlink()
    return "failed" if code else "done"


def _found(matrix: Matrix, cell: Cell) -> bool:
    """Whether a cell is done.

    Raises: RunError: a run lies there that was another one.
    """
    run = matrix.run_of(cell)
    if not is_done(run):
        return False
    if config_file.load_recorded(run.config) != matrix.configs[cell]:
        raise RunError(
            f"{run.root} is done, and was run with another configuration than is asked for now: "
            "give the same --config and --set, or another --run-dir"
        )
    return True


def _check_that_nobody_runs(run: RunDirectory) -> None:
    """A command that was killed leaves its runs alive; what is missing is removed and begun anew.

    Raises: RunError: this one lives.
    """
    if run.root.is_dir():
        os.close(take_lock(run))
