"""List a journal, or export its trials: what `mage_async.journal_list` becomes."""

import argparse
import sys
from pathlib import Path

from mage_async.errors import MageError
from mage_async.inference.chat_files import load_chat
from mage_async.journal_list import add_filters
from mage_async.policy_version import oldest
from mage_async.protocol.journal_records import Commit, Dropped, Granted, Head, Published, Record
from mage_async.protocol.messages import TrialResult
from mage_async.results.run_directory import RunDirectory
from mage_services.journal.export import export
from mage_services.journal.reader import JournalOnDisk, open_journal


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
    trained = _trained_in(journal, given.step)
    records = (record for record in journal.records(0) if _is_wanted(record, given, trained))
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


def _trained_in(journal: JournalOnDisk, step: int | None) -> set[int]:
    """Groups that a step was computed from."""
    if step is None:
        return set()
    commits = (record for record in journal.records(0) if isinstance(record, Commit))
    return {grant for commit in commits if commit.version == step for grant in commit.grants}


def _is_wanted(record: Record, given: argparse.Namespace, trained: set[int]) -> bool:
    if given.kind and line_of(record)[0] not in given.kind:
        return False
    if given.step is not None and not _is_of_step(record, given.step, trained):
        return False
    return given.grant is None or given.grant in _grants(record)


def _is_of_step(record: Record, step: int, trained: set[int]) -> bool:
    """Its commit and publication, and what it was computed from."""
    if isinstance(record, Commit | Published):
        return record.version == step
    return isinstance(record, Granted | TrialResult) and bool(_grants(record) & trained)


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


if __name__ == "__main__":
    main()
