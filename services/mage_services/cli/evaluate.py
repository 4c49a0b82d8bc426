"""`mage evaluate`: play a checkpoint of a run on fixed sets of tasks, with controls.

The results are printed as a table. Evaluation, summary and report of the run are written again;
with an older checkpoint, another environment, another number of episodes, or fewer trials than an
earlier evaluation, they are written into a folder of the run.
"""

import argparse
import sys
from pathlib import Path

from mage_async.errors import ConfigError
from mage_async.results.run_directory import RunDirectory
from mage_services.cli.options import add_checkpoint, add_number, add_set, positive

HELP = "Measure a run's policy on fixed sets of train and held-out tasks, with controls."
REPEATS = 16
"""Number of plays of each task with `--diversity`, if the option has no number."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run and the measurements."""
    parser.epilog = (
        "The table has the return of each episode with 95 % intervals, reference values and two "
        "causal controls: blind (earlier episodes are not in the context) and swapped (in the last "
        "episode, the hidden task variant is another one). The return that is lost under a control "
        "is due to adaptation."
    )
    parser.add_argument("run_dir", type=Path)
    add_checkpoint(parser)
    trials = "trials per set (default: evaluation.final_trials of the run)"
    add_number(parser, "--trials", trials, type=positive)
    episodes = "number of episodes of a trial, which may differ from training"
    add_number(parser, "--episodes", episodes, type=positive, metavar="K")
    diversity = (
        "also measure the entropy of distinct trajectories by episode, over R plays of each "
        f"held-out task (R is {REPEATS} if left out)"
    )
    optional = {"nargs": "?", "const": REPEATS}
    add_number(parser, "--diversity", diversity, type=positive, metavar="R", **optional)
    harder = (
        "also play held-out tasks that are harder than those trained on, such as more boxes; "
        "LADDER is the name of one of the environment's ladders of harder options (default: its "
        "first); of a mix, PART or PART/LADDER"
    )
    parser.add_argument("--harder", nargs="?", const="", metavar="LADDER", help=harder)
    environment = (
        "play another environment than in training; the results go into a folder of their own "
        "inside the run's"
    )
    parser.add_argument("--environment", metavar="NAME", help=environment)
    key = "with --environment: change a key, such as environment.options.size=5"
    add_set(parser, key)


def run(given: argparse.Namespace) -> int:
    """Play the sets, and print and write the results.

    Raises:
        ConfigError: keys are set without an environment; otherwise as `evaluate`.
        RunError: as `evaluate`.
    """
    from mage_services.api.evaluation import evaluate
    from mage_services.terminal.plain_lines import make_view

    if given.environment is None and given.set:
        raise ConfigError("--set needs --environment NAME: it changes keys of that environment")
    target, config, summary = evaluate(
        RunDirectory(given.run_dir.resolve()),
        trials=given.trials,
        episodes=given.episodes,
        diversity=given.diversity,
        harder=given.harder,
        environment=given.environment,
        assignments=given.set,
        checkpoint=given.checkpoint,
    )
    # A view prints the table when it is closed.
    make_view(config, target, is_terminal=sys.stdout.isatty()).close(summary)
    return 0
