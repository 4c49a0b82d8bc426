"""Evaluate a checkpoint of a run on fixed sets of tasks, with controls."""

import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from mage_async.assembly import environment_of, with_room_for
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import ConfigError
from mage_async.inference.chat_files import load_chat
from mage_async.pages.report import render
from mage_async.plan.does_it_fit import check_words
from mage_async.results.run_directory import RunDirectory, distinct_name
from mage_async.results.run_files import last_line, read_document
from mage_async.results.summary import best_checkpoint, summarise, write_summary
from mage_services.actor.evaluator import (
    Evaluator,
    GuidanceOf,
    Ladder,
    Report,
    at_intervals,
    ladder_of,
    length_factor,
    no_guidance,
    played_references,
    recorded_guidance,
    score_rungs,
    write_evaluation,
)
from mage_services.actor.play_session import chosen_policy
from mage_services.api.coroutines import run_coroutine_to_end
from mage_services.engines.engine import make_engine
from mage_services.environments.call_runner import CallRunner

if TYPE_CHECKING:
    from mage_async.results.score import Score

PRINT_S = 20.0
"""Seconds between two lines that say how many trials of the final sets are played."""


def evaluate(
    run: RunDirectory,
    *,
    trials: int | None = None,
    episodes: int | None = None,
    diversity: int | None = None,
    harder: str | None = None,
    environment: str | None = None,
    assignments: Sequence[str] = (),
    checkpoint: str = "newest",
) -> tuple[RunDirectory, Config, dict[str, Any]]:
    """Play the final sets, fixed tasks of training and held-out ones, with the controls `blind` and
    `swapped`; write evaluation, summary and report.

    With an older checkpoint, another environment, another number of episodes, or fewer trials than
    an earlier evaluation of the same version, they are written into a subfolder of the run.

    Args:
        trials: Number of trials of each set; None for `evaluation.final_trials` of the run.
        episodes: Number of episodes of a trial; None for that of the run's own evaluation.
        diversity: Number of plays of each task, of which the distinct trajectories are counted;
            None to measure no diversity.
        harder: Name of a ladder, a series of harder and harder tasks that the environment
            declares; "" for its first one, None to play none.
        environment: Name of an environment other than that of training.
        assignments: Changes to the configuration for that environment, as `a.b=c`.
        checkpoint: See `chosen_checkpoint`.

    Returns:
        Where the results are, the configuration that was played (`episodes`, and a context with
        room for them, in place of the run's own), and the summary.

    Raises:
        ConfigError: a number is below 1; there is no such environment or ladder, or the policy
            lacks its words.
        RunError: the run has no policy, or not that checkpoint.
    """
    for name, number in (("trials", trials), ("episodes", episodes)):
        if number is not None and number < 1:
            raise ConfigError(f"{name} must be at least 1, got {number}")
    run.check_policy()
    subfolders, changes = list[str](), list[str]()
    if environment:
        subfolders += [folder_of(environment, assignments)]
        name = f"environment.name={json.dumps(environment)}"
        changes = [name, "environment.options={}", *assignments]
    config = config_file.load_recorded(run.config, changes, imports=False)
    trials = trials or config.evaluation.final_trials
    episodes = episodes or config.evaluation.episodes
    if episodes != config.evaluation.episodes:
        subfolders += [f"episodes_{episodes}"]
    ladder = None if harder is None else ladder_of(config, harder)
    policy, version = chosen_policy(run, config, checkpoint)
    # The best checkpoint was chosen by held-out returns of the environment of training, so only
    # returns on that environment are biased.
    is_chosen = checkpoint == "best" and not environment
    best = best_checkpoint(run, config) if is_chosen else None
    folder = run.evaluated_in(version).joinpath(*subfolders)
    # An evaluation with fewer trials is less precise, so it does not replace the recorded one.
    if trials < _num_recorded(replace(run, root=folder), version):
        folder /= f"trials_{trials}"
    check_words(config, policy)
    if checkpoint == "newest" and (trained := last_line(run.metrics).get("step", 0)) > version:
        text = (
            f"evaluating step {version}, that of the newest checkpoint: the run has trained "
            f"{trained} steps. If it has ended, `{run.resume_command}` goes on"
        )
        print(text, file=sys.stderr, flush=True)
    began, began_processor = time.monotonic(), time.process_time()
    config = with_room_for(config, episodes, length_factor(config, ladder))
    # Guidance is text that a method such as graph memory puts before a trial. It was learned about
    # the environment of training, so trials of another one begin without it.
    guidance = no_guidance if environment else recorded_guidance(run, config, version)
    playing = _play(config, policy, trials, diversity, ladder, guidance)
    sets, more = run_coroutine_to_end(playing)
    if best is not None and best.num_heldout:
        more = {**more, "chosen_of": best.num_heldout}
    # A win-stay rule that the policy was cloned from fits only the environment of training.
    played = played_references(config, run.policy, trials, with_rule=not environment)
    more = {**more, **played}
    target, is_as_trained = replace(run, root=folder), folder == run.root
    if not is_as_trained:
        folder.mkdir(exist_ok=True, parents=True)
        target.config.write_text(config_file.dump(config), encoding="utf-8")
    # Only the process of an evaluator measures its seconds by state.
    write_evaluation(target, sets, environment_of(config), version, blocked_s={}, more=more)
    costs: dict[str, Any] = {
        "wall_s": time.monotonic() - began,
        "processor_s": time.process_time() - began_processor,
    }
    # The summary of the run itself keeps the costs of its training.
    if is_as_trained and "wall_s" in (recorded := read_document(run.summary)):
        costs = {name: recorded.get(name) for name in costs}
    summary = summarise(target, **costs)
    if not is_as_trained:  # metrics of the training are in the run's own folder
        summary |= {"steps": version, "complete": version >= config.learner.steps}
    write_summary(target, summary)
    target.report.write_text(render(target, summary), encoding="utf-8")
    return target, config, summary


def _num_recorded(run: RunDirectory, version: int) -> int:
    """Return the number of trials of each set of the recorded evaluation of a version; 0 if there
    is none.
    """
    recorded = read_document(run.evaluation)
    if recorded.get("version") != version:
        return 0
    return min((score["num_trials"] for score in recorded["sets"].values()), default=0)


def folder_of(environment: str, assignments: Sequence[str]) -> str:
    """Return the name of the folder for evaluations on another environment than that of training.
    A digest follows the name if there are changes, or if the name cannot be that of a folder.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]", "-", environment)
    return f"environment_{distinct_name(safe, ','.join((environment, *assignments)))}"


async def _play(
    config: Config,
    policy: Path,
    num_trials: int,
    repeats: int | None,
    ladder: Ladder | None,
    guidance: GuidanceOf,
) -> tuple[dict[str, "Score"], dict[str, Any]]:
    """Play the final sets with the controls; measure diversity and harder tasks on request.

    Cancellation abandons all trials.

    Args:
        repeats: Number of plays of each task that measure diversity; None to measure none.
        ladder: Harder tasks to play; None for none.
        guidance: Returns the text that a method puts before the trial of a task.

    Returns:
        Scores by set, and a mapping with "diversity" and "harder", as far as they were measured.
    """
    chat = load_chat(policy, thinking=config.transcript.thinking)
    made, more = make_engine(config, policy, "evaluate"), dict[str, Any]()
    async with made as engine, CallRunner(config.environment) as workers:
        evaluator = Evaluator(config, chat, engine, workers, config.evaluation.episodes)
        evaluator.guidance = guidance
        final = _progress_printer("the final sets and their controls")
        sets = await evaluator.final(num_trials, final)
        if repeats:
            tasks = _progress_printer("the tasks that are played several times")
            more["diversity"] = await evaluator.diversity(num_trials, repeats, tasks)
        if ladder is not None:
            harder = _progress_printer("the harder tasks")
            more["harder"] = await score_rungs(ladder, sets["heldout"], evaluator, harder)
    return sets, msgspec.to_builtins(more)


def _progress_printer(what: str) -> Report:
    """Return a function that prints now and then how many trials of some tasks are played, so that
    a long evaluation is not silent.
    """

    def print_played(played: int, of: int) -> None:
        print(f"played {played} of {of} trials of {what}", file=sys.stderr, flush=True)

    return at_intervals(PRINT_S, print_played)
