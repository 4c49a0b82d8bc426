"""What a configuration means by what it leaves out.

The schema's defaults suit a pretrained model. A tiny policy on two cores wants others, which are
here and nowhere else; they hold where neither a file nor `--set` says the key, so
`--set policy.source=DIR` over a file of a tiny policy gets the pretrained model's.
"""

import msgspec

from mage_async.config.schema import Config
from mage_async.config.sections.section import Section
from mage_async.config.shape import (
    NONE,
    Table,
    hints_of,
    kinds,
    may_be_absent,
    over,
    table_of,
    tables,
)

WITH_TINY: Table = {
    "transcript": {
        "rules": False,
        "forced_tags": "both",
        "max_action_tokens": 1,
        "max_reflection_tokens": 5,
    },
    "warm_start": {},
    "engine": {"max_contexts": 80, "max_tokens": 160, "cache_rule": "keep", "threads": 1},
    "admission": {"groups_per_step": 18, "max_staleness": 1, "grant_deadline_s": 60.0},
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
"""Defaults where `policy.kind = "tiny"`."""

ON_CORES: Table = {
    "policy": {"lora": {}},
    "transcript": {"forced_tags": "both", "max_action_tokens": 8, "max_reflection_tokens": 64},
    "engine": {"max_tokens": 2048, "threads": 1, "turn_deadline_s": 1800.0},
    "admission": {"groups_per_step": 3, "grant_deadline_s": 3600.0},
    "learner": {
        "minibatches": 2,
        "learning_rate": 0.0002,
        "warmup_steps": 2,
        "entropy": 0.01,
        "tokens_per_pass": 8192,
        "shared_opening": True,
        "activation_checkpointing": True,
        "threads": 1,
    },
    "evaluation": {"every": 0, "trials": 16, "final_trials": 32},
}
"""Defaults of a pretrained policy whose learner and engines compute on processor cores, for a model
of a hundred million weights on two: a step of 24 trials with adapters, in passes of little memory,
and no evaluation before the end. All other defaults are the schema's."""


def completed(tree: Table, *, is_recorded: bool = False) -> Table:
    """A tree with all kinds stated, the defaults of its kind of policy, and None for absent
    sections.

    Args:
        is_recorded: a run wrote the tree: a key that it lacks is newer than the run and gets the
            schema's default.
    """
    whole = _with_kinds(tree, Config)
    whole = over(_defaults(whole, is_recorded), whole, Config)
    for table, key, hint in tables(Config, whole):
        if table.get(key) == NONE and may_be_absent(hint):
            table[key] = None
    return whole


def _defaults(whole: Table, is_recorded: bool) -> Table:
    """Defaults that hold instead of the schema's."""
    policy, engine, learner = (
        table if isinstance(table := whole.get(name, {}), dict) else {}
        for name in ("policy", "engine", "learner")
    )
    if policy.get("kind") == "tiny":
        return WITH_TINY
    is_on_cores = engine.get("kind") == "embedded" and learner.get("device", "cpu") == "cpu"
    is_pretrained = policy.get("kind") == "pretrained"
    return ON_CORES if is_pretrained and is_on_cores and not is_recorded else {}


def stated_absent(tree: Table) -> Table:
    """The same with the word for an absent section, at any depth, where TOML has no None."""
    return {
        key: NONE if value is None else stated_absent(value) if isinstance(value, dict) else value
        for key, value in tree.items()
    }


def without_empty(config: Config) -> Config:
    """The same without a warm start of no steps, and without a curriculum of no stages."""
    warm, grows = config.warm_start, config.curriculum
    return msgspec.structs.replace(
        config,
        warm_start=warm if warm and warm.steps else None,
        curriculum=grows if grows and (grows.turns or grows.episodes) else None,
    )


def spelled_out(tree: Table) -> Table:
    """A file's tree, in place, where a kind alone stands for a table: `correction = "icepop"`."""
    for table, key, hint in tables(Config, tree):
        if isinstance(table.get(key), str) and kinds(hint):
            table[key] = {"kind": table[key]}
    return tree


def _with_kinds(tree: Table, section: type[Section]) -> Table:
    """Every table that has kinds states its own."""
    whole, defaults = dict(tree), {each.name: each for each in msgspec.structs.fields(section)}
    for key, hint in hints_of(section).items():
        if kinds(hint):
            whole.setdefault(key, {})
            if isinstance(whole[key], dict):
                whole[key] = {"kind": defaults[key].default.kind} | whole[key]
        inside = table_of(hint, whole.get(key))
        if inside is not None and isinstance(whole.get(key), dict):
            whole[key] = _with_kinds(whole[key], inside)
    return whole
