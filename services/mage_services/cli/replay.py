"""Compute a run again from its journal, without actors: what `mage_async.replay` becomes.

Begins at the oldest weights from which the journal is complete, trains each committed batch again
and compares the digest of the weights with the commit's. Nothing of the run is changed.
"""

import argparse
import sys
from pathlib import Path

from mage_async.admission.ledger import SlotLedger
from mage_async.admission.recovery import replay
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import MageError, RunError
from mage_async.policy.checkpoint import checkpoints
from mage_async.protocol.journal_records import first_needed
from mage_async.results.run_directory import RunDirectory
from mage_async.tasks.population import League
from mage_services.journal.reader import JournalOnDisk, open_journal
from mage_services.learner.training import Training


def main() -> None:
    """Replay, say each step, and end with 1 at the first that differs."""
    parser = argparse.ArgumentParser(description="Compute a run again from its journal.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--to-step", type=int)
    given = parser.parse_args()
    try:
        _replay(RunDirectory(given.run_dir.resolve()), given.to_step)
    except MageError as error:
        sys.exit(f"mage replay: {error}")


def _replay(run: RunDirectory, to_step: int | None) -> None:
    config, journal = config_file.load_recorded(run.config), open_journal(run.journal)
    training, first = _begin(run, config, journal)
    version = began = training.trainer.version
    for committed in replay(journal.records(first), _ledger(config), League()):
        if to_step is not None and committed.commit.version > to_step:
            break
        if committed.commit.version > version:
            _, difference = training.redo(committed)
            if difference:
                raise RunError(difference)
            version = committed.commit.version
            print(f"step {version}: {committed.commit.digest} as committed", flush=True)
    print(f"{version - began} steps from step {began} on: every digest agrees")


def _begin(run: RunDirectory, config: Config, journal: JournalOnDisk) -> tuple[Training, int]:
    """The oldest weights that the journal can be replayed from, and its first segment for them."""
    for checkpoint in (None, *checkpoints(run.checkpoints)):
        version = 0 if checkpoint is None else int(checkpoint.name.removeprefix("step_"))
        first = first_needed(journal.segments, version)
        if first is not None:
            return Training.of(run, config, checkpoint), first
    raise RunError(f"{run.journal} holds no steps behind the policy or a checkpoint of the run")


def _ledger(config: Config) -> SlotLedger:
    rules = config.admission
    return SlotLedger(rules.groups_per_step, rules.max_staleness, rules.trials_per_group)


if __name__ == "__main__":
    main()
