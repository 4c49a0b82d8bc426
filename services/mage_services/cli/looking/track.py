"""`mage track`: tell trackers of a run that has ended what they were not told while it went on."""

import argparse
import os
from pathlib import Path

from mage_async.errors import ConfigError, RunError
from mage_async.results.run_directory import RunDirectory

HELP = "Tell W&B, TensorBoard, MLflow or trackio of a run, from where they were told last."
MOST_S = 3600.0
"""After so long, a tracker that has not returned is given up."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run, and other trackers than its own."""
    parser.epilog = (
        "The trackers are those of the run's configuration. Others are named by --set, as in "
        "`mage track RUN_DIR --set tracking.tensorboard=true`."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="change a key of [tracking]"
    )


def run(given: argparse.Namespace) -> int:
    """Tell every tracker what is new, and wait for all.

    Returns: 1 where one could not be told everything.
    """
    from mage_services.tracking.processes import start

    directory, targets = RunDirectory(given.run_dir.resolve()), _targets(given)
    directory.tracking.mkdir(exist_ok=True)
    for name in targets:
        _check_that_nobody_tells(directory, name)
    followers = start(directory, targets, MOST_S)
    followers.end(MOST_S)
    left = list(followers.left(directory))
    print(*(left or [f"{', '.join(targets)}: told of the whole run"]), sep="\n")
    return 1 if left else 0


def _targets(given: argparse.Namespace) -> dict[str, str]:
    """Trackers of the run and of `--set`.

    Raises:
        RunError: there is no run.
        ConfigError: no tracker is named, or one is not installed.
    """
    from mage_async.config import config_file
    from mage_services.tracking.tracker import TRACKERS, targets

    file = RunDirectory(given.run_dir).config
    if not file.is_file():
        raise RunError(f"{given.run_dir}: no config.toml, so this is no run directory")
    found = targets(config_file.load_recorded(file, given.set).tracking)
    if not found:
        keys = ", ".join(f"tracking.{name}" for name in TRACKERS)
        raise ConfigError(f"{given.run_dir} has no tracker: name one by --set, of {keys}")
    return found


def _check_that_nobody_tells(directory: RunDirectory, name: str) -> None:
    """Refuse a run whose own process tells that tracker just now."""
    from mage_services.processes.run_lock import hold

    lock = directory.tracking / f"{name}.lock"
    os.close(
        hold(lock, f"{name} is being told of {directory.root} by another process: wait for it")
    )
