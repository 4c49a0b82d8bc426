"""`python -m mage_async.play RUN_DIR`, also `mage play`: sit in the agent's place, or watch it."""

import argparse
import sys
from pathlib import Path

from mage_async.arguments import positive
from mage_async.assembly import environment_of
from mage_async.config import config_file
from mage_async.environments.environment import Environment
from mage_async.errors import ConfigError, MageError
from mage_async.evaluate import check_policy
from mage_async.launch import EXIT_USAGE, become
from mage_async.results.run_directory import RunDirectory
from mage_async.tasks.population import version_of


def main() -> None:
    """Check the arguments, then play."""
    given = _arguments()
    try:
        run = RunDirectory(given.run_dir)
        check_policy(run)
        if given.member is not None:
            environment = environment_of(config_file.load_recorded(run.config))
            _check_member(environment, given.member)
    except MageError as error:
        print(f"mage play: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    become("mage_services.cli.play", str(given.run_dir), *_passed_on(given))


def _check_member(environment: Environment, member: str) -> None:
    known = (*environment.members("train"), *environment.members("heldout"))
    if version_of(member) is None and member not in known:
        raise ConfigError(f"no member {member!r}; there are {', '.join(sorted(known))}")


def _passed_on(given: argparse.Namespace) -> list[str]:
    named = {"member": given.member, "seed": given.seed, "episodes": given.episodes}
    arguments = [part for key, v in named.items() if v is not None for part in (f"--{key}", str(v))]
    return [*arguments, *(["--watch"] if given.watch else [])]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mage play",
        description="Play a trial of a run's environment in the agent's place, against somebody "
        "hidden; then see what the agent makes of the very same task. With --watch only the "
        "agent plays.",
    )
    parser.add_argument("run_dir", type=Path)
    add_options(parser)
    return parser.parse_args()


def add_options(parser: argparse.ArgumentParser) -> None:
    """What may be asked for; the same for the page and for the process it becomes."""
    parser.add_argument("--watch", action="store_true", help="let the agent play")
    parser.add_argument(
        "--member",
        metavar="NAME",
        help="whom you play against (any held-out one, hidden); or a "
        "version that the run has kept, such as policy-20",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the task's luck (a new one)")
    parser.add_argument("--episodes", type=positive, metavar="K", help="(as in training)")


if __name__ == "__main__":
    main()
