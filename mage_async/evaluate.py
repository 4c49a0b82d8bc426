"""`python -m mage_async.evaluate RUN_DIR`: play a run's policy against fixed sets of tasks, with
controls.
"""

import argparse
import sys
from pathlib import Path

from mage_async.arguments import positive
from mage_async.errors import MageError, RunError
from mage_async.launch import EXIT_USAGE, become
from mage_async.results.run_directory import RunDirectory


def main() -> None:
    """Check the arguments, then become the evaluator."""
    given = _arguments()
    try:
        check_policy(RunDirectory(given.run_dir))
    except MageError as error:
        print(f"mage evaluate: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    episodes = () if given.episodes is None else ("--episodes", str(given.episodes))
    trials = ("--trials", str(given.trials))
    become("mage_services.cli.evaluate", str(given.run_dir), *trials, *episodes)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mage evaluate",
        description="Return of each episode on train and held-out tasks with 95 % intervals; "
        "reference values and two causal controls: blind (earlier episodes are not in the context) "
        "and swapped (somebody else is hidden from the last episode on). Adaptation is what the "
        "controls take away.",
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--trials", type=positive, default=1024, metavar="N", help="per set (1024)")
    parser.add_argument(
        "--episodes", type=positive, metavar="K", help="of a trial; may differ from the training's"
    )
    return parser.parse_args()


def check_policy(run: RunDirectory) -> None:
    """Refuse what is no run with a policy."""
    if not run.config.is_file():
        raise RunError(f"{run.root}: no config.toml, so this is no run directory")
    if not run.policy.exists():
        raise RunError(f"{run.root}: the run has no policy yet")


if __name__ == "__main__":
    main()
