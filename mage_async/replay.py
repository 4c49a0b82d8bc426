"""`python -m mage_async.replay RUN_DIR [--to-step N]`: compute a run again from its journal and
compare every digest of its weights.
"""

import argparse
import sys
from pathlib import Path

from mage_async.errors import MageError, RunError
from mage_async.launch import EXIT_USAGE, become
from mage_async.results.run_directory import RunDirectory


def main() -> None:
    """Check the arguments, then replay."""
    given = _arguments()
    try:
        check_journal(RunDirectory(given.run_dir))
    except MageError as error:
        print(f"mage replay: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    to_step = () if given.to_step is None else ("--to-step", str(given.to_step))
    become("mage_services.cli.replay", str(given.run_dir), *to_step)


def check_journal(run: RunDirectory) -> None:
    """Refuse what is no run with a journal."""
    if not run.config.is_file():
        raise RunError(f"{run.root}: no config.toml, so this is no run directory")
    if not any(run.journal.glob("*.log")):
        raise RunError(f"{run.root}: the run has no journal yet")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mage replay",
        description="Train every committed batch of a run again, without actors, and compare the "
        "weights after each step with what the run committed. Exit status 1, the step and the "
        "first tensor where they differ. Bit for bit on the CPU.",
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--to-step", type=int, metavar="N", help="stop after step N")
    return parser.parse_args()


if __name__ == "__main__":
    main()
