"""More of a policy than its returns: how diverse its trajectories are, and harder tasks."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mage_async.assembly import environment_of
from mage_async.config.schema import Config
from mage_async.config.sections.policy import Tiny
from mage_async.environments.ladders import harder
from mage_async.errors import ConfigError
from mage_async.results.diversity import Diversity, diversity
from mage_async.results.harder_tasks import Harder, Rung, label_of
from mage_async.results.score import Score
from mage_async.tasks.task_stream import FINAL_SEED
from mage_async.trials.chat_format import ChatFormat
from mage_services.actor.evaluator import Evaluator
from mage_services.engines.engine import Engine
from mage_services.environments.workers import Workers

Options = Mapping[str, Any]


def rungs_of(config: Config, ladder: str) -> list[dict[str, Any]]:
    """The harder rungs of a ladder that the run's policy can be asked to play.

    Raises:
        ConfigError: there is no such ladder, no rung is harder, or each has words that the policy
            was not built with.
    """
    environment, rules = environment_of(config), config.environment
    rungs = harder(rules.name, environment, rules.options, ladder)
    if not isinstance(config.policy, Tiny):
        return rungs
    known = set(environment.facts.words)
    readable = [
        rung for rung in rungs if known.issuperset(environment_of(on(config, rung)).facts.words)
    ]
    if not readable:
        raise ConfigError(
            f"environment {rules.name!r}: harder tasks need words that the tiny policy was not "
            "built with; train a pretrained model (policy.source), or take another ladder"
        )
    return readable


def on(config: Config, rung: Options) -> Config:
    """The configuration with the environment of a rung."""
    options = {**config.environment.options, **rung}
    environment = msgspec.structs.replace(config.environment, options=options)
    return msgspec.structs.replace(config, environment=environment)


def times_as_long(config: Config, rungs: Sequence[Options]) -> float:
    """How much longer the longest episode of some rungs is than that of the run."""
    own = environment_of(config).facts.max_turns
    return max([own, *(environment_of(on(config, each)).facts.max_turns for each in rungs)]) / own


async def diversity_of(evaluator: Evaluator, num_trials: int, repeats: int) -> Diversity:
    """Play held-out tasks again and again, so many trials in all. Cancellation abandons them."""
    return diversity(await evaluator.repeated(max(1, num_trials // repeats), repeats))


async def score_rungs(
    config: Config,
    rungs: Sequence[Options],
    as_trained: Score,
    chat: ChatFormat,
    engine: Engine,
    workers: Workers,
    episodes: int,
) -> Harder:
    """Play held-out tasks of each rung, as many as of the run's own. Cancellation abandons them."""
    found = [Rung("as trained", {}, as_trained)]
    for rung in rungs:
        own = on(config, rung)
        evaluator = Evaluator(own, environment_of(own), chat, engine, workers, episodes)
        score = await evaluator.play("heldout", as_trained.num_trials, FINAL_SEED)
        found.append(Rung(label_of(rung), dict(rung), score))
    return Harder(next(iter(rungs[0])), found)
