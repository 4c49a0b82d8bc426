"""`mage evaluate`: play a run's policy against fixed sets of tasks, with controls.

The final sets are played with the run's newest checkpoint. The table is printed; the evaluation,
the summary and the report of the run are written again where the number of episodes is the run's
own.
"""

import argparse
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mage_async.results.run_directory import RunDirectory

if TYPE_CHECKING:
    from mage_async.config.schema import Config
    from mage_async.results.score import Score

HELP = "Measure a run's policy on fixed sets of train and held-out tasks, with controls."


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
    """Play the sets, and print and write what they measured."""
    from mage_services.actor.play_session import check_policy

    check_policy(RunDirectory(given.run_dir))
    _evaluate(RunDirectory(given.run_dir.resolve()), given.trials, given.episodes)
    return 0


def _evaluate(run: RunDirectory, num_trials: int, episodes: int | None) -> None:
    import uvloop

    from mage_async.assembly import environment_of
    from mage_async.config import config_file
    from mage_async.report import render
    from mage_async.results.summary import summarise, write_summary
    from mage_services.actor.evaluator import write_evaluation
    from mage_services.actor.play_session import newest
    from mage_services.terminal.view import make_view

    config = config_file.load_recorded(run.config)
    own = config.evaluation.episodes
    policy, version = newest(run, config)
    began = time.monotonic()
    target = (
        run if episodes in (None, own) else replace(run, root=run.root / f"episodes_{episodes}")
    )
    cost = _cost_of(target)
    sets = uvloop.run(_play(_roomy(config, episodes), policy, num_trials, episodes or own))
    if target is not run:
        target.root.mkdir(exist_ok=True)
        target.config.write_text(run.config.read_text())
    write_evaluation(target, sets, environment_of(config), version, {})
    wall_s, processor_s = cost or (time.monotonic() - began, time.process_time())
    summary = summarise(target, wall_s=wall_s, processor_s=processor_s)
    if target is run:
        write_summary(run, summary)
        run.report.write_text(render(run, summary))
    make_view(config, target, is_terminal=sys.stdout.isatty()).close(summary)


def _roomy(config: "Config", episodes: int | None) -> "Config":
    """The configuration with contexts that hold more episodes than the run's own trials have."""
    import msgspec

    own = max(config.trial.episodes, config.evaluation.episodes)
    if episodes is None or episodes <= own:
        return config
    max_tokens = math.ceil(config.engine.max_tokens * episodes / own)
    engine = msgspec.structs.replace(config.engine, max_tokens=max_tokens)
    return msgspec.structs.replace(config, engine=engine)


async def _play(
    config: "Config", policy: Path, num_trials: int, episodes: int
) -> dict[str, "Score"]:
    """Play the final sets with the controls. Cancellation abandons them."""
    from mage_async.assembly import environment_of
    from mage_async.inference.chat_files import load_chat
    from mage_services.actor.evaluator import Evaluator
    from mage_services.engines.choice import make_engine
    from mage_services.environments.workers import Workers

    chat = load_chat(policy, thinking=config.transcript.thinking)
    environment = environment_of(config)
    made = make_engine(config, policy, "evaluate")
    async with made as engine, Workers.of(config.environment) as workers:
        evaluator = Evaluator(config, environment, chat, engine, workers, episodes)
        return await evaluator.final(num_trials)


def _cost_of(run: RunDirectory) -> tuple[float, float | None] | None:
    """The run's own wall time, where it is known, and its CPU time, which older runs lack."""
    from mage_async.results.run_files import read_document

    summary = read_document(run.summary)
    return (summary["wall_s"], summary.get("processor_s")) if "wall_s" in summary else None
