"""From the configuration to the objects it describes, in one place for every process."""

from dataclasses import replace
from typing import Literal

from mage_async.completion import Sampling
from mage_async.config.schema import Config, Learner
from mage_async.credit import estimators, exploration_bonus
from mage_async.environments.catalogue import load
from mage_async.environments.environment import Environment
from mage_async.environments.rehearsal import rehearse
from mage_async.errors import ConfigError
from mage_async.tasks import curriculum
from mage_async.tasks.population import name_of, version_of
from mage_async.trajectory import Task
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.prompts import prompts_for
from mage_async.trials.shortest_context import chat_in_words, shortest_context
from mage_async.trials.trial_rules import TrialRules

FRESH_KEYS: dict[str, Literal["never", "episode", "turn"]] = {
    "keep": "never",
    "refresh_at_episode": "episode",
    "isolate": "turn",
}
"""When a prompt asks for fresh keys, by cache rule."""
WORDS = ("episode", "reflect", "remark", "opp")
"""What a transcript says itself, beside an environment's words."""
WITHOUT_CLIP = ("tis", "cispo", "gspo", "dppo", "m2po")
"""Corrections whose loss is not a weight times PPO's clipped one."""


def environment_of(config: Config) -> Environment:
    """The environment, with its options."""
    return load(config.environment.name, **config.environment.options)


def rules_of(
    config: Config,
    environment: Environment,
    chat: ChatFormat,
    num_episodes: int,
    *,
    stops_on_success: bool = False,
) -> TrialRules:
    """How trials are played; a completion may also end with the closing tag of an action."""
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
        ActionParser(config.transcript.forced_tags),
        prompts_for(environment, num_episodes, rules=config.transcript.rules),
        keeps_history="history" in memory,
        reflects="reflection" in memory,
        fresh_keys=FRESH_KEYS[config.engine.cache_rule],
        turn_deadline_s=config.engine.turn_deadline_s,
        stops_on_success=stops_on_success,
        strategy=config.trial.strategy,
        strategy_temperature=config.sampling.strategy_temperature,
    )


def check(config: Config) -> None:
    """Everything that types cannot say, before any process starts."""
    environment, name = environment_of(config), config.environment.name
    if ":" in name:
        rehearse(name, environment, config.evaluation.episodes)
    for split in ("train", "heldout"):
        if not environment.members(split):
            raise ConfigError(f"environment {environment.facts.name!r} has no {split} members")
    _check_population(config, environment)
    _check_engine(config)
    curriculum.check(config.curriculum, config.trial)
    estimators.check(config.advantage, config.transcript)
    if config.learner.steps:
        estimators.check_group(config.advantage, config.admission.trials_per_group)
    exploration_bonus.check(config.credit, environment)
    _check_sending(config)
    _check_loss(config.learner)
    shape = config.policy.tiny
    if shape.heads % shape.kv_heads or shape.hidden_size % shape.heads:
        raise ConfigError(
            "policy.tiny: hidden_size must be a multiple of heads, and heads of kv_heads; "
            f"got {shape.hidden_size}, {shape.heads}, {shape.kv_heads}"
        )
    _check_room(config, environment)


def _check_engine(config: Config) -> None:
    needed = config.admission.trials_per_group
    if config.engine.max_contexts < needed:
        raise ConfigError(
            f"engine.max_contexts must be at least admission.trials_per_group = {needed}, "
            f"got {config.engine.max_contexts}"
        )
    if config.engine.arithmetic == "exact" and config.engine.kind != "embedded":
        raise ConfigError(
            'engine.arithmetic = "exact" is the embedded engine\'s; for SGLang set '
            "engine.server = { enable_deterministic_inference = true }"
        )


def _check_room(config: Config, environment: Environment) -> None:
    """A trial has room in the engine, at least one that a script plays, as training ends."""
    chat, stops = chat_in_words(), config.trial.stop_on_success
    last = curriculum.horizon(config.curriculum, config.learner.steps, config.trial.episodes)
    rules = rules_of(config, environment, chat, last.num_episodes, stops_on_success=stops)
    rules = rules.under(environment, last.num_episodes, last.max_turns)
    if not config.warm_start.steps:  # or else its remarks are as long as those it was cloned from
        rules = replace(rules, max_reflection_tokens=1)
    least = shortest_context(environment, rules, chat)
    if config.engine.max_tokens < least:
        raise ConfigError(
            f"engine.max_tokens must be at least {least}, which a trial of {last.num_episodes} "
            f"episodes of {config.environment.name!r} needs for its words alone; "
            f"got {config.engine.max_tokens}"
        )


def _check_population(config: Config, environment: Environment) -> None:
    """No train member is held out, and rivals have a seat, weights and an engine."""
    name, rules = environment.facts.name, config.population
    train, heldout = (environment.members(split) for split in ("train", "heldout"))
    if shared := set(train) & set(heldout):
        raise ConfigError(f"{name}: {min(shared)!r} cannot be trained on and held out")
    if taken := [each for each in (*train, *heldout) if version_of(each) is not None]:
        raise ConfigError(f"{name}: {taken[0]!r} is the name of a version of the policy")
    places = round((1 - rules.rivals) * config.admission.groups_per_step)
    if rules.matchmaker == "fixed" and len(train) > places:
        raise ConfigError(
            f'population.matchmaker = "fixed" has {places} places in a step for {len(train)} '
            "members, so some would never be met: raise admission.groups_per_step"
        )
    if not rules.rivals:
        return
    if environment.duel(Task(name, name_of(0), 0, environment.seats()[0]), 0) is None:
        raise ConfigError(f"{name}: nobody can play the opponent's seat: set population.rivals = 0")
    if config.engine.kind != "embedded" or config.transport.weights != "disk":
        raise ConfigError(
            "population.rivals: versions are held by the embedded engine and kept on disk: set "
            'engine.kind = "embedded" and transport.weights = "disk"'
        )


def _check_sending(config: Config) -> None:
    """What sending weights in groups cannot do."""
    if config.transport.weights != "nccl":
        return
    if config.admission.lag:
        raise ConfigError(
            'transport.weights = "nccl" sends the newest weights only; with admission.lag = '
            f'{config.admission.lag} set transport.weights = "disk" or "tensor"'
        )
    if config.transport.keys:
        raise ConfigError(
            'transport.weights = "nccl" reaches engines of this machine only; for actors of others '
            'set transport.weights = "disk"'
        )
    if not config.learner.device.startswith("cuda"):
        return
    if config.engine.kind == "embedded":
        raise ConfigError(
            'transport.weights = "nccl" with a learner on a GPU needs engines on GPUs: set '
            'engine.kind = "sglang", or transport.weights = "tensor"'
        )
    own = int(config.learner.device.partition(":")[2] or 0)
    if not config.engine.devices or own in config.engine.devices:
        raise ConfigError(
            f'transport.weights = "nccl": NCCL cannot send from GPU {own} to itself; name other '
            'GPUs in engine.devices, or set transport.weights = "tensor"'
        )


def _check_loss(rules: Learner) -> None:
    if not rules.dual_clip:
        return
    if rules.dual_clip <= 1:
        raise ConfigError(f"learner.dual_clip must be above 1, or 0, got {rules.dual_clip}")
    if rules.correction in WITHOUT_CLIP:
        raise ConfigError(
            f"learner.dual_clip bounds a clipped loss with a weight, which {rules.correction!r} "
            "is not: set it to 0"
        )
