"""Checks across the sections of a configuration; those of one section stand beside it."""

import random
from dataclasses import replace

from mage_async.assembly import population_checks, rank_checks, role_checks, sac_checks
from mage_async.assembly.parts import (
    environment_of,
    expert_directory,
    experts_of,
    named_parts,
    rules_of,
)
from mage_async.config.schema import Config, Embedded
from mage_async.config.sections import corrections, policy
from mage_async.config.sections.policy import Tiny
from mage_async.credit import estimators, exploration_bonus
from mage_async.environments.environment import Environment
from mage_async.environments.rehearsal import check_declared, is_rehearsed
from mage_async.environments.reset_step import ResetStep
from mage_async.errors import ConfigError
from mage_async.tasks import curriculum
from mage_async.trials.shortest_context import chat_in_words, shortest_context


def check(config: Config) -> None:
    """Refuse what types cannot say, before any process starts.

    Raises:
        ConfigError: with the keys, what was got and what to write.
    """
    check_keys(config)
    check_room(config)


def check_keys(config: Config) -> None:
    """Refuse what can be seen without playing; otherwise as `check`."""
    environment = environment_of(config)
    for name, part in named_parts(config):
        _check_environment(config, name, part)
    _check_workers(config)
    population_checks.check(config, environment)
    _check_engine(config)
    curriculum.check(config.curriculum, config.trial)
    estimators.check(config.advantage, config.transcript)
    if config.learner.steps:
        estimators.check_group(config.advantage, config.admission.trials_per_group)
    exploration_bonus.check(config.credit, environment)
    _check_expert(config)
    sac_checks.check(config, environment)
    rank_checks.check(config)
    role_checks.check(config)
    _check_memory(config)
    _check_devices(config)
    _check_sending(config)
    corrections.check(config.learner.correction)
    _check_passes(config)
    _check_masters(config)
    policy.check(config.policy)


def check_room(config: Config) -> None:
    """Refuse a context without room for a trial that a script plays here; otherwise as `check`."""
    for name, part in named_parts(config):
        if part.script(random.Random(0)) is not None:
            _check_room(config, name, part)


def _check_environment(config: Config, name: str, environment: Environment) -> None:
    """One environment declares what it needs: ours are tested, others are rehearsed later on."""
    if is_rehearsed(name, environment):
        check_declared(name, environment, config.evaluation.episodes)
    if isinstance(environment, ResetStep):
        _check_open(config, name, environment)
    if config.warm_start is not None and environment.script(random.Random(0)) is None:
        raise ConfigError(
            f"environment {name!r} has no `script` to warm-start on: write one, or set "
            "warm_start.steps = 0"
        )
    for split in ("train", "heldout"):
        if not environment.members(split):
            raise ConfigError(f"environment {environment.facts.name!r} has no {split} members")


def _check_workers(config: Config) -> None:
    has_small = any(isinstance(part, ResetStep) for _, part in named_parts(config))
    if config.environment.workers and not has_small:
        raise ConfigError(
            "environment.workers plays classes with `reset` and `step` in processes of their own, "
            f"and {config.environment.name!r} is none: set it to 0; slow classes of the whole "
            "protocol are called in threads of the actor"
        )


def _check_engine(config: Config) -> None:
    needed = config.admission.trials_per_group
    if config.engine.max_contexts < needed:
        raise ConfigError(
            f"engine.max_contexts must be at least admission.trials_per_group = {needed}, "
            f"got {config.engine.max_contexts}"
        )


def _check_passes(config: Config) -> None:
    """Passes hold any segment, and the correction needs no more than its own pass."""
    budget, longest = config.learner.tokens_per_pass, config.engine.max_tokens
    if budget and isinstance(config.learner.correction, corrections.M2po):
        raise ConfigError(
            'learner.correction = "m2po" looks at a whole minibatch at once: set '
            "learner.tokens_per_pass = 0, or another correction"
        )
    if 0 < budget < longest:
        raise ConfigError(
            f"learner.tokens_per_pass must be 0 or at least engine.max_tokens = {longest}, the "
            f"longest segment, got {budget}: raise it, or lower engine.max_tokens"
        )


def _check_masters(config: Config) -> None:
    """What masters would be made for."""
    is_whole_in_16_bits = config.policy.dtype == "bfloat16" and not config.policy.lora
    if config.learner.float32_masters and not is_whole_in_16_bits:
        raise ConfigError(
            "learner.float32_masters = true is for all weights of a model in bfloat16: set "
            'policy.dtype = "bfloat16" without policy.lora, or leave the key out'
        )


def _check_expert(config: Config) -> None:
    """There is an expert to ask: of every part a script, or a file of recorded trials."""
    if config.expert is None:
        return
    if config.expert.source != "script":
        if expert_directory(config) and config.expert.form == "irl":
            raise ConfigError(
                f'expert.source = "{config.expert.source}" is a model directory, whose actions are '
                'not written down; set expert.form = "implicit", or a file of its recorded trials'
            )
        experts_of(config)
        return
    for name, part in named_parts(config):
        if part.script(random.Random(0)) is None:
            raise ConfigError(
                f"environment {name!r} has no `script` to be the expert: write one, or set "
                "expert.source to a file of recorded trials, or leave [expert] out"
            )


def _check_open(config: Config, name: str, environment: ResetStep) -> None:
    """What a class with `reset` and `step` has to declare for a tiny model and a population."""
    facts = environment.facts
    if isinstance(config.policy, Tiny) and not facts.words:
        raise ConfigError(
            f'environment {name!r} has no `words`, of which policy.kind = "tiny" is built: declare '
            "them, or set policy.source to a pretrained model"
        )
    has_bounds = None not in (facts.min_return, facts.max_return)
    if (config.population.rivals or config.population.matchmaker != "decks") and not has_bounds:
        raise ConfigError(
            f"environment {name!r}: a population rates returns between `min_return` and "
            "`max_return`: declare both"
        )


def _check_room(config: Config, name: str, environment: Environment) -> None:
    """A trial has room in the engine, at least one that a script plays, as training ends."""
    chat, stops = chat_in_words(), config.trial.stop_on_success
    last = curriculum.horizon(config.curriculum, config.learner.steps, config.trial.episodes)
    rules = rules_of(config, environment, chat, last.num_episodes, stops_on_success=stops)
    rules = rules.under(environment, last.num_episodes, last.max_turns)
    if config.warm_start is None:  # or else its remarks are as long as those it was cloned from
        rules = replace(rules, max_reflection_tokens=1)
    least = shortest_context(environment, rules, chat)
    least += 2 * config.graph_memory.strategies  # a state and an action of a word each
    if config.engine.max_tokens < least:
        raise ConfigError(
            f"engine.max_tokens must be at least {least}, which a trial of {last.num_episodes} "
            f"episodes of {name!r} needs for its words alone; "
            f"got {config.engine.max_tokens}"
        )


def _check_memory(config: Config) -> None:
    """A strategy's use is measured against trials of the group that were told of none."""
    if config.graph_memory.strategies and config.admission.trials_per_group < 2:
        raise ConfigError(
            "graph_memory.strategies compares trials that are told with others of their group: "
            "set admission.trials_per_group to at least 2, or graph_memory.strategies = 0"
        )


def _check_devices(config: Config) -> None:
    """Engines that share their model over GPUs have whole groups of them."""
    engine, needed = config.engine, config.engine.num_gpus
    if len(engine.devices) % needed:
        raise ConfigError(
            f"engine.gpus_per_actor = {needed} takes {needed} of engine.devices for each engine, "
            f"which names {len(engine.devices)}: name a multiple"
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
    if isinstance(config.engine, Embedded):
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
