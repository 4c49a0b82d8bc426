"""`mage play`: sit in the agent's place, or watch the agent."""

import argparse
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from mage_async.errors import ConfigError, RunFailed
from mage_async.results.run_directory import RunDirectory
from mage_services.cli.running.evaluate import check_policy, newest, positive

if TYPE_CHECKING:
    from mage_async.environments.environment import Environment
    from mage_async.trajectory import Task
    from mage_services.actor.rollout import Stage

HELP = "Play a trial in the agent's place, then see what the agent makes of the same task."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run, and which trial of its environment is played."""
    parser.epilog = "The opponent is hidden. With --watch only the agent plays."
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--watch", action="store_true", help="let the agent play")
    parser.add_argument(
        "--member",
        metavar="NAME",
        help="whom you play against (any held-out one, hidden); or a "
        "version that the run has kept, such as policy-20",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the task's luck (a new one)")
    parser.add_argument("--episodes", type=positive, metavar="K", help="(as in training)")


def run(given: argparse.Namespace) -> int:
    """Play one trial, and print what came out.

    Raises:
        RunFailed: the person left in the middle of the trial.
    """
    run_dir = RunDirectory(given.run_dir)
    check_policy(run_dir)
    try:
        _play(RunDirectory(run_dir.root.resolve()), given)
    except* (KeyboardInterrupt, EOFError):
        print()
        raise RunFailed("left in the middle of a trial") from None
    return 0


def _play(run: RunDirectory, given: argparse.Namespace) -> None:
    import uvloop

    from mage_async.assembly import environment_of, rules_of
    from mage_async.config import config_file
    from mage_async.tasks.population import version_of
    from mage_async.trials.trial_text import episode_lines, reward_table, whole_text

    config = config_file.load_recorded(run.config)
    environment = environment_of(config)
    if given.member is not None:
        _check_member(environment, given.member)

    # imported last: a wrong member is refused before torch is imported, which takes seconds
    from mage_async.inference.chat_files import load_chat
    from mage_services.actor.human_player import play_person_and_agent
    from mage_services.actor.rollout import Stage
    from mage_services.engines.choice import make_engine
    from mage_services.environments.workers import Workers
    from mage_services.weights.weight_transport import WeightFiles

    task = drawn_task(environment, given.member, given.seed)
    policy, version = newest(run, config)
    chat = load_chat(policy, thinking=config.transcript.thinking)
    rules = rules_of(config, environment, chat, given.episodes or config.trial.episodes)

    def make() -> "Stage":
        engine, workers = make_engine(config, policy, "play"), Workers.of(config.environment)
        return Stage(environment, rules, chat, engine, workers)

    ask = None if given.watch else read_line
    rewards, trial = uvloop.run(play_person_and_agent(make, task, WeightFiles(run.weights), ask))
    print(f"\nthe agent (version {version}) on the same task, against {task.member}:")
    is_duel = version_of(task.member) is not None
    print(whole_text(trial, chat) if given.watch and is_duel else episode_lines(trial))
    if rewards:
        print(reward_table(rewards, trial.episode_rewards()))


def _check_member(environment: "Environment", member: str) -> None:
    from mage_async.tasks.population import version_of

    known = (*environment.members("train"), *environment.members("heldout"))
    if version_of(member) is None and member not in known:
        raise ConfigError(f"no member {member!r}; there are {', '.join(sorted(known))}")


def drawn_task(environment: "Environment", member: str | None, seed: int | None) -> "Task":
    """A held-out task, or the one asked for; a seed decides what was not."""
    from mage_async.environments.mix.parts import part_of
    from mage_async.trajectory import Task

    seed = random.SystemRandom().getrandbits(31) if seed is None else seed
    source = random.Random(seed)
    chosen = member or source.choice(environment.members("heldout"))
    seats = part_of(environment, chosen).seats()
    return Task(environment.facts.name, chosen, seed, source.choice(seats))


def read_line(prompt: str) -> str:
    """As `input`. Ctrl-C leaves at once, where an event loop would wait for the line's end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input(prompt)
    finally:
        signal.signal(signal.SIGINT, before)
