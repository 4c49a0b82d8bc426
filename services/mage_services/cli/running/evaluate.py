"""`mage evaluate`: play a run's policy against fixed sets of tasks, with controls.

The final sets are played with the run's newest checkpoint, and the table is printed. Evaluation,
summary and report of the run are written again where the environment and the number of episodes are
the run's own; otherwise into a folder of the run.
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mage_async.errors import ConfigError
from mage_async.results.run_directory import RunDirectory
from mage_services.cli.running.other_environment import OtherEnvironment, check_words

if TYPE_CHECKING:
    from mage_async.config.schema import Config
    from mage_async.results.score import Score
    from mage_services.actor.figures import Ladder
    from mage_services.actor.recollection import Recall

REPEATS = 16
HELP = "Measure a run's policy on fixed sets of train and held-out tasks, with controls."


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be measured."""

    num_trials: int
    episodes: int | None
    repeats: int
    """Plays of each task for the diversity; 0: it is not measured."""
    ladder: str | None
    """Of harder tasks; empty: the first; None: none are played."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run, and how long and how often is played."""
    parser.epilog = (
        "The table holds the return of each episode with 95 % intervals, reference values and two "
        "causal controls: blind (earlier episodes are not in the context) and swapped (somebody "
        "else is hidden from the last episode on). Adaptation is what the controls take away."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(
        "--trials", type=positive, default=1024, metavar="N", help="trials per set (1024)"
    )
    parser.add_argument(
        "--episodes",
        type=positive,
        metavar="K",
        help="episodes of a trial, which may be others than in training",
    )
    parser.add_argument(
        "--diversity",
        type=positive,
        nargs="?",
        const=REPEATS,
        metavar="R",
        help="also measure the entropy of distinct trajectories by episode, over R plays of each "
        f"held-out task ({REPEATS})",
    )
    parser.add_argument(
        "--harder",
        nargs="?",
        const="",
        metavar="LADDER",
        help="also play held-out tasks that are harder than those trained on, such as more boxes; "
        "LADDER names one of those that the environment declares (its first); of a mix, PART or "
        "PART/LADDER",
    )
    parser.add_argument(
        "--environment",
        metavar="NAME",
        help="play another environment than in training; what is measured stands in a folder of "
        "its own, in the run's",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=VALUE",
        help="with --environment: a key of the configuration, such as environment.options.size=5",
    )


def positive(text: str) -> int:
    """A whole number above 0; for argparse's `type`."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return number


def run(given: argparse.Namespace) -> int:
    """Play the sets, and print and write what they measured.

    Raises:
        ConfigError: keys are set without an environment.
    """
    from mage_services.actor.play_session import check_policy

    check_policy(RunDirectory(given.run_dir))
    run_dir = RunDirectory(given.run_dir.resolve())
    if given.environment is None and given.set:
        raise ConfigError("--set changes what another environment is played with: give its name")
    other = OtherEnvironment(given.environment, tuple(given.set)) if given.environment else None
    asked = Asked(given.trials, given.episodes, given.diversity or 0, given.harder)
    _evaluate(run_dir, asked, other)
    return 0


def _evaluate(run: RunDirectory, asked: Asked, other: OtherEnvironment | None) -> None:
    import uvloop

    from mage_async.assembly import environment_of
    from mage_async.config import config_file
    from mage_async.report import render
    from mage_async.results.summary import summarise, write_summary
    from mage_services.actor.evaluator import write_evaluation
    from mage_services.actor.figures import ladder_of, times_as_long
    from mage_services.actor.play_session import newest
    from mage_services.actor.recollection import recall_of, told_nothing
    from mage_services.terminal.view import make_view

    config = other.config(run.config) if other else config_file.load_recorded(run.config)
    own, episodes = config.evaluation.episodes, asked.episodes
    ladder = None if asked.ladder is None else ladder_of(config, asked.ladder)
    policy, version = newest(run, config)
    if other:
        check_words(config, policy)
    began = time.monotonic()
    target = run if other is None else replace(run, root=run.root / other.folder())
    if episodes not in (None, own):
        target = replace(target, root=target.root / f"episodes_{episodes}")
    cost = _cost_of(run) if target is run else None
    roomy = _roomy(config, episodes, times_as_long(config, ladder))
    recall = told_nothing if other else recall_of(run, config, version)
    wanted = replace(asked, episodes=episodes or own)
    sets, more = uvloop.run(_play(roomy, policy, wanted, ladder, recall))
    if target is not run:
        target.root.mkdir(exist_ok=True, parents=True)
        target.config.write_text(config_file.dump(config))
    write_evaluation(target, sets, environment_of(config), version, {}, more)
    wall_s, processor_s = cost or (time.monotonic() - began, time.process_time())
    summary = summarise(target, wall_s=wall_s, processor_s=processor_s)
    if target is not run:  # it holds no training, which was the run's
        summary |= {"steps": version, "complete": version >= config.learner.steps}
    write_summary(target, summary)
    target.report.write_text(render(target, summary))
    make_view(config, target, is_terminal=sys.stdout.isatty()).close(summary)


def _roomy(config: "Config", episodes: int | None, times_as_long: float) -> "Config":
    """The configuration with contexts that hold more episodes, or longer ones, than the run's own
    trials have.
    """
    import msgspec

    own = max(config.trial.episodes, config.evaluation.episodes)
    factor = max(1.0, (episodes or own) / own) * times_as_long
    max_tokens = math.ceil(config.engine.max_tokens * factor)
    engine = msgspec.structs.replace(config.engine, max_tokens=max_tokens)
    return msgspec.structs.replace(config, engine=engine)


async def _play(
    config: "Config",
    policy: Path,
    asked: Asked,
    ladder: "Ladder | None",
    recall: "Recall",
) -> tuple[dict[str, "Score"], dict[str, Any]]:
    """Play the final sets with the controls; also what else is asked for, as plain data.
    Cancellation abandons them.
    """
    import msgspec

    from mage_async.assembly import environment_of
    from mage_async.inference.chat_files import load_chat
    from mage_services.actor.evaluator import Evaluator
    from mage_services.actor.figures import diversity_of, score_rungs
    from mage_services.engines.choice import make_engine
    from mage_services.environments.workers import Workers

    chat = load_chat(policy, thinking=config.transcript.thinking)
    environment = environment_of(config)
    assert asked.episodes is not None
    made, more = make_engine(config, policy, "evaluate"), dict[str, Any]()
    async with made as engine, Workers.of(config.environment) as workers:
        evaluator = Evaluator(config, environment, chat, engine, workers, asked.episodes)
        evaluator.recall = recall
        sets = await evaluator.final(asked.num_trials)
        if asked.repeats:
            more["diversity"] = await diversity_of(evaluator, asked.num_trials, asked.repeats)
        if ladder is not None:
            more["harder"] = await score_rungs(
                ladder, sets["heldout"], chat, engine, workers, asked.episodes
            )
    return sets, msgspec.to_builtins(more)


def _cost_of(run: RunDirectory) -> tuple[float, float | None] | None:
    """The run's own wall time, where it is known, and its CPU time, which older runs lack."""
    from mage_async.results.run_files import read_document

    summary = read_document(run.summary)
    return (summary["wall_s"], summary.get("processor_s")) if "wall_s" in summary else None
