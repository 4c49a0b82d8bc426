"""The environment and the rules of a trial, from the configuration."""

from typing import Literal

from mage_async import registry
from mage_async.completion import Sampling
from mage_async.config.schema import Config, Embedded
from mage_async.environments.catalogue import LOADERS, load
from mage_async.environments.environment import Environment
from mage_async.environments.mix import Mix
from mage_async.methods.method import Advisers, Methods
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.prompts import prompts_for
from mage_async.trials.trial_config import TrialConfig

FRESH_KEYS: dict[str, Literal["never", "episode", "turn"]] = {
    "keep": "never",
    "refresh_at_episode": "episode",
    "isolate": "turn",
}
"""When cached keys of older weights are recomputed, by `engine.cache_rule`."""
WORDS = ("episode", "reflect", "remark", "opp")
"""Words that a transcript adds to those of the environment."""


def environment_of(config: Config) -> Environment:
    """Return the environment of a run."""
    return load(config.environment.name, **config.environment.options)


def named_parts(config: Config) -> list[tuple[str, Environment]]:
    """Return the environment, or each component of a mix, with its name in the configuration."""
    environment = environment_of(config)
    if isinstance(environment, Mix):
        return [(part.name, part.environment) for part in environment.parts]
    return [(config.environment.name, environment)]


def own_sources(config: Config) -> dict[str, str]:
    """Return the source of the user's own environments and methods, by file name."""
    names = [name for name, _ in named_parts(config) if name.partition(":")[0] not in LOADERS]
    return {
        f"{name}/{file}": text
        for name in (*names, *config.methods)
        if ":" in name
        for file, text in registry.own_sources(name.partition(":")[0], repr(name)).items()
    }


def trial_config_of(
    config: Config,
    environment: Environment,
    chat: ChatFormat,
    num_episodes: int,
    *,
    stops_on_success: bool = False,
    advisers: Advisers | None = None,
) -> TrialConfig:
    """Return how trials are played.

    Args:
        advisers: asked at each action, in training: `Methods.advisers`.
    """
    # A completion may also end with the closing tag of an action or a remark.
    closing = chat.encode("</action>"), chat.encode("</remark>")
    stops = chat.stop_tokens + tuple(ids[0] for ids in closing if len(ids) == 1)
    sampling = Sampling(
        config.sampling.temperature,
        config.sampling.top_p,
        config.sampling.top_k,
        config.transcript.max_action_tokens,
        stops,
    )
    memory = config.trial.memory
    return TrialConfig(
        num_episodes,
        sampling,
        config.transcript.max_reflection_tokens,
        ActionParser(config.transcript.forced_tags, bool(environment.tools)),
        prompts_for(environment, num_episodes, rules=config.transcript.rules),
        keeps_history="history" in memory,
        reflects="reflection" in memory,
        fresh_keys=FRESH_KEYS[config.engine.cache_rule],
        turn_deadline_s=config.engine.turn_deadline_s,
        stops_on_success=stops_on_success,
        strategy=config.trial.strategy,
        strategy_temperature=config.sampling.strategy_temperature,
        advisers=advisers,
        max_tokens=config.engine.max_tokens,
        # SGLang is not sent the sets, and samples from the whole vocabulary.
        restricted=config.sampling.restricted and isinstance(config.engine, Embedded),
        rivals_remember=config.population.rivals_remember,
        has_roles=Methods(config).roles() is not None,
    )
