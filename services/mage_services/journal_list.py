"""List a journal, or export its trials: what `mage_async.journal_list` becomes."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from mage_async.errors import MageError
from mage_async.inference.chat_files import load_chat
from mage_async.journal import Commit, Dropped, Granted, Head, Published, Record
from mage_async.journal_list import add_filters
from mage_async.policy_version import oldest
from mage_async.readable import readable
from mage_async.run_directory import RunDirectory
from mage_async.wire import TrialResult
from mage_services.journal_reading import open_journal


def main() -> None:
    """Print the records asked for, or write the trials among them to a file."""
    parser = argparse.ArgumentParser(description="List a journal.")
    parser.add_argument("run_dir", type=Path)
    add_filters(parser)
    given = parser.parse_args()
    try:
        _list(RunDirectory(given.run_dir), given)
    except MageError as error:
        sys.exit(f"mage journal: {error}")
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()


def _list(run: RunDirectory, given: argparse.Namespace) -> None:
    journal = open_journal(run.journal)
    records = (record for record in journal.records(0) if _is_wanted(record, given))
    if given.export is not None:
        _export(run, records, given.export)
        return
    for record in records:
        kind, text = line_of(record)
        print(f"{kind:<12} {text}")
    if journal.torn is not None:
        print(f"{journal.torn.name} has a torn tail, from byte {journal.torn_at} on")


def line_of(record: Record) -> tuple[str, str]:
    """Kind of a record, and what it says in a line."""
    match record:
        case Head():
            groups = len(record.groups)
            return "head", f"step {record.version}, {groups} groups in flight"
        case Granted(grant=grant):
            what = f"{grant.member} seat {grant.seat} at step {grant.version}"
            return "grant", f"group {grant.grant}.{grant.epoch} to {record.peer}: {what}"
        case TrialResult(trial=trial):
            drawn = oldest(run for part in trial.segments for run in part.versions)
            rewards = ", ".join(f"{reward:g}" for reward in trial.episode_rewards())
            name = f"group {record.grant}.{record.epoch} trial {trial.index}"
            return "trial", f"{name}: {trial.num_tokens()} tokens from step {drawn}, [{rewards}]"
        case Dropped():
            return "drop", f"group {record.grant}: {record.reason}"
        case Commit():
            grants = " ".join(map(str, record.grants))
            return "commit", f"step {record.version} {record.digest}: groups {grants}"
        case Published():
            return "publication", f"step {record.version} {record.path}"


def _is_wanted(record: Record, given: argparse.Namespace) -> bool:
    if given.kind and line_of(record)[0] not in given.kind:
        return False
    if given.step is not None and not (
        isinstance(record, Commit | Published) and record.version == given.step
    ):
        return False
    return given.grant is None or given.grant in _grants(record)


def _grants(record: Record) -> set[int]:
    match record:
        case Head():
            return {granted.grant.grant for granted in record.groups}
        case Granted():
            return {record.grant.grant}
        case TrialResult() | Dropped():
            return {record.grant}
        case Commit():
            return set(record.grants)
        case Published():
            return set()


def _export(run: RunDirectory, records: Iterable[Record], file: Path) -> None:
    chat, count = load_chat(run.policy), 0
    with file.open("w") as out:
        for record in records:
            if isinstance(record, TrialResult):
                version = oldest(part for s in record.trial.segments for part in s.versions)
                line = {"grant": record.grant, "trial": record.trial.index}
                line |= readable(record.trial, chat, version)
                out.write(json.dumps(line) + "\n")
                count += 1
    print(f"{count} trials in {file}")


if __name__ == "__main__":
    main()
