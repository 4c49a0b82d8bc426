"""`python -m mage_async.launch`, also `mage`: check the configuration, then become the supervisor.

Everything a person can get wrong is said here, in one line, before any process starts.
"""

import argparse
import os
import sys
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from mage_async.assembly import check
from mage_async.config import config_file, methods
from mage_async.config.policy_source import check_source
from mage_async.config.schema import Config
from mage_async.errors import ConfigError, MageError, RunError
from mage_async.results.durable_files import write_whole
from mage_async.results.run_directory import RunDirectory
from mage_services.processes.run_lock import take_lock

EXIT_USAGE = 2
COMMANDS = {
    "ablate": "mage_async.ablate",
    "evaluate": "mage_async.evaluate",
    "replay": "mage_async.replay",
    "journal": "mage_async.journal_list",
    "report": "mage_async.compare",
    "play": "mage_async.play",
    "keys": "mage_async.keys",
    "actor": "mage_async.join",
}


def main() -> None:
    """The `mage` command: `mage launch …` (or just `mage …`), or one of `COMMANDS`."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "launch" or command in COMMANDS:
        del sys.argv[1]
    if command in COMMANDS:
        return import_module(COMMANDS[command]).main()
    return launch()


def launch() -> None:
    """Start a run, or print its configuration."""
    given = _arguments()
    try:
        _launch(given)
    except MageError as error:
        sys.exit(_say(error))


def become(module: str, *arguments: str) -> NoReturn:
    """Replace this process by another program of ours, in the same interpreter."""
    sys.stdout.flush()
    os.environ["PYTHONSAFEPATH"] = "1"
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def _launch(given: argparse.Namespace) -> None:
    config = _config(given)
    if given.print_config:
        print(config_file.dump(config), end="")
        return
    if given.learner != 1:
        raise ConfigError(f"--learner must be 1 in this version, got {given.learner}")
    if given.actors < 1:
        raise ConfigError(f"--actors must be at least 1, got {given.actors}")
    if not given.resume:  # a run keeps the policy it began from
        check_source(config.policy)
    run, lock = _open_run(given, config)
    os.set_inheritable(lock, True)
    options = ("--actors", str(given.actors), "--lock", str(lock))
    become(
        "mage_services.cli.run", str(run.root), *options, *(["--resume"] if given.resume else [])
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mage",
        description="Train a language agent that learns to learn: actors play, a learner trains.",
        epilog="mage evaluate RUN_DIR plays a finished run's policy against fixed sets of tasks; "
        "mage replay RUN_DIR computes a run again from its journal; mage journal RUN_DIR lists it; "
        "mage report RUN_DIR … compares runs; mage play RUN_DIR lets you play; "
        "mage ablate says what staleness costs; mage keys makes keys for other machines, from "
        "which mage actor joins a run. Each has its own --help. What the keys of a configuration "
        "mean is said in mage_async/config/schema.py.",
    )
    parser.add_argument("--config", help="a TOML file, or the name of a shipped one (quickstart)")
    parser.add_argument("--actors", type=int, default=4, metavar="N", help="actor processes (4)")
    parser.add_argument("--learner", type=int, default=1, metavar="N", help="learner processes (1)")
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
        choices=methods.METHODS,
        help="write a published method over the configuration, before --set: "
        + ", ".join(methods.METHODS),
        metavar="NAME",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same as --set seed=N")
    parser.add_argument("--resume", action="store_true", help="go on from --run-dir's checkpoint")
    parser.add_argument("--print-config", action="store_true", help="print it and end")
    return parser.parse_args()


def _config(given: argparse.Namespace) -> Config:
    """The configuration asked for, checked; a resumed run keeps its own."""
    assignments = [*given.set, *([] if given.seed is None else [f"seed={given.seed}"])]
    if given.resume:
        if given.run_dir is None:
            raise ConfigError("--resume needs --run-dir, the run to go on with")
        file = RunDirectory(given.run_dir).config
        if not file.is_file():
            raise RunError(f"{given.run_dir}: no config.toml, so there is no run to resume")
        config = config_file.load_recorded(file, assignments, given.method)
    else:
        config = config_file.load(config_file.find(given.config), assignments, given.method)
    check(config)
    return config


def _open_run(given: argparse.Namespace, config: Config) -> tuple[RunDirectory, int]:
    """Make the run's directory, lock it, and write the resolved configuration into it.

    Returns: the run, and the descriptor of its lock.
    """
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{config.environment.name.replace(':', '-')}-{stamp}"
    run = RunDirectory((given.run_dir or Path("runs") / name).resolve())
    try:
        run.root.mkdir(parents=True, exist_ok=True)
        lock = take_lock(run)
        if run.config.exists() and not given.resume:
            raise RunError(
                f"{run.root} holds a run already: add --resume, or choose another --run-dir"
            )
        run.logs.mkdir(exist_ok=True)
        run.checkpoints.mkdir(exist_ok=True)
        write_whole(run.config, config_file.dump(config))
    except OSError as error:
        raise RunError(f"{run.root} cannot be written: {error.strerror}") from error
    return run, lock


def _say(error: MageError) -> int:
    print(f"mage: {error}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    main()
