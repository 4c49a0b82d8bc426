"""Define the defaults that depend on the kind of policy and on the hardware.

A *tree* is all tables of a configuration, one inside another, as a file and `--set` give them or
as a run has recorded them. It lacks the keys that they do not give.

The schema's defaults suit a pretrained model on GPUs. Those of a tiny policy, and of a pretrained
one on processor cores, are here. They apply to keys that neither a file nor `--set` gives, so
`--set policy.source=DIR` over the file of a tiny policy gets the defaults of a pretrained model.
"""

import os
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from mage_async.config.schema import Config, Pretrained
from mage_async.config.section import Section
from mage_async.config.tables import (
    NONE,
    Table,
    fields_of,
    hints_of,
    keys_of_tables,
    kind_key,
    kinds,
    may_be_absent,
    merged,
    section_of,
    without_short_form,
)
from mage_async.environments.tools import has_tools
from mage_async.errors import ConfigError
from mage_async.user_modules import Registry, attribute_names

DEFAULT_ACTORS = 4
"""Number of actors by default, with a tiny policy."""


def default_actors(config: Config) -> int:
    """Return the number of actors by default: with a pretrained policy 1, otherwise
    `DEFAULT_ACTORS`.
    """
    # Each actor holds a copy of the weights, and one actor plays many trials at once.
    return 1 if isinstance(config.policy, Pretrained) else DEFAULT_ACTORS


WITH_TINY: Table = {
    "transcript": {
        "rules": False,
        "forced_tags": "both",
        "max_action_tokens": 1,
        "max_reflection_tokens": 5,
    },
    "warm_start": {"kind": "auto"},
    "engine": {"max_contexts": 80, "max_tokens": 160, "cache_rule": "keep", "threads": 1},
    "admission": {"groups_per_step": 18, "max_staleness": 1, "grant_deadline_s": 180.0},
    "learner": {
        "minibatches": 4,
        "learning_rate": 0.001,
        "final_learning_rate": 0.0002,
        "warmup_steps": 5,
        "entropy": 0.02,
        "final_entropy": 0.002,
        "entropy_ceiling": 1.3,
        "beta2": 0.95,
        "threads": 1,
    },
    "evaluation": {"every": 10, "trials": 240, "final_trials": 1024},
    "journal": {"max_bytes": 8_000_000_000},
    "supervision": {"silence_s": 20.0},
}
"""Defaults with `policy.kind = "tiny"`."""

ONE_SCALE: Table = {"advantage": {"scale": ["component"], "epsilon": 0.02, "epsilon_unit": "range"}}
"""Defaults for a class of the user's own, or an environment of another library, with any policy.

With the schema's `scale`, ["member"], advantages are divided by a standard deviation over all
groups that have the same task variant. Such a class has about as many variants as tasks, so each
group would be divided by its own deviation, and a group whose trials hardly differ would count as
much as one in which they differ most. This raises the probability of actions that are a little
better in most tasks and much worse in the others (Dr. GRPO, arXiv 2503.20783, section 3.1): in
three of five runs of a class with noisy tests the return of the last episode fell by 0.2 to 0.6
(docs/measured_learning.md, "A class of one's own").

The unit of such an environment's rewards is not known: with the schema's `epsilon`, which is in
units of return, a class that pays 0.001 would have advantages of 0.02.
"""

WITH_FOREIGN_ENVIRONMENT: Table = ONE_SCALE | {
    # The schema's default, "final_only", counts rewards of the last episode alone, and random play
    # may hardly ever earn any there. With "cumulative_paper" three of the four tasks of
    # `bench/learning/first_hour_tasks.py` end higher.
    "credit": {"kind": "cumulative_paper"},
    # The 160 tokens of `WITH_TINY` are enough for the environments of this package. Episodes of
    # three turns whose observations are sentences of 20 to 40 words needed 708: with 512 the last
    # episode was cut before its last turn. The bound itself costs nothing: the memory of the KV
    # cache grows with the longest context that is really played.
    "engine": {"max_tokens": 2048},
    # An environment without a script gets a warm start from a player that explores
    # (`mage_async/trials/win_stay.py`). With the entropy bonus of `WITH_TINY`, in the task
    # `Password` (`bench/learning/first_hour_tasks.py`) RL settled on words before it had tried all
    # of them.
    "learner": {"entropy": 0.05, "final_entropy": 0.02},
    # With the schema's 150 steps at a rate of 0.002 the loss was still falling: in two seeds a
    # script that earns 1.00 in its last episode was cloned to -0.31 and -0.28, with these to 0.90
    # and 0.97. Both are the defaults of the kind "win_stay" (`FromWinStay` in `schema.py`), so in a
    # class without a script, which gets that kind, they change nothing.
    "warm_start": {"steps": 200, "learning_rate": 0.004},
}
"""Defaults that replace those of `WITH_TINY` for a class of the user's own, or an environment of
another library."""

ON_CORES: Table = {
    "policy": {"lora": {}},
    "transcript": {"forced_tags": "both", "max_action_tokens": 8, "max_reflection_tokens": 64},
    # An actor plays all 36 trials of a step at once. With fewer contexts, the last groups of the
    # first step are played only together with those of the second step, and the first step takes
    # twice as long.
    # On cores, recomputing the KV cache of a context is expensive: with the schema's
    # "refresh_at_episode", a step of a policy of 6 million weights that plays rps took 1.7 to 2.1
    # times as long.
    "engine": {
        "max_contexts": 36,
        "max_tokens": 2048,
        "cache_rule": "keep",
        "threads": 1,
        "turn_deadline_s": 1800.0,
    },
    "admission": {
        "groups_per_step": 12,
        "trials_per_group": 3,
        "max_staleness": 1,
        "grant_deadline_s": 3600.0,
    },
    # All episodes count: in an unknown task, rewards of the last one alone may be too rare.
    "credit": {"kind": "cumulative_paper"},
    # The three trials of a group often act alike, so the baseline has no "group": a turn is
    # compared with the same turn in all groups of the batch that play the same environment.
    "advantage": {"baseline": ["component", "kind", "episode", "index"], "scale": ["component"]},
    "learner": {
        "steps": 60,
        "minibatches": 2,
        "learning_rate": 0.0007,
        "final_learning_rate": 0.0002,
        "warmup_steps": 2,
        # Where actions are restricted to legal ones, the bonus cannot reward invalid ones. Over all
        # tokens of a pretrained model it rewards nonsense: SmolLM2-135M went from 3.0 to 10.1 nats
        # in 13 steps of a class of free text, after which it earned hardly anything, from 2.4 to
        # 7.1 nats in 8 steps of a program without a `regex`, and from 3.3 to 9.6 nats in 5 steps of
        # a class with tools.
        "entropy": 0.05,
        "final_entropy": 0.02,
        "entropy_tokens": "restricted",
        "beta2": 0.95,
        "max_tokens_per_microbatch": 2048,
        "shared_opening": True,
        "threads": 1,
    },
    "evaluation": {"every": 30, "trials": 32, "final_trials": 64},
}
"""Defaults of a pretrained policy whose learner and engines compute on processor cores.

They suit a model of a hundred million weights on two cores: a step of 36 trials with adapters, in
micro-batches of little memory, and few evaluations: the first one shows where the run began."""

CALLS_ON_CORES: Table = {
    # The 8 tokens of `ON_CORES` are enough for a word of a game. A tool call with two short
    # arguments took 78 tokens with a small tokenizer that splits the tags of a call. A program may
    # ask for fewer in each request.
    "transcript": {"max_action_tokens": 128},
}
"""Defaults that replace those of `ON_CORES` for a program, or a class with tools."""
FREE_TEXT_ON_CORES: Table = {
    # With the 8 tokens of `ON_CORES`, 25 of the first 30 answers of a class were cut.
    "transcript": {"max_action_tokens": 24},
}
"""Defaults that replace those of `ON_CORES` for a dataset of reasoning-gym, or a user's class whose
actions are any text."""
PROGRAMS = ("agent:", "verifiers:")
"""Beginnings of the names of environments in which a program is the agent."""
DATASETS = "reasoning-gym:"
"""Beginning of the names of environments whose actions are answers to questions, in any text."""
OWN_CLASSES = Registry("environment", {})
"""Imports a user's own class by its name."""

SMALL_BYTES = 20_000_000
"""Size of the weights of a local model, in bytes, up to which all of them are trained on cores:
five million of 32 bits. Adapters save memory, of which such a model needs little, and they learn
nothing if the weights that they adapt are random."""
ALL_WEIGHTS: Table = {"policy": {"lora": NONE}}
"""Defaults added to `ON_CORES` for a small model."""

ON_GPU: Table = {"policy": {"dtype": "bfloat16"}, "learner": {"matmul_precision": "high"}}
"""Defaults of a pretrained policy whose learner computes on a GPU: tensor cores multiply 16 bits
and TF32 several times faster than float32."""

MASTERS: Table = {"learner": {"float32_masters": True}}
"""Defaults added to `ON_GPU` if all weights are trained, not adapters alone: in 16 bits small
updates would be rounded away.
"""

BFLOAT16_ENGINE: Table = {"engine": {"arithmetic": "bfloat16"}}
"""Defaults added to `ON_CORES` if the processor multiplies in bfloat16, which is twice as fast."""
BFLOAT16_ADAPTED: Table = {"policy": {"dtype": "bfloat16"}}
"""Defaults added to `BFLOAT16_ENGINE` if the learner trains adapters, which stay float32
themselves."""

SCHEDULES = (("learning_rate", "final_learning_rate"), ("entropy", "final_entropy"))
"""Keys of `learner` that change linearly over a run, each with the key of its end."""

PATHS = (("policy", "source"), ("warm_start", "path"), ("transport", "keys"))
"""Tables and keys of paths, in which a `~` at the beginning stands for the home directory."""


@cache
def _multiplies_bfloat16() -> bool:
    """Return whether the processor of this machine has instructions for products in bfloat16."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def completed(tree: Table, *, is_recorded: bool = False) -> Table:
    """Return a tree completed with the defaults of this file, ready for decoding by the schema.

    Every table in it states its kind. A table that the tree switches off by "none" is None. A `~`
    at the beginning of a path is replaced.

    Args:
        is_recorded: whether a run wrote the tree. A key that it lacks is newer than the run and
            gets the default of the schema or, with a tiny policy, of `WITH_TINY`.
    """
    # Kinds are filled in before the defaults are chosen, because the choice depends on them, and
    # again afterwards, for tables that the defaults have added.
    defaults = _defaults(_with_kinds(tree, Config), is_recorded)
    whole = _with_kinds(merged(defaults, tree, Config), Config)
    if not is_recorded:
        _evaluate_as_trained(whole)
    end_no_higher(whole.get("learner"), tree.get("learner"))
    # A warm start that states no kind clones the environment's script.
    if isinstance(warm := whole.get("warm_start"), dict):
        whole["warm_start"] = {"kind": "script"} | warm
    for table, key, hint in keys_of_tables(Config, whole):
        if table.get(key) == NONE and may_be_absent(hint):
            table[key] = None
    _expand_home(whole)
    return whole


def _expand_home(whole: Table) -> None:
    """Replace a `~` at the beginning of each path, in place: a shell leaves it in `--set a.b=~/c`.

    The result is recorded, so the processes of a run need not have the same home directory.
    """
    for name, key in PATHS:
        table = whole.get(name)
        if isinstance(table, dict) and isinstance(path := table.get(key), str):
            # If there is no such user, the path stays as it is; `Path.expanduser` would raise an
            # error.
            table[key] = os.path.expanduser(path)


def _evaluate_as_trained(whole: Table) -> None:
    """Set `evaluation.episodes`, in place, to `trial.episodes`, unless the tree states a number.

    With `trial.episodes = 1`, as in the baselines of single-episode RL, `evaluation.episodes` keeps
    the schema's default, because these baselines are evaluated on several episodes too. If the tree
    has no `trial.episodes`, both keys keep the schema's default, which is the same.
    """
    trial, evaluation = whole.get("trial"), whole.setdefault("evaluation", {})
    if isinstance(trial, dict) and isinstance(evaluation, dict):
        num_episodes = trial.get("episodes", 1)
        if isinstance(num_episodes, int) and num_episodes > 1:
            evaluation.setdefault("episodes", num_episodes)


def end_no_higher(learner: Any, stated: Any) -> None:
    """Lower, in place, the end of each schedule to its beginning, if the beginning alone is stated.

    Otherwise a learning rate of 1e-5 would rise to the end that a tiny policy has by default, 2e-4,
    and an entropy bonus that is set to 0 would come back.

    Args:
        learner: the table `learner`; anything else is left as it is.
        stated: the keys of the table that a file states, or that `--set` gives.
    """
    if not isinstance(learner, dict) or not isinstance(stated, Collection):
        return
    for first, last in SCHEDULES:
        begin, end = learner.get(first), learner.get(last)
        is_alone = first in stated and last not in stated
        if is_alone and isinstance(begin, int | float) and isinstance(end, int | float):
            learner[last] = min(begin, end)


def _defaults(whole: Table, is_recorded: bool) -> Table:
    """Return the defaults that replace the schema's, chosen by policy, engine and device."""
    policy, engine, learner = (_table_at(whole, key) for key in ("policy", "engine", "learner"))
    if policy.get("kind") == "tiny":
        # A recorded run states its credit already. Merging another one over it could import a
        # credit of the user's own, which would execute the user's code.
        if is_recorded or not _has_foreign_environment(whole):
            return WITH_TINY
        return merged(WITH_TINY, WITH_FOREIGN_ENVIRONMENT, Config)
    if policy.get("kind") != "pretrained" or is_recorded:
        return {}
    chosen = [ONE_SCALE] if _has_foreign_environment(whole) else []
    if learner.get("device", "cpu") != "cpu":
        chosen += [ON_GPU] if policy.get("lora", NONE) != NONE else [ON_GPU, MASTERS]
    # Other engines need a GPU, for which the schema's defaults are made.
    elif engine.get("kind") == "embedded":
        chosen.append(ON_CORES)
        if any(map(_takes_any_text, _environment_names(whole))):
            chosen.append(FREE_TEXT_ON_CORES)
        # Last, because a call needs more tokens than a sentence, if a mix has both.
        if any(map(_calls_tools, _environment_names(whole))):
            chosen.append(CALLS_ON_CORES)
        if "lora" not in policy and _is_small(policy.get("source")):
            chosen.append(ALL_WEIGHTS)
            policy = merged(policy, ALL_WEIGHTS["policy"], Pretrained)
        if _multiplies_bfloat16():
            # `ON_CORES` adds adapters, so here a missing key means adapters.
            is_adapted = policy.get("lora") != NONE
            chosen += [BFLOAT16_ENGINE, BFLOAT16_ADAPTED] if is_adapted else [BFLOAT16_ENGINE]
    found: Table = {}
    for each in chosen:
        found = merged(found, each, Config)
    return found


def _calls_tools(name: str) -> bool:
    """Return whether the environment of this name is a program, or a user's class with tools."""
    return name.startswith(PROGRAMS) or has_tools(_own_class(name))


def _takes_any_text(name: str) -> bool:
    """Return whether this is the name of a reasoning-gym dataset, or of a user's class that never
    restricts its actions: neither the class nor a method of it sets `legal_actions` or
    `legal_pattern`.
    """
    if name.startswith(DATASETS):
        return True
    kind = _own_class(name)
    # A class with `begin` follows the protocol of this package, in which a play lists its actions.
    if hasattr(kind, "begin") or not hasattr(kind, "step"):
        return False
    found = attribute_names(kind.__mro__, "STORE")
    return not any(
        getattr(kind, part, None) is not None or part in found
        for part in ("legal_actions", "legal_pattern")
    )


def _own_class(name: str) -> type:
    """Return the user's class of this name; `object` if there is none."""
    try:
        return OWN_CLASSES.load(name) if ":" in name else object
    except ConfigError:  # the environment is loaded later, and the error says what is wrong
        return object


def _is_small(source: Any) -> bool:
    """Return whether a source is a model directory with at most `SMALL_BYTES` of weights."""
    if not isinstance(source, str) or not source:
        return False
    folder = Path(os.path.expanduser(source))
    files = [file for file in folder.glob("*.safetensors") if file.is_file()]
    return bool(files) and sum(file.stat().st_size for file in files) <= SMALL_BYTES


def _has_foreign_environment(whole: Table) -> bool:
    """Return whether the environment, or any part of a mix of environments, is named as
    `module:Class` or `library:name`.

    One such part is enough: its contexts may be longer than those of this package's environments,
    and its rewards may come in an early episode alone.
    """
    return any(":" in name for name in _environment_names(whole))


def _environment_names(whole: Table) -> list[str]:
    """Return the name of the environment, and those of all parts of a mix."""
    environment = _table_at(whole, "environment")
    parts = _table_at(environment, "options").get("parts", [])
    tables = [environment, *(parts if isinstance(parts, list) else [])]
    return [
        name
        for table in tables
        if isinstance(table, dict) and isinstance(name := table.get("name"), str)
    ]


def _table_at(tree: Table, key: str) -> Table:
    """Return the table at a key; {} if the key is missing, or has a value that is no table."""
    table = tree.get(key)
    return table if isinstance(table, dict) else {}


def stated_absent(tree: Table) -> Table:
    """Return a tree with "none" for absent tables, at any depth: TOML has no None."""
    return {
        key: NONE if value is None else stated_absent(value) if isinstance(value, dict) else value
        for key, value in tree.items()
    }


def without_idle_warm_start(config: Config) -> Config:
    """Return the configuration, its warm start replaced by None if that has 0 steps."""
    has_steps = config.warm_start is not None and config.warm_start.steps
    return config if has_steps else msgspec.structs.replace(config, warm_start=None)


def spelled_out(tree: Table) -> Table:
    """Write out, in place, the tables that a file writes in short, and return the tree.

    A kind alone stands for its table, as in `correction = "icepop"`, and `true` for a table that
    may be left out, as in `tracking.tensorboard = true`.
    """
    for table, key, hint in keys_of_tables(Config, tree):
        if key in table:
            table[key] = without_short_form(table[key], hint)
    return tree


def _with_kinds(tree: Table, section: type[Section]) -> Table:
    """Return a tree in which each table whose hint has several kinds states one. A table that
    stated none gets the kind of the schema's default, and is added if the tree lacks it.

    Args:
        section: Section of the tree.
    """
    whole = dict(tree)
    for field in fields_of(section):
        key, hint = field.name, hints_of(section)[field.name]
        if kinds(hint) and field.default is not None:  # None: the table is absent by default
            table = whole.setdefault(key, {})
            if isinstance(table, dict):
                whole[key] = {kind_key(hint): field.default.kind} | table
        inside = section_of(hint, whole.get(key))
        if inside is not None and isinstance(whole.get(key), dict):
            whole[key] = _with_kinds(whole[key], inside)
    return whole
