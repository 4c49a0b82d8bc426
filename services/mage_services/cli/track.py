"""`mage track`: send to trackers what they have not received of a run."""

import argparse
import os
from pathlib import Path

from mage_async.errors import ConfigError
from mage_async.results.run_directory import RunDirectory
from mage_services.cli.options import add_set

HELP = "Send the metrics of a run that W&B, TensorBoard, MLflow or trackio do not have yet."
MAX_S = 3600.0
"""Seconds after which a tracker that has not returned is given up."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        "The trackers are those of the run's configuration. Others are named by --set, as in "
        "`mage track RUN_DIR --set tracking.tensorboard=true`."
    )
    parser.add_argument("run_dir", type=Path)
    add_set(parser, "change a key of [tracking]")


def run(given: argparse.Namespace) -> int:
    """Send every tracker the metrics that it has not received, and wait until all are done.

    Returns:
        1 if a tracker has not received everything, else 0.

    Raises:
        RunError: there is no run, or another process is sending.
        ConfigError: no tracker is named, one is not installed, or `--set` names another key.
    """
    from mage_async.config import config_file
    from mage_async.config.components import TRACKERS
    from mage_async.results.run_files import read_document
    from mage_services.processes.run_lock import hold, is_held
    from mage_services.tracking.tracker_worker import read_position, start, trackers_of

    for text in given.set:
        if not text.lstrip().startswith("tracking."):
            raise ConfigError(f"--set {text}: only keys of [tracking] can be set here")
    RunDirectory(given.run_dir).check()
    directory = RunDirectory(given.run_dir.resolve())
    trackers = trackers_of(config_file.load_recorded(directory.config, given.set).tracking)
    if not trackers:
        keys = ", ".join(f"tracking.{name}" for name in TRACKERS)
        raise ConfigError(f"{given.run_dir} has no tracker: name one by --set, of {keys}")
    directory.tracking.mkdir(exist_ok=True)
    for name in trackers:
        # Refuse while another process, such as one of the run itself, sends to this tracker. The
        # lock is released at once, because the process that `start` starts takes it again.
        lock = directory.tracking / f"{name}.lock"
        refusal = f"another process is sending {directory.root} to {name}: wait for it"
        os.close(hold(lock, refusal))
    # Looked up before the files are read: a run that goes on now may write more after that, even if
    # it has ended when all is sent.
    goes_on = is_held(directory.lock)
    is_complete = bool(read_document(directory.summary).get("complete"))
    processes = start(directory, trackers, MAX_S)
    processes.end(MAX_S)
    unfinished = list(processes.unfinished(directory))
    if unfinished:
        print(*unfinished, sep="\n")
        return 1
    if is_complete and not goes_on:
        print(f"{', '.join(trackers)}: the whole run was sent")
        return 0
    state = "goes on: the same command sends the rest" if goes_on else "is not complete"
    for name in trackers:
        position = read_position(directory, name)
        num_steps = position.step if position else 0
        print(f"{name}: {num_steps} steps were sent so far; the run {state}")
    return 0
