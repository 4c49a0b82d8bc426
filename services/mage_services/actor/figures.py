"""More of a policy than its returns: how diverse its trajectories are, and harder tasks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from mage_async.assembly import environment_of
from mage_async.config.schema import Config
from mage_async.config.sections.policy import Tiny
from mage_async.environments.ladders import harder
from mage_async.environments.mix.parts import Mixed
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


@dataclass(frozen=True, slots=True)
class Ladder:
    """The rungs that are harder than the tasks as trained."""

    name: str
    """Of a mix `part/ladder`."""
    config: Config
    """Of the tasks as trained: the run's own, or of a mix that of the part alone."""
    rungs: list[dict[str, Any]]
    part: str = ""
    """The label of a mix's part."""


def ladder_of(config: Config, name: str) -> Ladder:
    """The harder rungs of a ladder that the run's policy can be asked to play.

    Args:
        name: of the ladder, or empty for the first; of a mix `part` or `part/ladder`.

    Raises:
        ConfigError: there is no such ladder, no rung is harder, or each has words that the policy
            was not built with.
    """
    environment, part, own = environment_of(config), "", config
    if isinstance(environment, Mixed):
        part, _, name = name.partition("/")
        own = _part_alone(config, environment, part)
    rules = own.environment
    rungs = harder(rules.name, environment_of(own), rules.options, name)
    if isinstance(config.policy, Tiny):
        rungs = _readable(own, rungs, set(environment.facts.words))
    ladder = next(iter(rungs[0]))
    return Ladder(f"{part}/{ladder}" if part else ladder, own, rungs, part)


def _part_alone(config: Config, mix: Mixed, label: str) -> Config:
    """The configuration with one part of a mix as its environment.

    Raises:
        ConfigError: the mix has no such part.
    """
    for part, given in zip(mix.parts, config.environment.options["parts"], strict=True):
        if part.label == label:
            environment = msgspec.structs.replace(
                config.environment, name=part.name, options=dict(given.get("options", {}))
            )
            return msgspec.structs.replace(config, environment=environment)
    known = ", ".join(part.label for part in mix.parts if part.environment.ladders)
    raise ConfigError(
        f"a mix has the ladders of its parts, and none of them is called {label!r}: name one that "
        f"declares `ladders`, such as `--harder PART` or `PART/LADDER`; these do: {known or 'none'}"
    )


def _readable(own: Config, rungs: list[dict[str, Any]], known: set[str]) -> list[dict[str, Any]]:
    """Rungs without words that a tiny policy was not built of.

    Raises:
        ConfigError: there is none.
    """
    readable = [
        rung for rung in rungs if known.issuperset(environment_of(on(own, rung)).facts.words)
    ]
    if not readable:
        raise ConfigError(
            f"environment {own.environment.name!r}: harder tasks need words that the tiny policy "
            "was not built with; train a pretrained model (policy.source), or take another ladder"
        )
    return readable


def on(config: Config, rung: Options) -> Config:
    """The configuration with the environment of a rung."""
    options = {**config.environment.options, **rung}
    environment = msgspec.structs.replace(config.environment, options=options)
    return msgspec.structs.replace(config, environment=environment)


def times_as_long(config: Config, ladder: Ladder | None) -> float:
    """How much longer the longest episode of some rungs is than that of the run."""
    own = environment_of(config).facts.max_turns
    rungs = [] if ladder is None else [on(ladder.config, each) for each in ladder.rungs]
    return max([own, *(environment_of(each).facts.max_turns for each in rungs)]) / own


async def diversity_of(evaluator: Evaluator, num_trials: int, repeats: int) -> Diversity:
    """Play held-out tasks again and again, so many trials in all. Cancellation abandons them."""
    return diversity(await evaluator.repeated(max(1, num_trials // repeats), repeats))


async def score_rungs(
    ladder: Ladder,
    heldout: Score,
    chat: ChatFormat,
    engine: Engine,
    workers: Workers,
    episodes: int,
) -> Harder:
    """Play held-out tasks of each rung, as many as of the run's own. Cancellation abandons them.

    Args:
        heldout: the run's own; a part of a mix is played alone, as trained, too.
    """

    async def played(config: Config) -> Score:
        evaluator = Evaluator(config, environment_of(config), chat, engine, workers, episodes)
        return await evaluator.play("heldout", heldout.num_trials, FINAL_SEED)

    as_trained = await played(ladder.config) if ladder.part else heldout
    found = [Rung("as trained", {}, as_trained)]
    for rung in ladder.rungs:
        label = f"{ladder.part} {label_of(rung)}".lstrip()
        found.append(Rung(label, dict(rung), await played(on(ladder.config, rung))))
    return Harder(ladder.name, found)
