"""The environment and the rules of a trial, as the configuration has them."""

from pathlib import Path
from typing import Literal

from mage_async.completion import Sampling
from mage_async.config.schema import Config
from mage_async.environments.catalogue import load
from mage_async.environments.environment import Environment
from mage_async.environments.mix.parts import Mixed
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.experts import Experts, RecordedExperts, scripted
from mage_async.trials.prompts import prompts_for
from mage_async.trials.trial_rules import TrialRules

FRESH_KEYS: dict[str, Literal["never", "episode", "turn"]] = {
    "keep": "never",
    "refresh_at_episode": "episode",
    "isolate": "turn",
}
"""When a prompt asks for fresh keys, by cache rule."""
WORDS = ("episode", "reflect", "remark", "opp")
"""What a transcript says itself, beside an environment's words."""


def environment_of(config: Config) -> Environment:
    """The environment, with its options."""
    return load(config.environment.name, **config.environment.options)


def named_parts(config: Config) -> list[tuple[str, Environment]]:
    """The environment, or each part of a mix, by the name that the configuration has for it."""
    environment = environment_of(config)
    if isinstance(environment, Mixed):
        return [(part.name, part.environment) for part in environment.parts]
    return [(config.environment.name, environment)]


def experts_of(config: Config) -> Experts | None:
    """The experts that are asked in training; None: there are none, or the learner asks a policy.

    Raises:
        ConfigError: a file of recorded trials cannot be read.
    """
    if config.expert is None or expert_directory(config) is not None:
        return None
    source = config.expert.source
    return scripted if source == "script" else RecordedExperts.read(Path(source))


def expert_directory(config: Config) -> Path | None:
    """The model directory of an expert that is a policy; None: it is none."""
    rules = config.expert
    return Path(rules.source) if rules and Path(rules.source).is_dir() else None


def rules_of(
    config: Config,
    environment: Environment,
    chat: ChatFormat,
    num_episodes: int,
    *,
    stops_on_success: bool = False,
    expert: Experts | None = None,
) -> TrialRules:
    """How trials are played; a completion may also end with the closing tag of an action.

    Args:
        expert: asked at every action, in training: `experts_of`.
    """
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
    return TrialRules(
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
        expert=expert,
        rivals_remember=config.population.rivals_remember,
        separates_exploration=config.policy.separate_exploration,
    )
