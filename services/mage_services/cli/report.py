"""`mage report`: compare runs in one page, or write the page of a single run again."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from mage_async.errors import RunError
from mage_async.results.run_directory import RunDirectory

HELP = "Compare runs in one page, or write the page of a single run again."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the runs and the page."""
    parser.epilog = (
        "Runs that differ only in their seed are one arm, with 95 % intervals over its runs."
    )
    parser.add_argument("run_dir", type=Path, nargs="+")
    page = "page to write (default: comparison.html, or the report.html of a single run)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=page)


def run(given: argparse.Namespace) -> int:
    """Read the runs, write the page and print its table."""
    write_report([RunDirectory(root) for root in given.run_dir], given.output)
    return 0


def write_report(named: Sequence[RunDirectory], output: Path | None) -> None:
    """Write the page of one run, or of several, and print a line for each arm.

    Raises:
        RunError: a directory is no run, a run has not ended or is damaged, or the page cannot be
            written.
    """
    from mage_async.pages.charts import counted
    from mage_async.pages.comparison import compare, lines, read_run
    from mage_async.pages.report import render

    places = list({place.root.resolve(): place for place in named}.values())
    if len(places) < len(named):
        print("a run that is named twice is taken once")
    runs = [read_run(place) for place in places]
    is_single = len(runs) == 1
    page = render(places[0], runs[0].summary) if is_single else compare(runs)
    rows = [] if is_single else lines(runs)
    width = max((len(row["arm"]) for row in rows), default=0)
    for row in rows:
        print(
            f"{row['arm']:<{width}}  {counted(row['runs'], 'run')}{row['unfinished']}  "
            f"held-out, last episode {row['last']}  blind {row['blind']}  "
            f"swapped {row['swapped']}"
        )
    file = output or (places[0].report if is_single else Path("comparison.html"))
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror}") from error
    print(f"report: {file}")
