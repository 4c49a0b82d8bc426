"""Write the error messages of a wrong configuration.

A message has the key as `--set` takes it, its value, and what to write instead: the allowed values,
the key that was probably meant, all known keys, or the new name of an old key.
"""

import difflib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, time
from typing import Any, get_args

from mage_async.config.schema import Config
from mage_async.config.tables import (
    MethodTables,
    Table,
    hints_of,
    join_key,
    kind_key,
    kinds,
    may_be_absent,
    registry_of,
    section_of,
    split_key,
)
from mage_async.methods.catalogue import method_class

RENAMED_KEYS = {
    "learner.tokens_per_pass": "learner.max_tokens_per_microbatch",
    "curriculum": "methods.scaling_inter",
    "expert": "methods.stepagent",
    "graph_memory": "methods.graph_memory",
    "sac": "methods.sac_glam",
    "credit.exploration_share": "methods.metacure.exploration_share",
    "credit.information_bonus": "methods.metacure.information_bonus",
    "policy.separate_exploration": "methods.metacure.separate_roles",
    "population.both_seats": "methods.both_seats.share",
    "trial.turn_budget": "trial.episode_budget",
    # With `warm_start.kind = "win_stay"`; the other kinds have the old keys, with another meaning.
    "warm_start.gate": "warm_start.repeat_gate",
    "warm_start.max_steps": "warm_start.max_stable_steps",
}
"""New names of tables and keys by their old names. Keys inside a renamed table keep their names."""
REMOVED_KEYS = {
    "admission.max_drops_in_a_row": "leave it out: 50 groups dropped in a row end a run",
    "journal.segment_bytes": "leave it out: a segment ends at 64 MiB",
    "learner.beta1": "leave it out: AdamW's first moment decays by 0.9",
    "warm_start.template_weight": "leave it out: tokens that the template forces weigh 0.1",
    "methods.graph_memory.initial": "set `methods.graph_memory.rate` instead: new edges weigh 0.5",
}
"""What to do instead of setting a key that was removed, by the key."""
SYNONYMS = {
    **dict.fromkeys(("lr", "step_size"), "learner.learning_rate"),
    **dict.fromkeys(
        ("group_size", "num_generations", "rollouts", "n"), "admission.trials_per_group"
    ),
    **dict.fromkeys(
        ("batch_size", "train_batch_size", "generation_batch_size"), "admission.groups_per_step"
    ),
    **dict.fromkeys(
        ("num_minibatches", "mini_batch_size", "ppo_mini_batch_size", "steps_per_generation"),
        "learner.minibatches",
    ),
    **dict.fromkeys(("gamma", "discount"), "credit.turn_discount"),
    **dict.fromkeys(("epsilon", "clip_ratio_low"), "learner.correction.clip_low"),
    **dict.fromkeys(
        ("epsilon_high", "clip_ratio_high", "clip_ratio", "clip", "clip_range", "clip_eps"),
        "learner.correction.clip_high",
    ),
    **dict.fromkeys(("delta", "clip_ratio_c"), "learner.correction.dual_clip"),
    **dict.fromkeys(("importance_sampling_level", "loss_mode"), "learner.correction.kind"),
    **dict.fromkeys(("loss_type", "loss_agg_mode"), "learner.average"),
    **dict.fromkeys(("scale_rewards", "norm_adv_by_std_in_grpo"), "advantage.scale"),
    "adv_estimator": "advantage.estimator",
    **dict.fromkeys(("kl_coef", "kl_loss_coef", "beta", "kl"), "learner.kl"),
    **dict.fromkeys(("entropy_coef", "entropy_coeff", "ent_coef"), "learner.entropy"),
    **dict.fromkeys(("max_grad_norm", "clip_grad"), "learner.grad_clip"),
    **dict.fromkeys(
        ("num_steps", "max_steps", "total_training_steps", "iterations"), "learner.steps"
    ),
    "lr_warmup_steps": "learner.warmup_steps",
    **dict.fromkeys(
        ("gradient_checkpointing", "enable_gradient_checkpointing"),
        "learner.activation_checkpointing",
    ),
    "ppo_max_token_len_per_gpu": "learner.max_tokens_per_microbatch",
    **dict.fromkeys(("save_steps", "save_freq"), "learner.checkpoint_every"),
    **dict.fromkeys(("save_total_limit", "max_actor_ckpt_to_keep"), "learner.keep_checkpoints"),
    **dict.fromkeys(("eval_steps", "test_freq"), "evaluation.every"),
    **dict.fromkeys(("model", "model_path"), "policy.source"),
    **dict.fromkeys(("lora_r", "lora_rank"), "policy.lora.rank"),
    **dict.fromkeys(
        ("max_length", "max_seq_len", "max_model_len", "context_length"), "engine.max_tokens"
    ),
    **dict.fromkeys(
        ("max_new_tokens", "max_completion_length", "max_response_length"),
        "transcript.max_action_tokens",
    ),
    "filter_groups": "admission.replaced_groups",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "num_episodes": "trial.episodes",
}
"""Keys by the names that other libraries give them; `docs/other_trainers.md` says what differs."""
BOUNDS = {">=": "at least", ">": "greater than", "<=": "at most", "<": "less than"}
"""Words for the signs with which msgspec states a bound."""
TYPES = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}
"""Words for the types that msgspec names."""
SMALLEST, LARGEST = -(2**63), 2**63 - 1
"""The smallest and the largest whole number in TOML."""


def successor(key: str) -> str:
    """Return a clause that says how to replace a key or table of an earlier version; "" for other
    keys.
    """
    for old, new in RENAMED_KEYS.items():
        if key == old or key.startswith(f"{old}."):
            current = new + key.removeprefix(old)
            # A key of a renamed table may itself have been removed later.
            return successor(current) or f"it is `{current}` now"
    return f"it was removed; {REMOVED_KEYS[key]}" if key in REMOVED_KEYS else ""


@dataclass(frozen=True, slots=True)
class Fault:
    """Describe what is wrong with one key, in a sentence for the user."""

    key: str
    sentence: str
    is_unknown: bool = False
    """Whether this version does not know the key, or the kind that it states. In the file of a run
    a newer version may have written it."""


def unwritable_value(tree: Table) -> Fault | None:
    """Find a value that a run's files and messages (JSON, TOML, msgpack) cannot hold: a number that
    is not finite or beyond 64 bits, or a date. Return its fault, or None.
    """
    # A loop and no recursion: dotted keys may be nested more deeply than Python's stack.
    # Every path begins with a dot, which `path[1:]` leaves out.
    pending: list[tuple[str, Any]] = [("", tree)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            pending += ((f"{path}.{key}", each) for key, each in value.items())
        elif isinstance(value, list):
            pending += ((f"{path}[{number}]", each) for number, each in enumerate(value))
        elif isinstance(value, float) and not math.isfinite(value):
            return Fault(path[1:], f"`{path[1:]}` must be a finite number, got {value}")
        elif isinstance(value, int) and not SMALLEST <= value <= LARGEST:
            bound = f"at most {LARGEST}" if value > LARGEST else f"at least {SMALLEST}"
            return Fault(path[1:], f"`{path[1:]}` must be {bound}, got {value}")
        elif isinstance(value, date | time):
            allowed = (
                f'a number or a text, not a date or time; a text has quotes: "{value.isoformat()}"'
            )
            return Fault(path[1:], f"`{path[1:]}` must be {allowed}")
    return None


def explain(message: str, tree: Table) -> Fault:
    """Translate an error of msgspec into one with the key, its value and the allowed values.

    Args:
        message: such as "Expected `int` >= 1 - at `$.learner.steps`", "Object contains unknown
            field `x` - at `$.learner`", or "Expected `object | null`, got `int` - at
            `$.policy.lora`".
        tree: the data that was converted, in which every table states its kind (its key `kind` or
            `estimator`).
    """
    what, _, path = message.partition(" - at ")
    path = path.strip("`") or "$"
    if unknown := re.search(r"unknown field `(.+)`", what):
        return _unknown(unknown[1], path, tree)
    parent, _, leaf = path.rpartition(".")
    (table_hint, _), (hint, value) = _declared(parent, tree), _declared(path, tree)
    key = _key(path)
    # An unknown kind is "Invalid value"; a wrong choice of a `Literal` is "Invalid enum value".
    is_kind = leaf != "" and leaf == kind_key(table_hint)
    if "Invalid enum value" in what or is_kind:
        choices = ", ".join(map(repr, kinds(table_hint) if is_kind else _literals(hint)))
        own = ", or your own class as `module:Class`" if is_kind and registry_of(table_hint) else ""
        if is_kind and may_be_absent(table_hint):
            own += f'; {_key(parent)} = "none" leaves the table out'
        return Fault(key, f"`{key}` must be one of {choices}, got {value!r}{own}", is_kind)
    # What msgspec expected: "int >= 1" becomes "at least 1", "object | null" becomes "a table, or
    # 'none'".
    bound = what.removeprefix("Expected ").split(", got ")[0].replace("`", "")
    bound = re.sub(
        r"^(?:int|float) (>=|>|<=|<) (\S+)$", lambda found: f"{BOUNDS[found[1]]} {found[2]}", bound
    )
    bound = TYPES.get(bound, bound)
    if bound == "array":
        bound = _list_in_words(key, value, _literals(hint))
    elif "object" in bound:
        section = section_of(hint)
        # The keys of a small table fit into the sentence.
        names = ", ".join(hints_of(section)) if section and len(hints_of(section)) < 4 else ""
        absent = ", or 'none'" if may_be_absent(hint) else ""
        bound = f"a table{f' ({names})' if names else ''}{absent}"
    return Fault(key, f"`{key}` must be {bound}, got {value!r}")


def _unknown(name: str, path: str, tree: Table) -> Fault:
    """Return the error of the key `name`, which the table at `path` does not have."""
    full, (hint, value) = _key(path, name), _declared(path, tree)
    section, kind = section_of(hint, value, imports=True), kind_key(hint)
    known = [*([kind] if kind else []), *(hints_of(section) if section else ())]
    # Other kinds of the table that have the key.
    owners = [f'"{tag}"' for tag, each in kinds(hint).items() if name in hints_of(each)]
    near, replacement = difflib.get_close_matches(name, known, n=1), successor(full)
    is_unknown = not owners and not replacement
    if replacement:
        cure = replacement
    elif owners:
        cure = f'only with {_key(path, kind)} = {" or ".join(owners)}, which is "{value[kind]}"'
    elif name in SYNONYMS:
        cure = f"did you mean `{SYNONYMS[name]}`?"
    elif near:
        cure = f"did you mean `{_key(path, near[0])}`?"
    else:
        cure = f"known: {', '.join(known)}"
    return Fault(full, f"unknown key `{full}` ({cure})", is_unknown)


def _key(path: str, *names: str) -> str:
    """Return a key as `--set` takes it, from a path of msgspec, which begins with "$"."""
    return join_key([*split_key(path)[1:], *names])


def _declared(path: str, tree: Table) -> tuple[Any, Any]:
    """Return the type that the schema declares at a path such as `$.doctor.halt[0]`, and the value
    that the tree has there.

    If the tree ends before the path does, the value is the last table on the path.
    """
    hint: Any = Config
    value: Any = tree
    for step in split_key(path)[1:]:
        name, _, index = step.removesuffix("]").partition("[")
        if hint == MethodTables:  # `name` is that of a method, whose class declares its keys
            hint = method_class(name).Settings
        else:
            section = section_of(hint, value, imports=True)
            hint = hints_of(section).get(name) if section else None
        if isinstance(value, dict) and name in value:
            value = value[name]
        if index.isdigit():
            value = value[int(index)]
    return hint, value


def _list_in_words(key: str, value: Any, choices: Sequence[str]) -> str:
    """Return what to write for a key whose value is a list: the allowed items, and an example.

    Args:
        value: What was given instead of a list; if it is an allowed item, the example lists it.
        choices: Allowed items; empty if any item is allowed.
    """
    # A shell removes the quotes inside `--set a.b=["c"]`, so that the value is the text "[c]".
    item = value.strip("[] ") if isinstance(value, str) else value
    if choices and item not in choices:
        item = choices[0]
    example = json.dumps([item], ensure_ascii=False, default=str)
    among = f" of {', '.join(map(repr, choices))}" if choices else ""
    return f"a list{among}, as in --set '{key}={example}'"


def _literals(hint: Any) -> list[str]:
    """Return the values of all `Literal`s in a type, such as a list or union of them."""
    parts = get_args(hint)
    return [hint] if isinstance(hint, str) else [text for part in parts for text in _literals(part)]
