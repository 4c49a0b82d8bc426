"""A trial that a person sits in or watches: of which task, by which policy, under which rules."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mage_async.assembly import environment_of, rules_of
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.environments.environment import Environment
from mage_async.environments.mix.parts import part_of
from mage_async.errors import ConfigError, RunError
from mage_async.results.run_directory import RunDirectory
from mage_async.tasks.population import version_of
from mage_async.trajectory import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from mage_async.trials.chat_format import ChatFormat
    from mage_services.actor.rollout import Stage


@dataclass(frozen=True, slots=True)
class PlaySession:
    """All that a trial outside of training needs."""

    environment: Environment
    task: Task
    chat: "ChatFormat"
    version: int
    """Of the policy that plays."""
    make: "Callable[[], Stage]"
    """Makes the stage, with an engine of its own."""


def check_policy(run: RunDirectory) -> None:
    """Refuse a directory that is no run with a policy.

    Raises:
        RunError: it has no configuration, or no policy.
    """
    if not run.config.is_file():
        raise RunError(f"{run.root}: no config.toml, so this is no run directory")
    if not run.policy.exists():
        raise RunError(f"{run.root}: the run has no policy yet")


def prepare(
    run: RunDirectory, member: str | None, seed: int | None, episodes: int | None
) -> PlaySession:
    """The newest policy of a run and a task for it.

    Args:
        member: that is played against; None: any held-out one.
        seed: of the task's luck; None: a new one.
        episodes: of the trial; None: as in training.

    Raises:
        RunError: the run has no policy.
        ConfigError: there is no such member.
    """
    check_policy(run)
    config = config_file.load_recorded(run.config)
    environment = environment_of(config)
    if member is not None:
        _check_member(environment, member)

    # imported last: a wrong member is refused before torch is imported, which takes seconds
    from mage_async.inference.chat_files import load_chat
    from mage_services.actor.rollout import Stage
    from mage_services.engines.choice import make_engine
    from mage_services.environments.workers import Workers

    task = drawn_task(environment, member, seed)
    policy, version = newest(run, config)
    chat = load_chat(policy, thinking=config.transcript.thinking)
    rules = rules_of(config, environment, chat, episodes or config.trial.episodes)

    def make() -> Stage:
        engine, workers = make_engine(config, policy, "play"), Workers.of(config.environment)
        return Stage(environment, rules, chat, engine, workers)

    return PlaySession(environment, task, chat, version, make)


def _check_member(environment: Environment, member: str) -> None:
    known = (*environment.members("train"), *environment.members("heldout"))
    if version_of(member) is None and member not in known:
        raise ConfigError(f"no member {member!r}; there are {', '.join(sorted(known))}")


def drawn_task(environment: Environment, member: str | None, seed: int | None) -> Task:
    """A held-out task, or the one asked for; a seed decides what was not."""
    seed = random.SystemRandom().getrandbits(31) if seed is None else seed
    source = random.Random(seed)
    chosen = member or source.choice(environment.members("heldout"))
    seats = part_of(environment, chosen).seats()
    return Task(environment.facts.name, chosen, seed, source.choice(seats))


def newest(run: RunDirectory, config: Config) -> tuple[Path, int]:
    """The newest checkpoint as a model directory and its version, or the policy the run began
    from.
    """
    found = sorted(run.checkpoints.glob("step_*"))
    if not found:
        return run.policy, 0
    from mage_services.actor.evaluator import model_directory

    return model_directory(run, config, found[-1]), int(found[-1].name.removeprefix("step_"))
