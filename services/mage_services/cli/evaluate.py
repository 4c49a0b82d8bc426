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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mage_async.errors import ConfigError
from mage_async.results.run_directory import RunDirectory

if TYPE_CHECKING:
    from mage_async.config.schema import Config
    from mage_async.results.score import Score
    from mage_services.actor.evaluator import GuidanceOf
    from mage_services.actor.harder_tasks import Ladder


@dataclass(frozen=True, slots=True)
class OtherEnvironment:
    """An environment to evaluate in that is not the one of training."""

    name: str
    settings: tuple[str, ...]
    """Assignments of keys, as `--set` takes them."""

    def folder(self) -> str:
        """Return the name of the folder, in the run's directory, for the results."""
        return f"environment_{re.sub(r'[^A-Za-z0-9._-]', '-', self.name)}"

    def config(self, file: Path) -> "Config":
        """Return the configuration that a run recorded, with this environment."""
        from mage_async.config import config_file

        own = (f"environment.name={json.dumps(self.name)}", "environment.options={}")
        return config_file.load_recorded(file, [*own, *self.settings])


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


REPEATS = 16
HELP = "Measure a run's policy on fixed sets of train and held-out tasks, with controls."


@dataclass(frozen=True, slots=True)
class Measurements:
    """What to measure."""

    num_trials: int
    episodes: int | None
    repeats: int
    """Plays of each task to measure the diversity; 0: it is not measured."""
    ladder: str | None
    """Ladder of harder tasks; "" for the first; None: none are played."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run and the measurements."""
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
    """Parse a whole number above 0; for argparse's `type`."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return number


def run(given: argparse.Namespace) -> int:
    """Play the sets, and print and write the results.

    Raises:
        ConfigError: keys are set without an environment.
    """
    from mage_services.actor.play_session import check_policy

    check_policy(RunDirectory(given.run_dir))
    run_dir = RunDirectory(given.run_dir.resolve())
    if given.environment is None and given.set:
        raise ConfigError("--set changes what another environment is played with: give its name")
    other = OtherEnvironment(given.environment, tuple(given.set)) if given.environment else None
    asked = Measurements(given.trials, given.episodes, given.diversity or 0, given.harder)
    _evaluate(run_dir, asked, other)
    return 0


def _evaluate(run: RunDirectory, asked: Measurements, other: OtherEnvironment | None) -> None:
    import uvloop

    from mage_async.assembly import environment_of
    from mage_async.config import config_file
    from mage_async.pages.report import render
    from mage_async.results.summary import summarise, write_summary
    from mage_services.actor.evaluator import no_guidance, recorded_guidance, write_evaluation
    from mage_services.actor.harder_tasks import ladder_of, times_as_long
    from mage_services.actor.play_session import newest
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
    guidance = no_guidance if other else recorded_guidance(run, config, version)
    wanted = replace(asked, episodes=episodes or own)
    sets, more = uvloop.run(_play(roomy, policy, wanted, ladder, guidance))
    if target is not run:
        target.root.mkdir(exist_ok=True, parents=True)
        target.config.write_text(config_file.dump(config))
    write_evaluation(target, sets, environment_of(config), version, {}, more)
    wall_s, processor_s = cost or (time.monotonic() - began, time.process_time())
    summary = summarise(target, wall_s=wall_s, processor_s=processor_s)
    if target is not run:  # its metrics are of no training: that was the run's
        summary |= {"steps": version, "complete": version >= config.learner.steps}
    write_summary(target, summary)
    target.report.write_text(render(target, summary))
    make_view(config, target, is_terminal=sys.stdout.isatty()).close(summary)


def _roomy(config: "Config", episodes: int | None, times_as_long: float) -> "Config":
    """Return the configuration with a larger engine context, for more or longer episodes than the
    run's own trials have.
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
    asked: Measurements,
    ladder: "Ladder | None",
    guidance: "GuidanceOf",
) -> tuple[dict[str, "Score"], dict[str, Any]]:
    """Play the final sets with the controls, and what else is to be measured.

    Cancellation abandons all trials.

    Returns: scores by set, and "diversity" and "harder" as plain data where they were measured.
    """
    import msgspec

    from mage_async.assembly import environment_of
    from mage_async.inference.chat_files import load_chat
    from mage_services.actor.evaluator import Evaluator
    from mage_services.actor.harder_tasks import score_rungs
    from mage_services.engines.engine import make_engine
    from mage_services.environments.call_runner import CallRunner

    chat = load_chat(policy, thinking=config.transcript.thinking)
    environment = environment_of(config)
    assert asked.episodes is not None
    made, more = make_engine(config, policy, "evaluate"), dict[str, Any]()
    async with made as engine, CallRunner.of(config.environment) as workers:
        evaluator = Evaluator(config, environment, chat, engine, workers, asked.episodes)
        evaluator.guidance = guidance
        sets = await evaluator.final(asked.num_trials)
        if asked.repeats:
            more["diversity"] = await evaluator.diversity(asked.num_trials, asked.repeats)
        if ladder is not None:
            more["harder"] = await score_rungs(
                ladder, sets["heldout"], chat, engine, workers, asked.episodes
            )
    return sets, msgspec.to_builtins(more)


def _cost_of(run: RunDirectory) -> tuple[float, float] | None:
    """Return the run's own wall time and CPU time in seconds; None where they are not known."""
    from mage_async.results.run_files import read_document

    summary = read_document(run.summary)
    return (summary["wall_s"], summary["processor_s"]) if "wall_s" in summary else None
