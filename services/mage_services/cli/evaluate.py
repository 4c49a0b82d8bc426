"""`mage evaluate`: play a run's newest checkpoint on fixed sets of tasks, with controls.

The results are printed as a table. Evaluation, summary and report of the run are written again;
with another environment or number of episodes they are written into a folder of the run.
"""

import argparse
import json
import math
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mage_async.errors import ConfigError
from mage_async.results.run_directory import RunDirectory
from mage_services.cli.options import add_number, add_set, positive

if TYPE_CHECKING:
    from mage_async.config.schema import Config
    from mage_async.results.score import Score
    from mage_services.actor.evaluator import GuidanceOf
    from mage_services.actor.harder_tasks import Ladder

HELP = "Measure a run's policy on fixed sets of train and held-out tasks, with controls."
REPEATS = 16
"""Plays of each task with `--diversity`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run and the measurements."""
    parser.epilog = (
        "The table holds the return of each episode with 95 % intervals, reference values and two "
        "causal controls: blind (earlier episodes are not in the context) and swapped (somebody "
        "else is hidden from the last episode on). Adaptation is what the controls take away."
    )
    parser.add_argument("run_dir", type=Path)
    add_number(parser, "--trials", "trials per set (1024)", 1024, type=positive)
    episodes = "episodes of a trial, which may be others than in training"
    add_number(parser, "--episodes", episodes, type=positive, metavar="K")
    diversity = (
        "also measure the entropy of distinct trajectories by episode, over R plays of each "
        f"held-out task ({REPEATS})"
    )
    one = {"nargs": "?", "const": REPEATS}
    add_number(parser, "--diversity", diversity, type=positive, metavar="R", **one)
    harder = (
        "also play held-out tasks that are harder than those trained on, such as more boxes; "
        "LADDER names one of those that the environment declares (its first); of a mix, PART or "
        "PART/LADDER"
    )
    parser.add_argument("--harder", nargs="?", const="", metavar="LADDER", help=harder)
    environment = (
        "play another environment than in training; what is measured stands in a folder of its "
        "own, in the run's"
    )
    parser.add_argument("--environment", metavar="NAME", help=environment)
    key = "with --environment: a key of the configuration, such as environment.options.size=5"
    add_set(parser, key)


def run(given: argparse.Namespace) -> int:
    """Play the sets, and print and write the results.

    Raises:
        ConfigError: keys are set without an environment.
    """
    import uvloop

    from mage_async.assembly import environment_of
    from mage_async.config import config_file
    from mage_async.pages.report import render
    from mage_async.results.run_files import read_document
    from mage_async.results.summary import summarise, write_summary
    from mage_services.actor.evaluator import no_guidance, recorded_guidance, write_evaluation
    from mage_services.actor.harder_tasks import ladder_of, times_as_long
    from mage_services.actor.play_session import check_policy, newest
    from mage_services.terminal.view import make_view

    check_policy(RunDirectory(given.run_dir))
    if given.environment is None and given.set:
        raise ConfigError("--set changes what another environment is played with: give its name")
    run = RunDirectory(given.run_dir.resolve())
    folder, assignments = run.root, list[str]()
    if given.environment:
        folder /= f"environment_{re.sub(r'[^A-Za-z0-9._-]', '-', given.environment)}"
        name = f"environment.name={json.dumps(given.environment)}"
        assignments = [name, "environment.options={}", *given.set]
    config = config_file.load_recorded(run.config, assignments)
    episodes = given.episodes or config.evaluation.episodes
    if episodes != config.evaluation.episodes:
        folder /= f"episodes_{episodes}"
    ladder = None if given.harder is None else ladder_of(config, given.harder)
    policy, version = newest(run, config)
    if given.environment:
        check_words(config, policy)
    began = time.monotonic()
    roomy = _roomy(config, episodes, times_as_long(config, ladder))
    guidance = no_guidance if given.environment else recorded_guidance(run, config, version)
    sets, more = uvloop.run(_play(roomy, policy, given, episodes, ladder, guidance))
    target, is_as_trained = replace(run, root=folder), folder == run.root
    if not is_as_trained:
        folder.mkdir(exist_ok=True, parents=True)
        target.config.write_text(config_file.dump(config))
    write_evaluation(target, sets, environment_of(config), version, {}, more)
    costs = {"wall_s": time.monotonic() - began, "processor_s": time.process_time()}
    # The summary of the run itself keeps the costs of its training.
    if is_as_trained and "wall_s" in (recorded := read_document(run.summary)):
        costs = {name: recorded[name] for name in costs}
    summary = summarise(target, **costs)
    if not is_as_trained:  # the folder has no metrics: the training was the run's
        summary |= {"steps": version, "complete": version >= config.learner.steps}
    write_summary(target, summary)
    target.report.write_text(render(target, summary))
    make_view(config, target, is_terminal=sys.stdout.isatty()).close(summary)
    return 0


def _roomy(config: "Config", episodes: int, times_as_long: float) -> "Config":
    """Return the configuration with a larger engine context, for more or longer episodes than the
    run's own trials have.
    """
    import msgspec

    own = max(config.trial.episodes, config.evaluation.episodes)
    max_tokens = math.ceil(config.engine.max_tokens * max(1.0, episodes / own) * times_as_long)
    engine = msgspec.structs.replace(config.engine, max_tokens=max_tokens)
    return msgspec.structs.replace(config, engine=engine)


async def _play(
    config: "Config",
    policy: Path,
    given: argparse.Namespace,
    episodes: int,
    ladder: "Ladder | None",
    guidance: "GuidanceOf",
) -> tuple[dict[str, "Score"], dict[str, Any]]:
    """Play the final sets with the controls, and what else is to be measured.

    Cancellation abandons all trials.

    Returns:
        Scores by set, and "diversity" and "harder" as plain data where they were measured.
    """
    import msgspec

    from mage_async.assembly import environment_of
    from mage_async.inference.chat_files import load_chat
    from mage_services.actor.evaluator import Evaluator
    from mage_services.actor.harder_tasks import score_rungs
    from mage_services.engines.engine import make_engine
    from mage_services.environments.call_runner import CallRunner

    chat = load_chat(policy, thinking=config.transcript.thinking)
    made, more = make_engine(config, policy, "evaluate"), dict[str, Any]()
    async with made as engine, CallRunner.of(config.environment) as workers:
        evaluator = Evaluator(config, environment_of(config), chat, engine, workers, episodes)
        evaluator.guidance = guidance
        sets = await evaluator.final(given.trials)
        if given.diversity:
            more["diversity"] = await evaluator.diversity(given.trials, given.diversity)
        if ladder is not None:
            heldout = sets["heldout"]
            more["harder"] = await score_rungs(ladder, heldout, chat, engine, workers, episodes)
    return sets, msgspec.to_builtins(more)


def check_words(config: "Config", policy: Path) -> None:
    """Check that a tiny policy knows all words of an environment.

    Raises:
        ConfigError: the environment has words that the policy was not built with.
    """
    from mage_async.assembly import environment_of
    from mage_async.config.policy import Tiny
    from mage_async.inference.chat_files import load_chat

    if not isinstance(config.policy, Tiny):
        return
    chat, words = load_chat(policy), environment_of(config).facts.words
    if unknown := [word for word in words if len(chat.encode(f" {word}")) > 1]:
        raise ConfigError(
            f"environment {config.environment.name!r} has {len(unknown)} words that this tiny "
            f"policy was not built of, such as {unknown[0]!r}: train a mix in which the "
            "environment has a share of 0, or a pretrained model"
        )
