"""`python -m mage_async.compare RUN_DIR …`, also `mage report`: runs side by side in one page."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mage_async.errors import MageError, RunError
from mage_async.launch import EXIT_USAGE
from mage_async.report import render
from mage_async.report.comparison_page import compare, lines
from mage_async.report.experiment_arms import Run
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_document, read_records

SUMMARY_PARTS = ("environment", "seed", "complete")
"""Of every summary, whatever became of its run."""


def main() -> None:
    """Read the runs, write the page and print its table."""
    given = _arguments()
    try:
        _report([RunDirectory(root) for root in given.run_dir], given.output)
    except MageError as error:
        print(f"mage report: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def _report(named: Sequence[RunDirectory], output: Path | None) -> None:
    places = list({place.root.resolve(): place for place in named}.values())
    if len(places) < len(named):
        print("a run that is named twice is taken once")
    runs = [read_run(place) for place in places]
    is_single = len(runs) == 1
    try:
        page = render(places[0], runs[0].summary) if is_single else compare(runs)
        rows = [] if is_single else lines(runs)
    except KeyError as error:
        raise RunError(
            f"a file of {' or '.join(str(place.root) for place in places)} lacks {error}: it is "
            "damaged, or another version wrote it; `mage evaluate` writes the summary anew"
        ) from error
    _print(rows)
    file = output or (places[0].report if is_single else Path("comparison.html"))
    try:
        file.write_text(page)
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror}") from error
    print(f"report: {file}")


def read_run(place: RunDirectory) -> Run:
    """A run's records and its summary.

    Raises:
        RunError: it is no run, or has no summary yet.
    """
    records = read_records(place)
    if not place.summary.is_file():
        raise RunError(f"{place.root} has no {place.summary.name}: it has not ended")
    summary = read_document(place.summary)
    missing = [name for name in SUMMARY_PARTS if name not in summary]
    if missing:
        raise RunError(f"{place.summary} lacks {', '.join(missing)}: it is damaged")
    return Run(records, summary)


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    width = max((len(row["arm"]) for row in rows), default=0)
    for row in rows:
        print(
            f"{row['arm']:<{width}}  {row['runs']} runs  held-out, last episode {row['last']}  "
            f"blind {row['blind']}  swapped {row['swapped']}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mage report",
        description="Compare runs in one page: those that differ only in their seed are one arm, "
        "with 95 % intervals over its runs. Of a single run its own page is written again.",
    )
    parser.add_argument("run_dir", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, metavar="FILE", help="(comparison.html)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
