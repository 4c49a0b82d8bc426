"""`mage doctor`: what is wrong with runs, since which step, and what to do."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from mage_async.errors import RunError
from mage_async.results.run_directory import RunDirectory
from mage_services.terminal.printing import printing

HELP = "Say what is wrong with a run, since which step, why, and which key to change."
EXIT_FOUND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the runs."""
    parser.epilog = (
        "Finished, living and interrupted runs are read alike. The exit status is 1 where anything "
        "is found. The signatures are explained in docs/doctor.md."
    )
    parser.add_argument(
        "run_dir", type=Path, nargs="+", help="a run, or a folder that holds runs, at any depth"
    )


def run(given: argparse.Namespace) -> int:
    """Print the findings of every run, and return whether there are any."""
    from mage_async.doctor import examine
    from mage_async.results.run_files import read_records

    num_found = 0
    with printing():
        for place in _runs(given.run_dir):
            records = read_records(place)
            findings = examine(records)
            num_found += len(findings)
            print(f"{place.root}: {len(records.metrics)} steps, {len(findings) or 'no'} findings")
            for finding in findings:
                print(f"  {finding.sentence()}")
    return EXIT_FOUND if num_found else 0


def _runs(roots: Sequence[Path]) -> Iterator[RunDirectory]:
    """The runs named, and those inside folders that are none themselves.

    Raises: RunError: there is no run.
    """
    for root in roots:
        name = RunDirectory(root).config.name
        found = [root] if (root / name).is_file() else _below(root, name)
        if not found:
            raise RunError(f"{root}: neither a run nor a folder with runs: no {name} in it")
        yield from map(RunDirectory, found)


def _below(root: Path, name: str) -> list[Path]:
    return sorted({file.parent for file in root.rglob(name)})
