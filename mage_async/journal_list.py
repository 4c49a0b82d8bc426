"""`python -m mage_async.journal_list RUN_DIR`, also `mage journal`: a run's journal as lines."""

import argparse
import sys
from pathlib import Path

from mage_async.errors import MageError
from mage_async.launch import EXIT_USAGE, become
from mage_async.replay import check_journal
from mage_async.results.run_directory import RunDirectory

KINDS = ("head", "grant", "trial", "drop", "commit", "publication")


def main() -> None:
    """Check the arguments, then list or export."""
    given = _arguments()
    try:
        check_journal(RunDirectory(given.run_dir))
    except MageError as error:
        print(f"mage journal: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    become("mage_services.cli.journal", str(given.run_dir), *_passed_on(given))


def _passed_on(given: argparse.Namespace) -> list[str]:
    arguments = [part for kind in given.kind for part in ("--kind", kind)]
    for name in ("grant", "step", "export"):
        value = getattr(given, name)
        arguments += [] if value is None else [f"--{name}", str(value)]
    return arguments


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mage journal",
        description="List what a run's journal holds, a line a record: where it lies, what it is "
        "and what it says. Filters may be combined, and hold for an export too. A living run may "
        "be looked at.",
    )
    parser.add_argument("run_dir", type=Path)
    add_filters(parser)
    return parser.parse_args()


def add_filters(parser: argparse.ArgumentParser) -> None:
    """What may be asked for; the same for the page and for the process it becomes."""
    parser.add_argument(
        "--kind", action="append", default=[], choices=KINDS, help="only these; may be given again"
    )
    parser.add_argument("--grant", type=int, metavar="N", help="only what names group N")
    parser.add_argument(
        "--step", type=int, metavar="N", help="only step N, and the groups it was computed from"
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        help="write the trials asked for, with their text, to FILE.jsonl, or with their tokens too "
        "to FILE.parquet (extra `export`: pyarrow)",
    )


if __name__ == "__main__":
    main()
