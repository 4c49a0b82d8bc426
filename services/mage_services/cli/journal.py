"""`mage journal`: list the records of a run's journal, or export its trials."""

import argparse
from pathlib import Path

from mage_async.errors import RunError
from mage_async.results.run_directory import RunDirectory
from mage_services.cli.options import add_number

HELP = "List the records of a run's journal, one per line, or export its trials."
KINDS = ("head", "grant", "trial", "drop", "commit", "publication", "receipt")
"""Kinds of records; each line begins with its kind. A `head` is the first record of a file of the
journal; a `receipt` says that an engine has loaded the weights of a version.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run and the filters."""
    parser.epilog = (
        "A line has the kind of a record and its main fields; the texts of trials are in an export "
        "and on the pages of `mage view`. Filters can be combined, and select the trials of an "
        "export too. The run may still be going on."
    )
    parser.add_argument("run_dir", type=Path)
    kinds = "only records of this kind; can be given several times"
    parser.add_argument("--kind", action="append", default=[], choices=KINDS, help=kinds)
    add_number(parser, "--grant", "only the records of group N, the number in its grants")
    add_number(parser, "--step", "only the records of step N, and of the groups that it trained")
    export = (
        "write the selected trials, with text, returns, advantages and the environment's info, to "
        "FILE.jsonl; with their tokens too to FILE.parquet or FILE.dataset (extra `export`: "
        "pyarrow), or to FILE.atif, a folder of trajectories that Harbor reads"
    )
    parser.add_argument("--export", type=Path, metavar="FILE", help=export)


def run(given: argparse.Namespace) -> int:
    """Print the records that match the filters, or export their trials."""
    from mage_services.journal.reader import check_journal

    run_dir = RunDirectory(given.run_dir)
    check_journal(run_dir)
    if given.export is None:
        _list(run_dir, given)
    else:
        _export(run_dir, given)
    return 0


def _list(run: RunDirectory, given: argparse.Namespace) -> None:
    """Print a line for each record that matches the filters."""
    from mage_async.protocol.journal_records import RecordFilter, line_of, trained_in
    from mage_services.journal.reader import open_journal, steps_in_words

    journal = open_journal(run.journal)
    trained = frozenset() if given.step is None else trained_in(journal.records(), given.step)
    record_filter = RecordFilter(tuple(given.kind), given.grant, given.step, trained)
    is_empty = True
    for record in filter(record_filter.wants, journal.records()):
        is_empty = False
        kind, text = line_of(record)
        print(f"{kind:<12} {text}")
    if is_empty:
        print(f"nothing matches; the journal has {steps_in_words(journal)}")
    if journal.torn is not None:
        print(f"{journal.torn.name} has a torn tail, from byte {journal.torn_at} on")


def _export(run: RunDirectory, given: argparse.Namespace) -> None:
    """Write the trials that match the filters to a file."""
    from mage_services.journal.export import check_file, export, selected_trials

    if given.kind and "trial" not in given.kind:
        raise RunError(f"an export is made of trials, and --kind asks for {', '.join(given.kind)}")
    check_file(given.export)
    # Imported after the checks of the options, because the library of tokenizers takes a while.
    from mage_async.inference.chat_files import load_chat

    chat = load_chat(run.policy)
    trials = selected_trials(run, chat, step=given.step, grant=given.grant)
    count = export(trials, chat, given.export, run=run.root.resolve().name)
    print(f"{count} trial{'' if count == 1 else 's'} in {given.export}")
