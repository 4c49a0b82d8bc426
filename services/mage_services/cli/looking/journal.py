"""`mage journal`: list what a run's journal holds, or export its trials."""

import argparse
from pathlib import Path

from mage_async.errors import RunError
from mage_async.results.run_directory import RunDirectory
from mage_services.terminal.printing import printing

HELP = "List what a run's journal holds, a line a record, or export its trials."
KINDS = ("head", "grant", "trial", "drop", "commit", "publication")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run and the filters."""
    parser.epilog = (
        "A line says where a record lies, what it is and what it says. Filters may be combined, "
        "and hold for an export too. The run may still be going on."
    )
    parser.add_argument("run_dir", type=Path)
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


def run(given: argparse.Namespace) -> int:
    """Print the records asked for, or write the trials among them to a file."""
    run_dir = RunDirectory(given.run_dir)
    check_journal(run_dir)
    with printing():
        _list(run_dir, given)
    return 0


def check_journal(run: RunDirectory) -> None:
    """Refuse a directory that is no run with a journal.

    Raises:
        RunError: it has no configuration, or no journal.
    """
    if not run.config.is_file():
        raise RunError(f"{run.root}: no config.toml, so this is no run directory")
    if not any(run.journal.glob("*.log")):
        raise RunError(f"{run.root}: the run has no journal yet")


def _list(run: RunDirectory, given: argparse.Namespace) -> None:
    from mage_async.inference.chat_files import load_chat
    from mage_async.protocol.journal_listing import RecordFilter, line_of, trained_in
    from mage_async.protocol.journal_records import Commit
    from mage_async.protocol.messages import TrialResult
    from mage_services.journal.export import export
    from mage_services.journal.reader import open_journal

    journal = open_journal(run.journal)
    trained = frozenset() if given.step is None else trained_in(journal.records(0), given.step)
    wanted = RecordFilter(tuple(given.kind), given.grant, given.step, trained)
    records = filter(wanted.wants, journal.records(0))
    if given.export is not None:
        results = (record for record in records if isinstance(record, TrialResult))
        count = export(results, load_chat(run.policy), given.export)
        print(f"{count} trials in {given.export}")
        return
    is_empty = True
    for record in records:
        is_empty = False
        kind, text = line_of(record)
        print(f"{kind:<12} {text}")
    if is_empty:
        steps = [record.version for record in journal.records(0) if isinstance(record, Commit)]
        there = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
        print(f"nothing matches; the journal has {there}")
    if journal.torn is not None:
        print(f"{journal.torn.name} has a torn tail, from byte {journal.torn_at} on")
