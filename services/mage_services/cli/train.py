"""`mage train`: check the configuration, open the run's directory, and supervise the run.

`supervised_run.py` does what follows the checks. A mistake of a person is one line of error before
any process starts.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mage_async.errors import ConfigError, RunError
from mage_async.results.run_directory import RunDirectory

if TYPE_CHECKING:
    from mage_async.config.schema import Config

HELP = "Train a language agent: actors play, a learner trains, and a report is written."
DEFAULT_ACTORS, DEFAULT_PRETRAINED_ACTORS = 4, 1
"""An actor of a pretrained policy holds a copy of the weights, and plays many trials at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the configuration, the run directory and the number of processes."""
    parser.epilog = (
        "`mage config` explains the keys of a configuration. A run that was stopped goes on with "
        "`mage train --resume --run-dir DIR`."
    )
    parser.add_argument("--config", help="a TOML file, or the name of a shipped one (quickstart)")
    parser.add_argument(
        "--actors",
        type=int,
        metavar="N",
        help=f"actor processes ({DEFAULT_ACTORS}, or {DEFAULT_PRETRAINED_ACTORS} with a pretrained "
        "policy; a resumed run has as many as before)",
    )
    parser.add_argument(
        "--learner", type=int, metavar="N", help="the same as --set learner.ranks=N"
    )
    parser.add_argument(
        "--cluster",
        default="",
        metavar="ADDRESS",
        help="start the processes on a Ray cluster: `auto` on one of its nodes, or HOST:PORT of "
        "its head (docs/cluster.md)",
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where the run is written")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        help="change one key of the configuration; may be given again",
    )
    parser.add_argument(
        "--method",
        # names are not listed: that would import every method, and numpy with them
        help="write a published method (mage_paper, lamer_paper, grpo and others of "
        "docs/methods.md), or module:Class of your own, over the configuration, before --set",
        metavar="NAME",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same as --set seed=N")
    parser.add_argument("--resume", action="store_true", help="go on from --run-dir's checkpoint")
    parser.add_argument(
        "--print-config", action="store_true", help="print the whole configuration and end"
    )


def run(given: argparse.Namespace) -> int:
    """Train to the end, or print the configuration.

    Returns: 0, or 128 + N where signal N ended the run.
    """
    from mage_async.assembly import check_room
    from mage_async.config import config_file
    from mage_async.config.learning import check_installed
    from mage_async.config.policy import check_source
    from mage_services.actor.preflight import run_preflight
    from mage_services.cli.supervised_run import run_to_end
    from mage_services.tracking.tracker_worker import trackers_of

    config = _config(given)
    if given.print_config:
        print(config_file.dump(config), end="")
        return 0
    if given.actors is not None and given.actors < 1:
        raise ConfigError(f"--actors must be at least 1, got {given.actors}")
    trackers_of(config.tracking)
    check_installed(config.learner)
    _rehearse(config)
    check_room(config)
    if not given.resume:  # a resumed run keeps the policy that it began with
        check_source(config.policy)
        say = partial(print, flush=True)
        config = run_preflight(config, given.actors or _default_actors(config), say=say)
    with _opened(given, config) as (directory, num_actors):
        return run_to_end(
            directory,
            config,
            num_actors=num_actors,
            is_resumed=given.resume,
            cluster=given.cluster,
        )


def _config(given: argparse.Namespace) -> "Config":
    """Resolve the configuration of the run, and check its keys.

    A run's configuration is resolved here and nowhere else: every process of the run receives the
    result. A resumed run starts from the configuration that it recorded.
    """
    from mage_async.assembly import check_keys
    from mage_async.config import config_file
    from mage_async.methods.method import overriding

    assignments = [*given.set, *([] if given.seed is None else [f"seed={given.seed}"])]
    assignments += [] if given.learner is None else [f"learner.ranks={given.learner}"]
    if given.resume:
        file = _recorded_config(given)
        config = config_file.load_recorded(file, assignments, given.method)
        recorded = config_file.load_recorded(file)
        # Methods that replace the trainer, on in only one of the two configurations.
        changed = set(overriding(config, "trainer")) ^ set(overriding(recorded, "trainer"))
        if changed:
            raise ConfigError(
                f"--resume can neither add nor leave out methods.{min(changed)}, which trains in "
                "its own way from the beginning of a run: start a run of its own"
            )
    else:
        config = config_file.load(config_file.find(given.config), assignments, given.method)
    check_keys(config)
    return config


def _rehearse(config: "Config") -> None:
    """Rehearse environments that are a user's own, or whose calls may take long.

    Raises:
        ConfigError: an environment failed its rehearsal.
    """
    from mage_async.assembly import named_parts
    from mage_async.environments.rehearsal import is_rehearsed
    from mage_services.actor.rehearsal import rehearse

    for name, part in named_parts(config):
        if is_rehearsed(name, part):
            asyncio.run(rehearse(config, name, part, partial(print, flush=True)))


def _recorded_config(given: argparse.Namespace) -> Path:
    """Return the file in which the run to be resumed recorded its configuration."""
    if given.run_dir is None:
        raise ConfigError("--resume needs --run-dir, the run to go on with")
    file = RunDirectory(given.run_dir).config
    if not file.is_file():
        raise RunError(f"{given.run_dir}: no config.toml, so there is no run to resume")
    return file


@contextmanager
def _opened(given: argparse.Namespace, config: "Config") -> Iterator[tuple[RunDirectory, int]]:
    """Make the run's directory, lock it, and write the configuration and the number of actors.

    Yields: the run, and its number of actors.
    """
    from mage_async.environments.catalogue import file_name
    from mage_services.processes.run_lock import take_lock

    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{file_name(config.environment.name)}-{stamp}"
    directory = RunDirectory((given.run_dir or Path("runs") / name).resolve())
    with ExitStack() as held:
        try:
            directory.root.mkdir(parents=True, exist_ok=True)
            held.callback(os.close, take_lock(directory))
            num_actors = _write_start(directory, given, config)
        except OSError as error:
            raise RunError(f"{directory.root} cannot be written: {error.strerror}") from error
        yield directory, num_actors


def _default_actors(config: "Config") -> int:
    from mage_async.config.schema import Pretrained

    return DEFAULT_PRETRAINED_ACTORS if isinstance(config.policy, Pretrained) else DEFAULT_ACTORS


def _write_start(directory: RunDirectory, given: argparse.Namespace, config: "Config") -> int:
    """Write the resolved configuration and the number of actors; return the latter."""
    from mage_async.config import config_file
    from mage_async.results.durable_files import write_whole
    from mage_async.results.run_files import read_document

    if directory.config.exists() and not given.resume:
        raise RunError(
            f"{directory.root} holds a run already: add --resume, or choose another --run-dir"
        )
    directory.logs.mkdir(exist_ok=True)
    directory.checkpoints.mkdir(exist_ok=True)
    num_actors = given.actors or read_document(directory.launch).get(
        "actors", _default_actors(config)
    )
    write_whole(directory.config, config_file.dump(config))
    write_whole(directory.launch, json.dumps({"actors": num_actors}) + "\n")
    return num_actors
