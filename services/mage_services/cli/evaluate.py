"""Evaluate a finished (or stopped) run: the process that `mage_async.evaluate` becomes.

Plays the final sets with the run's newest checkpoint, prints the table and rewrites the evaluation,
the summary and the report of the run where the number of episodes is the run's own.
"""

import argparse
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop

from mage_async.assembly import environment_of
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import MageError
from mage_async.inference.chat_files import load_chat
from mage_async.report import render
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_document
from mage_async.results.score import Score
from mage_async.results.summary import summarise, write_summary
from mage_services.actor.evaluator import Evaluator, write_evaluation
from mage_services.engines.choice import make_engine
from mage_services.terminal.view import make_view


def main() -> None:
    """Play the sets and say what came out."""
    parser = argparse.ArgumentParser(description="Evaluate a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--episodes", type=int)
    given = parser.parse_args()
    run = RunDirectory(given.run_dir.resolve())
    try:
        _evaluate(run, given.trials, given.episodes)
    except* MageError as group:
        sys.exit(f"mage evaluate: {group.exceptions[0]}")


def _evaluate(run: RunDirectory, num_trials: int, episodes: int | None) -> None:
    config = config_file.load_recorded(run.config)
    own = config.evaluation.episodes
    policy, version = newest(run)
    began = time.monotonic()
    target = (
        run if episodes in (None, own) else replace(run, root=run.root / f"episodes_{episodes}")
    )
    cost = _cost_of(target)
    sets = uvloop.run(_play(roomy(config, episodes), policy, version, num_trials, episodes or own))
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


def roomy(config: Config, episodes: int | None) -> Config:
    """With contexts that hold more episodes than the run's own trials have."""
    own = max(config.trial.episodes, config.evaluation.episodes)
    if episodes is None or episodes <= own:
        return config
    max_tokens = math.ceil(config.engine.max_tokens * episodes / own)
    engine = msgspec.structs.replace(config.engine, max_tokens=max_tokens)
    return msgspec.structs.replace(config, engine=engine)


async def _play(
    config: Config, policy: Path, version: int, num_trials: int, episodes: int
) -> dict[str, Score]:
    """The final sets with the controls. Cancellation abandons them."""
    chat = load_chat(policy, thinking=config.transcript.thinking)
    environment = environment_of(config)
    async with make_engine(config, policy, "evaluate") as engine:
        return await Evaluator(config, environment, chat, engine, episodes).final(num_trials)


def _cost_of(run: RunDirectory) -> tuple[float, float | None] | None:
    """The run's own wall time, where it is known, and its processors', which older runs lack."""
    summary = read_document(run.summary)
    return (summary["wall_s"], summary.get("processor_s")) if "wall_s" in summary else None


def newest(run: RunDirectory) -> tuple[Path, int]:
    """The newest checkpoint and its version, or the policy the run began from."""
    found = sorted(run.checkpoints.glob("step_*"))
    return (found[-1], int(found[-1].name[5:])) if found else (run.policy, 0)


if __name__ == "__main__":
    main()
