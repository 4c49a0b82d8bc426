"""One run from start to report: the process that `mage_async.launch` becomes."""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import uvloop

from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import MageError, RunError
from mage_async.report import render
from mage_async.results.durable_files import write_whole
from mage_async.results.run_directory import RunDirectory
from mage_async.results.summary import summarise, write_summary
from mage_services.engines.sglang.versions import installed
from mage_services.processes.process import first_failure
from mage_services.processes.run_lock import take_lock
from mage_services.processes.supervisor import Supervisor, until_signalled
from mage_services.terminal.view import View, make_view
from mage_services.transport.authentication import actor_keys, keys_in, learner_keys
from mage_services.transport.sockets import check_address, ipc_address


def main() -> None:
    """Supervise a run, then write its summary and report."""
    given = _arguments()
    run = RunDirectory(given.run_dir)
    config = config_file.load_recorded(run.config)
    view = make_view(config, run, is_terminal=sys.stdout.isatty())
    began = time.monotonic()
    try:
        _hold_lock(run, given.lock)
        code = _supervise(run, config, view, given)
        _finish(run, view, time.monotonic() - began)
    except MageError as error:
        view.close(None)
        sys.exit(f"mage: {error}")
    sys.exit(code)


def _hold_lock(run: RunDirectory, passed_on: int | None) -> None:
    """Hold the run's lock until this process ends, and let no child have it.

    Raises: RunError: no lock was passed on, and another process holds it.
    """
    if passed_on is None:
        take_lock(run)
    else:
        os.set_inheritable(passed_on, False)


def _supervise(run: RunDirectory, config: Config, view: View, given: argparse.Namespace) -> int:
    """Run the processes; the exit code is 128 + N where signal N ended the run."""
    address, keys = config.transport.address, config.transport.keys
    is_ours = address == "ipc"
    keys_in(learner_keys, keys)  # what is wrong with them is said before any process starts
    keys_in(actor_keys, keys)
    if config.engine.kind == "sglang":
        installed()
    if is_ours:
        address = ipc_address(run.root)
    check_address(address, has_keys=bool(keys))
    supervisor = Supervisor(run, config, given.actors, address, view, given.resume)
    try:
        number = uvloop.run(until_signalled(supervisor))
    except* MageError as group:
        raise first_failure(group) from None
    finally:
        shutil.rmtree(run.shared_weights, ignore_errors=True)
        if is_ours:
            shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
        _write_time(run, supervisor, view)
    if number is None:
        return 0
    view.line(f"ended by {signal.Signals(number).name}; go on with --resume --run-dir {run.root}")
    return 128 + number


def _write_time(run: RunDirectory, supervisor: Supervisor, view: View) -> None:
    """Where the supervisor's time went. That it cannot be written, as on a full disk, is said, and
    does not stand before the reason for which the run ended.
    """
    try:
        times = {"blocked_s": supervisor.time.seconds()}
        write_whole(run.supervisor, json.dumps(times) + "\n")
    except OSError as error:
        view.line(f"{run.supervisor} cannot be written: {error.strerror}")


def _finish(run: RunDirectory, view: View, wall_s: float) -> None:
    """Write what is known of the run, finished or not.

    Raises: RunError: its disk is full, or some file of it is damaged.
    """
    summary = summarise(run, wall_s=wall_s, processor_s=sum(os.times()[:4]))
    page = render(run, summary)
    view.close(summary)
    try:
        write_summary(run, summary)
        run.report.write_text(page)
    except OSError as error:
        raise RunError(
            f"{run.root}: no summary and report can be written: {error.strerror}; make room, then "
            "--resume"
        ) from error


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Supervise a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--actors", type=int, required=True)
    parser.add_argument("--lock", type=int, help="the descriptor that holds the run's lock")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
