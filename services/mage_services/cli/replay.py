"""`mage replay`: train the committed batches of a run's journal again, without actors.

The replay begins at the oldest weights (the initial ones, or those of a checkpoint) after which the
journal has every step, and compares the digest of the weights after each step with that of the
commit. It changes no file of the run.
"""

import argparse
from pathlib import Path

from mage_async.errors import RunError, RunFailed
from mage_async.results.run_directory import RunDirectory, checkpoints, step_of
from mage_services.cli.options import add_number

HELP = "Train every committed batch of a run again, and compare the weights."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run and the last step."""
    parser.epilog = (
        "No actor plays: the batches come from the journal. The weights after each step are "
        "compared with what the run committed, bit for bit on the CPU. Where they differ, the exit "
        "status is 1 and the step and the first tensor are named. The states of methods, "
        "and the guidance that they gave each group, are compared too."
    )
    parser.add_argument("run_dir", type=Path)
    add_number(parser, "--to-step", "stop after step N")


def run(given: argparse.Namespace) -> int:
    """Replay and print each step.

    Raises:
        RunError: there is no journal, it lacks steps after the initial weights and after each
            checkpoint, or it has no step to compare.
        RunFailed: a step's weights, a method's state or the guidance of a group differ from those
            that the run committed.
    """
    from mage_async.admission.ledger import Ledger
    from mage_async.admission.replay import RecordsWithConfig, replay
    from mage_async.assembly import edited, environment_of, own_sources
    from mage_async.config import config_file
    from mage_async.methods.method import Methods
    from mage_async.protocol.journal_records import first_needed
    from mage_async.tasks.league import League
    from mage_services.journal.reader import check_journal, open_journal
    from mage_services.learner.rank_processes import RankProcesses
    from mage_services.learner.trainer_thread import Training

    check_journal(RunDirectory(given.run_dir))
    run = RunDirectory(given.run_dir.resolve())
    config, journal = config_file.load_recorded(run.config), open_journal(run.journal)
    # Find the oldest weights after which the journal has every step, and the first of its files
    # (segments) to read. The weights are the initial ones (None) or those of a checkpoint.
    for checkpoint in (None, *checkpoints(run.checkpoints)):
        version = 0 if checkpoint is None else step_of(checkpoint)
        if (first := first_needed(journal.segments, version)) is not None:
            break
    else:
        raise RunError(
            f"{run.journal} lacks segments that the initial policy and every checkpoint would "
            "need: nothing can be replayed"
        )
    # `replay` fills an empty ledger and an empty league; only the batches are used here.
    admission = config.admission
    ledger = Ledger(admission.groups_per_step, admission.max_staleness, admission.trials_per_group)
    methods = Methods(config, environment_of(config))
    records, sources = RecordsWithConfig(journal.records(first)), own_sources(config)
    with RankProcesses(run, config) as ranks:
        training = Training.of(run, config, checkpoint, ranks.begin(config, checkpoint))
        version = began = training.trainer.version
        for committed in replay(records, ledger, League(), methods):
            if given.to_step is not None and committed.commit.version > given.to_step:
                break
            if committed.commit.version > version:
                _, difference = training.redo(committed, edited(records.sources, sources))
                if difference:
                    raise RunFailed(difference)
                version = committed.commit.version
                print(f"step {version}: {committed.commit.digest} as committed", flush=True)
    if version == began:
        last = "" if given.to_step is None else f" up to step {given.to_step}"
        raise RunError(
            f"{run.journal}: nothing was compared: the weights of step {began} are the oldest that "
            f"a replay can begin with, and no step after them is committed{last}"
        )
    print(f"{version - began} steps from step {began} on: every digest agrees")
    return 0
