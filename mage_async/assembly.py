"""Build the objects that a configuration describes, and check its sections against each other.

Checks within one section are in `config/`, next to its keys; checks of a method are in the method's
file.
"""

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from msgspec import structs

from mage_async import user_modules
from mage_async.completion import Sampling
from mage_async.config.schema import (
    Config,
    Embedded,
    FromData,
    FromScript,
    FromScriptIfAny,
    FromWinStay,
    Tiny,
    WarmStart,
    check_widths,
    data_files,
)
from mage_async.environments.agent import AgentTasks
from mage_async.environments.catalogue import LOADERS, load
from mage_async.environments.environment import Environment, check_disjoint, check_names
from mage_async.environments.ladders import curriculum
from mage_async.environments.mix import Mix
from mage_async.environments.rehearsal import check_declared, is_rehearsed
from mage_async.environments.user_class import ResetStep
from mage_async.errors import ConfigError, ContextFull
from mage_async.methods.method import Advisers, Methods, overriding
from mage_async.tasks.league import is_policy, name_of
from mage_async.tasks.task_stream import MIXED, rival_places
from mage_async.trajectory import Task
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.prompts import prompts_for
from mage_async.trials.scripted_play import chat_in_words, shortest_context
from mage_async.trials.trial_config import TrialConfig

KV_REFRESH: dict[str, Literal["never", "episode", "turn"]] = {
    "keep": "never",
    "refresh_at_episode": "episode",
    "isolate": "turn",
}
"""For each `engine.cache_rule`: when to recompute cached keys and values that older weights
computed."""


def environment_of(config: Config) -> Environment:
    """Return the environment of a run.

    With `environment.ladder` (a curriculum) it is a mix: versions of one environment, which are
    trained on one after another, the easiest first.
    """
    section = config.environment
    environment = load(section.name, **section.options)
    if not section.ladder:
        return environment
    mix = Mix(curriculum(section.name, environment, section.options, section.ladder))
    mix.steps_per_part = section.rung_steps
    return mix


def rungs_out_of_reach(config: Config) -> str:
    """Return a sentence if a run ends before its curriculum does; "" if not."""
    section, environment, steps = config.environment, environment_of(config), config.learner.steps
    num_before = len(environment.parts) - 1 if isinstance(environment, Mix) else 0
    needed = section.rung_steps * num_before
    if not section.ladder or not steps or steps > needed:
        return ""
    return (
        f"environment.ladder: the {num_before} rungs before the last take {needed} steps, and the "
        f"run has {steps}, so that the last rung, the tasks of environment.options, is never "
        "trained: raise learner.steps, or lower environment.rung_steps"
    )


def has_steady_tasks(config: Config) -> bool:
    """Return whether all steps of a run draw their tasks from one distribution, so that their
    returns can be compared.

    The distribution changes with a ladder, with past policies or the policy itself as opponents,
    with a matchmaker that chooses members by their returns, with groups that are replaced because
    of their returns, and with a method that changes the length of trials. A user's own matchmaker
    or method is assumed to change it too, because it is not imported here.
    """
    population = config.population
    return not (
        config.environment.ladder
        or population.rivals
        or population.matchmaker.kind not in ("decks", "fixed", "resampled")
        or config.admission.replaced_groups
        or any(":" in name for name in config.methods)
        or overriding(config, "horizon")
        or overriding(config, "self_play_share")
    )


def named_parts(config: Config) -> list[tuple[str, Environment]]:
    """Return the environment, or each component of a mix, with its name in the configuration."""
    environment = environment_of(config)
    if isinstance(environment, Mix):
        return [(part.name, part.environment) for part in environment.parts]
    return [(config.environment.name, environment)]


def played_sources(config: Config) -> dict[str, str]:
    """Return a digest of the source of each of the user's own environments, agents and methods."""
    names = [name.removeprefix("agent:") for name, _ in named_parts(config)]
    return source_digests([*names, *config.methods])


def own_sources(config: Config) -> dict[str, str]:
    """Return a digest of the source of each of the user's own classes that may change what is
    learned: those that are played, credit, estimator, correction and matchmaker.
    """
    learning = (config.credit, config.advantage, config.learner.correction)
    kinds = [each.kind for each in (*learning, config.population.matchmaker)]
    return played_sources(config) | source_digests(kinds)


def source_digests(names: Iterable[str]) -> dict[str, str]:
    """Return a digest of the source of each class that is named `module:Class`, as it is now."""
    modules = {name: name.partition(":")[0] for name in names if ":" in name}
    return {
        name: user_modules.own_source(module, repr(name))
        for name, module in modules.items()
        if module not in LOADERS
    }


def cut_length(config: Config) -> int | None:
    """Return the number of tokens at which an action is cut off; None if no action is, because the
    transcript closes the tags of actions itself.
    """
    # A program's answer, and one that calls tools, has no tags.
    has_tags = not any(
        part.tools or isinstance(part, AgentTasks) for _, part in named_parts(config)
    )
    is_closed = has_tags and config.transcript.forced_tags == "both"
    return None if is_closed else config.transcript.max_action_tokens


def edited(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names whose digests of `own_sources` differ, without names that `before` lacks."""
    return [name for name in now if before.get(name, now[name]) != now[name]]


def edit_note(name: str) -> str:
    """Return the sentence on a class that was edited after the start of its run."""
    return (
        f"{name} was edited since the last start of this run: from here on it is used as it is "
        "now, so the returns before and after may not be comparable"
    )


def edit_notes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield a note for each class that was edited before one process was restarted: that process
    plays the class as it is now, the other processes play it as it was.
    """
    for name in edited(before, now):
        yield f"{edit_note(name)}; processes that were not started again play it as it was"


def sampling_of(config: Config, chat: ChatFormat) -> Sampling:
    """Return the settings with which an action is sampled, in training and evaluations alike."""
    # A completion may also end with the closing tag of an action or a remark, if the tag is one
    # token: a stop is a single token.
    closing = chat.encode("</action>"), chat.encode("</remark>")
    stops = chat.stop_tokens + tuple(ids[0] for ids in closing if len(ids) == 1)
    return Sampling(
        config.sampling.temperature,
        config.sampling.top_p,
        config.sampling.top_k,
        config.transcript.max_action_tokens,
        stops,
    )


def trial_config_of(
    config: Config,
    environment: Environment,
    chat: ChatFormat,
    num_episodes: int,
    *,
    stops_on_success: bool = False,
    advisers: Advisers | None = None,
) -> TrialConfig:
    """Return the settings with which trials are played.

    Args:
        advisers: create the adviser that proposes an alternative to each action, in training
            (`Methods.advisers`); None: there is no adviser.
    """
    trial = config.trial
    return TrialConfig(
        num_episodes,
        sampling_of(config, chat),
        config.transcript.max_reflection_tokens,
        ActionParser(config.transcript.forced_tags, bool(environment.tools)),
        prompts_for(
            environment,
            num_episodes,
            rules=config.transcript.rules,
            episode_budget=trial.episode_budget,
        ),
        keeps_history=trial.keeps_history,
        reflects=trial.reflects,
        refresh_kv=KV_REFRESH[config.engine.cache_rule],
        turn_deadline_s=config.engine.turn_deadline_s,
        stops_on_success=stops_on_success,
        episode_budget=trial.episode_budget,
        strategy=trial.strategy,
        strategy_temperature=config.sampling.strategy_temperature,
        advisers=advisers,
        max_tokens=config.engine.max_tokens,
        restricted=config.sampling.restricted,
        # Another actor can continue a trial only if an episode of the same task always begins in
        # the same way.
        resumes=trial.repeats == "same",
        rivals_remember=config.population.rivals_remember,
        second_role=Methods(config).second_role(),
        compaction=trial.compaction,
        room=trial.room or config.engine.max_tokens,
    )


def with_warm_start(config: Config) -> Config:
    """Return the configuration with `warm_start = "auto"` replaced by "script", or by "win_stay" if
    an environment has no script; a program that plays its own episodes has no warm start.
    """
    warm = config.warm_start
    if not isinstance(warm, FromScriptIfAny):
        return config
    parts = [part for _, part in named_parts(config)]
    found: WarmStart | None = None
    if all(map(_has_script, parts)):
        found = FromScript(**structs.asdict(warm))
    elif not any(isinstance(part, AgentTasks) for part in parts):
        # Only values that differ from the defaults of "auto" are taken over: for the others,
        # "win_stay" has defaults of its own.
        given, default = structs.asdict(warm), structs.asdict(FromScriptIfAny())
        shared = WarmStart.__struct_fields__
        found = FromWinStay(**{key: given[key] for key in shared if given[key] != default[key]})
    return structs.replace(config, warm_start=found)


def _has_script(environment: Environment) -> bool:
    """Return whether an environment has a scripted player."""
    return environment.script(random.Random(0)) is not None


def check(config: Config) -> None:
    """Refuse a configuration whose types are right but that cannot work, before any process starts.

    Raises:
        ConfigError: the message has the key, its value and what to write instead.
    """
    check_keys(config)
    check_context_length(config)


def check_keys(config: Config) -> None:
    """Make those checks of `check` that need no trial to be played."""
    environment = environment_of(config)
    for name, part in named_parts(config):
        _check_environment(config, name, part)
    methods = Methods(config, environment)
    _check_population(config, environment, methods.self_play_share())
    _check_processes(config)
    for component in (
        config.credit,
        config.advantage,
        config.learner.correction,
        config.population.matchmaker,
        config.transport.weights,
    ):
        component.check(config)
    if ":" in config.credit.kind:
        config.credit.try_out(config.trial.episodes)
    if ":" in config.learner.correction.kind:
        # An admission rule without a bound may yield tokens that are staler than this.
        config.learner.correction.try_out(config.admission.max_staleness + config.admission.lag)
    _check_learner(config)
    _check_replaced_groups(config)
    _check_memory(config)
    _check_budget(config, methods.self_play_share())
    _check_program(config, methods)
    methods.check()
    check_widths(config.policy)
    if isinstance(config.warm_start, FromData):
        data_files(config.warm_start.path)


def with_room_for(config: Config, episodes: int, length_ratio: float = 1.0) -> Config:
    """Return the configuration for evaluations on trials of `episodes`: `evaluation.episodes` is
    set, and the engine's context is larger if these episodes are more or longer than the run's own.

    Args:
        length_ratio: Factor by which the longest episode exceeds the run's own; at least 1.
    """
    more = max(1.0, episodes / config.most_episodes)
    max_tokens = math.ceil(config.engine.max_tokens * more * length_ratio)
    engine = structs.replace(config.engine, max_tokens=max_tokens)
    evaluation = structs.replace(config.evaluation, episodes=episodes)
    return structs.replace(config, engine=engine, evaluation=evaluation)


def check_context_length(config: Config) -> None:
    """Refuse an engine whose contexts are shorter than a trial of the environment's script at the
    end of training.
    """
    for name, environment in named_parts(config):
        if not _has_script(environment):
            continue
        chat, stops = chat_in_words(), config.trial.stop_on_success
        methods = Methods(config, environment)
        # A method may lengthen trials from step to step, so the last ones are the longest.
        last = methods.horizon(config.learner.steps, config.trial.episodes)
        trial_config = trial_config_of(
            config, environment, chat, last.num_episodes, stops_on_success=stops
        )
        trial_config = trial_config.with_horizon(environment, last.num_episodes, last.max_turns)
        # Without a limit nothing is cut, so that the whole length is measured. A script needs no
        # restriction, and `chat_in_words` has no fixed vocabulary, so that a pattern of actions
        # could not be turned into its tokens.
        trial_config = replace(trial_config, max_tokens=0, restricted=False)
        # A policy that is cloned from scripts writes remarks as long as theirs; any other one may
        # write a single token.
        if config.warm_start is None:
            trial_config = replace(trial_config, max_reflection_tokens=1)
        try:
            least = shortest_context(environment, trial_config, chat)
        except ContextFull as fault:  # contexts are compacted, and `trial.room` is too small
            raise ConfigError(f"trial.room: {fault}") from fault
        least += methods.guidance_tokens()
        if config.engine.max_tokens < least:
            raise ConfigError(
                f"engine.max_tokens must be at least {least}, which a trial of {last.num_episodes} "
                f"episodes of {name!r} needs for its words alone; "
                f"got {config.engine.max_tokens}"
            )


def _check_environment(config: Config, name: str, environment: Environment) -> None:
    """Check that one environment declares the words, script and members that are needed."""
    if is_rehearsed(name, environment):
        check_declared(name, environment, config.evaluation.episodes)
    is_tiny = isinstance(config.policy, Tiny)
    if is_tiny and isinstance(environment, ResetStep) and (fault := tiny_fault(environment)):
        raise ConfigError(f"environment {name!r} {fault}")
    # Not `isinstance`: the subclass `FromScriptIfAny` needs no script.
    needs_script = type(config.warm_start) is FromScript
    if needs_script and not _has_script(environment):
        raise ConfigError(
            f"environment {name!r} has no `script` to warm-start on: write one, or set warm_start "
            'to "win_stay", "random", "best" or "none"'
        )
    for split in ("train", "heldout"):
        if not environment.members(split):
            raise ConfigError(f"environment {environment.facts.name!r} has no {split} members")


def tiny_fault(environment: Environment) -> str:
    """Return why the tiny policy cannot play an environment, with the cure; "" if it can."""
    if environment.tools:
        return (
            "has tools, whose calls only a pretrained model can write: set policy.kind=pretrained "
            "and policy.source to such a model"
        )
    if not environment.facts.words:
        # The name of a library's environment has a colon; its words cannot be declared.
        is_own = not isinstance(environment, ResetStep) or ":" not in environment.facts.name
        return (
            'has no `words`, of which policy.kind = "tiny" is built: '
            f"{'declare them, or ' if is_own else ''}set policy.source to a pretrained model"
        )
    return ""


def _check_program(config: Config, methods: Methods) -> None:
    """Refuse keys that change single turns if the environment is a program: it decides itself when
    it calls the policy and what it sends.
    """
    trial, last = config.trial, config.learner.steps
    without_effect = [
        ('trial.memory = "truncation"', trial.memory == "truncation"),
        (f'trial.strategy = "{trial.strategy}"', trial.strategy != "none"),
        ("trial.episode_budget", trial.episode_budget > 0),
        ("a method with two roles", methods.roles() is not None),
        ("a method that limits turns", methods.horizon(last, trial.episodes).max_turns > 0),
        ("a method with an adviser", methods.advisers() is not None),
        *((f"methods.{name}", True) for name in overriding(config, "trainer")),
    ]
    for name, part in named_parts(config):
        found = [key for key, is_set in without_effect if is_set]
        if isinstance(part, AgentTasks) and found:
            raise ConfigError(
                f"{name!r} is a program that plays its own episodes, in which {found[0]} has no "
                "effect: leave it out"
            )


def _check_memory(config: Config) -> None:
    """Refuse a `trial.room` that the memory does not use, or that exceeds the engine's contexts."""
    trial, longest = config.trial, config.engine.max_tokens
    if trial.room and trial.compaction == "none":
        raise ConfigError(
            f"trial.room = {trial.room} is the longest context of trials that write notes or drop "
            f'old turns, and trial.memory = "{trial.memory}" does neither: set it to "notes" or '
            '"truncation", or leave trial.room out'
        )
    if trial.room > longest:
        raise ConfigError(
            f"trial.room must be at most engine.max_tokens = {longest}, the longest context of an "
            f"engine, got {trial.room}: lower it, or raise engine.max_tokens"
        )
    if not trial.train_notes and trial.memory != "notes":
        raise ConfigError(
            f'trial.train_notes = false needs trial.memory = "notes", got "{trial.memory}": leave '
            "the key out"
        )


def _check_budget(config: Config, self_play_share: float) -> None:
    """Refuse a `trial.episode_budget` that ends no trial, or ends one that has to be whole."""
    budget, most = config.trial.episode_budget, config.trial.episodes
    if not budget:
        return
    if not config.evaluation.episodes <= budget < most:
        raise ConfigError(
            "trial.episode_budget must be less than trial.episodes, the largest number of episodes "
            "of a trial, and at least evaluation.episodes, all of which are played: got "
            f"{budget}, with {most} and {config.evaluation.episodes}"
        )
    if config.population.rivals or self_play_share:
        raise ConfigError(
            "trial.episode_budget is for one agent that plays turn by turn: leave it out with "
            "population.rivals and with methods of self-play"
        )


def _check_processes(config: Config) -> None:
    """Refuse worker processes without a class to play, engines with fewer contexts than a group has
    trials, and GPUs that cannot be divided among the engines.
    """
    has_calls = any(isinstance(part, ResetStep) for _, part in named_parts(config))
    if config.environment.workers and not has_calls:
        raise ConfigError(
            "environment.workers plays classes with `reset` and `step` in processes of their own, "
            f"and {config.environment.name!r} is none: set it to 0; slow classes of the whole "
            "protocol are called in threads of the actor"
        )
    engine, trials = config.engine, config.admission.trials_per_group
    if engine.max_contexts < trials:
        raise ConfigError(
            f"engine.max_contexts must be at least admission.trials_per_group = {trials}, "
            f"got {engine.max_contexts}"
        )
    if len(engine.devices) % engine.num_gpus:
        raise ConfigError(
            f"engine.gpus_per_actor = {engine.num_gpus} gives each engine {engine.num_gpus} of the "
            f"{len(engine.devices)} GPUs in engine.devices: name a multiple of {engine.num_gpus}"
        )


def _check_replaced_groups(config: Config) -> None:
    """Refuse to drop groups of equal rewards where training on such groups changes the policy."""
    number, baseline = config.admission.replaced_groups, config.advantage.baseline
    causes = [f"methods.{name}, which rewards turns" for name in overriding(config, "turn_rewards")]
    own_losses = overriding(config, "loss_term")
    causes += [f"methods.{name}, which adds a loss of its own" for name in own_losses]
    own_trainers = overriding(config, "trainer")
    causes += [f"methods.{name}, which learns from them" for name in own_trainers]
    if "group" not in baseline:
        causes.append(f"advantage.baseline = {baseline}, which compares groups with each other")
    if number and causes:
        raise ConfigError(
            f"admission.replaced_groups must be 0 with {causes[0]}, got {number}: a group whose "
            "trials all earned the same is worth training on there"
        )


def _check_learner(config: Config) -> None:
    """Refuse keys that the correction, the model's dtype or several ranks do not allow."""
    learner, longest = config.learner, config.engine.max_tokens
    budget = learner.max_tokens_per_microbatch
    if budget and learner.correction.needs_whole_minibatch:
        raise ConfigError(
            f'learner.correction = "{learner.correction.kind}" looks at a whole minibatch at once: '
            "set learner.max_tokens_per_microbatch = 0, or another correction"
        )
    if 0 < budget < longest:
        raise ConfigError(
            "learner.max_tokens_per_microbatch must be 0 or at least engine.max_tokens = "
            f"{longest}, the longest segment, got {budget}: raise it, or lower engine.max_tokens"
        )
    if learner.float32_masters and (config.policy.dtype != "bfloat16" or config.policy.lora):
        raise ConfigError(
            "learner.float32_masters = true is for all weights of a model in bfloat16: set "
            'policy.dtype = "bfloat16" without policy.lora, or leave the key out'
        )
    in_one_process = [(f"methods.{name}", "leave it out") for name in overriding(config, "trainer")]
    if config.policy.lora is not None:
        in_one_process.append(("policy.lora", "leave the section out"))
    if learner.optimizer_state == "8bit":
        in_one_process.append(('learner.optimizer_state = "8bit"', "leave the key out"))
    if learner.ranks > 1 and in_one_process:
        key, remedy = in_one_process[0]
        raise ConfigError(
            f"learner.ranks = {learner.ranks}: {key} works in one process alone: {remedy}, or set "
            "learner.ranks = 1"
        )


def _check_population(config: Config, environment: Environment, self_play_share: float) -> None:
    """Refuse a population that the environment cannot serve, or whose keys contradict each other.

    Ratings of members need bounds on returns; past policies need a seat and an engine that serves
    them. A member may not be both trained on and held out, nor have a name that means something
    else, such as that of a version of the policy.

    Args:
        self_play_share: share of groups in which the policy plays both seats.
    """
    name, population = environment.facts.name, config.population
    train, heldout = (environment.members(split) for split in ("train", "heldout"))
    is_rated = population.rivals or self_play_share or population.matchmaker.kind != "decks"
    if isinstance(environment, Mix) and is_rated:
        raise ConfigError(
            "a mix has no population: its parts are not rated against each other; set "
            'population.rivals = 0 and population.matchmaker = "decks", and leave out methods of '
            "self-play"
        )
    if is_rated and None in (environment.facts.min_return, environment.facts.max_return):
        raise ConfigError(
            f"environment {name!r}: a population rates returns between `min_return` and "
            "`max_return`: declare both"
        )
    check_disjoint(name, train, heldout)
    check_names(name, (*train, *heldout))
    if taken := [each for each in (*train, *heldout) if is_policy(each)]:
        raise ConfigError(f"{name}: {taken[0]!r} is the name of a version of the policy")
    # Otherwise each trial of a group would play one of the parts, as in a mixed group.
    if joined := [each for each in (*train, *heldout) if MIXED in each]:
        raise ConfigError(
            f"{name}: a task's name must not have {MIXED!r} in it, which separates the tasks of a "
            f"mixed group, and {joined[0]!r:.60} has: write it in another way"
        )
    num_groups = config.admission.groups_per_step
    places = num_groups - rival_places(population, num_groups)
    if population.matchmaker.kind == "fixed" and len(train) > places:
        raise ConfigError(
            f'population.matchmaker = "fixed" has {places} places in a step for {len(train)} '
            "members, so some would never be met: raise admission.groups_per_step"
        )
    if population.matchmaker.by_place and population.rivals and places == num_groups:
        raise ConfigError(
            f"population.rivals = {population.rivals:g} of the {num_groups} groups of a step is at "
            f"most half a group, and matchmaker {population.matchmaker.kind!r} gives whole places "
            "to past policies, so none would ever be met: raise it or admission.groups_per_step, "
            "or set it to 0"
        )
    if population.mixed_groups and is_rated:
        raise ConfigError(
            "population.mixed_groups: trials of a mixed group meet different members, so no member "
            'can be rated: set population.rivals = 0 and population.matchmaker = "decks", and '
            "leave out self-play"
        )
    if population.mixed_groups and isinstance(environment, Mix):
        raise ConfigError(
            "population.mixed_groups: all trials of a group must play one game, and "
            f"{name} is a mix: train on one environment"
        )
    if not population.rivals:
        return
    # Any task shows whether the game has a seat for a past policy: here that of version 0.
    task = Task(name, name_of(0), 0, environment.seats()[0])
    if environment.duel(task, 0) is None:
        raise ConfigError(
            f"{name}: nobody can play the opponent's seat: set population.rivals = 0, or give the "
            "environment `duel`, as that of mage_async/environments/games/kuhn.py"
        )
    if not isinstance(config.engine, Embedded) or not config.transport.weights.is_on_disk:
        raise ConfigError(
            "population.rivals: only the embedded engine serves past policies, from disk: set "
            'engine.kind = "embedded" and transport.weights = "disk"'
        )
