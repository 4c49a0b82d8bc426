"""Errors of a configuration: the key as `--set` takes it, its value, and what to write instead."""

import difflib
import math
import re
from dataclasses import dataclass
from typing import Any, get_args

from mage_async.config.components import registry_of
from mage_async.config.schema import Config
from mage_async.config.tables import (
    METHOD_TABLES,
    Table,
    hints_of,
    joined,
    keys_of,
    kind_class,
    kind_key,
    kinds,
    may_be_absent,
    names_in,
    table_of,
)
from mage_async.methods.registry import method_class

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
}
"""New names of tables and keys, by the old ones. The keys of a renamed table have kept their names.
"""
REMOVED_KEYS = {
    "admission.max_drops_in_a_row": "leave it out: 50 groups dropped in a row end a run",
    "methods.graph_memory.initial": "set `methods.graph_memory.rate` instead: new edges weigh 0.5",
}
"""What to do instead of setting a key that was removed, by the key."""
BOUNDS = {">=": "at least", ">": "greater than", "<=": "at most", "<": "less than"}
LARGEST = 2**63 - 1
"""The largest whole number in TOML."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The error of one key."""

    key: str
    sentence: str
    is_unknown: bool = False
    """Whether this version does not know the key or the kind."""


def unwritable(tree: Table) -> Fault | None:
    """Return the error of a number that a run's files cannot hold; None without such a number."""
    # A loop and no recursion: dotted keys may be nested more deeply than Python's stack.
    pending: list[tuple[str, Any]] = [("", tree)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            pending += ((f"{path}.{key}", each) for key, each in value.items())
        elif isinstance(value, list):
            pending += ((f"{path}[{number}]", each) for number, each in enumerate(value))
        elif isinstance(value, float) and not math.isfinite(value):
            return Fault(path[1:], f"`{path[1:]}` must be a finite number, got {value}")
        elif isinstance(value, int) and abs(value) > LARGEST:
            return Fault(path[1:], f"`{path[1:]}` must be at most {LARGEST}, got {value}")
    return None


def explain(message: str, tree: Table) -> Fault:
    """Translate an error of msgspec: the key, its value, and the values that are allowed.

    Args:
        tree: the data that was converted, with every kind stated.
    """
    what, _, path = message.partition(" - at ")
    path = path.strip("`") or "$"
    if unknown := re.search(r"unknown field `(.+)`", what):
        return _unknown(unknown[1], path, tree)
    parent, _, leaf = path.rpartition(".")
    is_kind = leaf != "" and leaf == kind_key(_hint(parent, tree))
    if "Invalid enum value" in what or is_kind:
        choices = ", ".join(map(repr, _choices(path, tree)))
        got = _lookup(tree, path)
        said = f"`{_key(path)}` must be one of {choices}, got {got!r}"
        own = ", or your own class as `module:Class`" if is_kind and _is_open(parent, tree) else ""
        return Fault(_key(path), said + own, is_kind)
    bound = what.removeprefix("Expected ").split(", got ")[0].replace("`", "")
    bound = re.sub(r"^(?:int|float) (>=|>|<=|<) (\S+)$", _in_words, bound)
    if "object" in bound:
        table = table_of(_hint(path, tree), None)
        keys = f" ({', '.join(keys_of(table))})" if table and 0 < len(keys_of(table)) < 4 else ""
        absent = ", or 'none'" if may_be_absent(_hint(path, tree)) else ""
        bound = f"a table{keys}{absent}"
    return Fault(_key(path), f"`{_key(path)}` must be {bound}, got {_lookup(tree, path)!r}")


def _in_words(bound: re.Match[str]) -> str:
    return f"{BOUNDS[bound[1]]} {bound[2]}"


def _key(path: str, *names: str) -> str:
    """Return a key as `--set` takes it; msgspec begins a path with a dollar."""
    return joined([*names_in(path)[1:], *names])


def _unknown(key: str, path: str, tree: Table) -> Fault:
    full, hint, value = _key(path, key), _hint(path, tree), _lookup(tree, path)
    table, kind = _table(hint, value), kind_key(hint)
    known = (*((kind,) if kind else ()), *(keys_of(table) if table else ()))
    owners = [name for name, each in kinds(hint).items() if key in keys_of(each)]
    near = difflib.get_close_matches(key, known, n=1)
    if full in RENAMED_KEYS:
        said = f"it is `{RENAMED_KEYS[full]}` now"
    elif full in REMOVED_KEYS:
        said = f"it was removed; {REMOVED_KEYS[full]}"
    elif owners:
        own = " or ".join(f'"{name}"' for name in owners)
        said = f'only with {_key(path, kind)} = {own}, which is "{value[kind]}"'
    elif near:
        said = f"did you mean `{_key(path, near[0])}`?"
    else:
        said = f"known: {', '.join(known)}"
    return Fault(full, f"unknown key `{full}` ({said})", is_unknown=not owners)


def _hint(path: str, tree: Table) -> Any:
    """Return the type that the configuration declares at a path."""
    hint: Any = Config
    for name in names_in(path)[1:]:
        if hint == METHOD_TABLES:
            hint = method_class(name).Settings
        else:
            table, name = _table(hint, tree), name.partition("[")[0]
            hint = hints_of(table).get(name) if table else None
        tree = tree.get(name, {}) if isinstance(tree, dict) else {}
    return hint


def _table(hint: Any, value: Any) -> Any:
    """Return the table of a value's kind, which may be a class of a user's own."""
    kind = value.get(kind_key(hint)) if isinstance(value, dict) else None
    return kind_class(hint, kind) or table_of(hint, value)


def _choices(path: str, tree: Table) -> list[str]:
    """Return every kind, or every literal, that the type at a path admits."""
    *above, last = names_in(path)
    parent = joined(above)
    if last and last == kind_key(_hint(parent, tree)):
        return list(kinds(_hint(parent, tree)))
    pending, found = [_hint(path, tree)], []
    while pending:
        for part in get_args(pending.pop()):
            (found if isinstance(part, str) else pending).append(part)
    return found


def _is_open(path: str, tree: Table) -> bool:
    """Return whether the table at a path may be a component of a user's own."""
    return any(registry_of(kind) for kind in kinds(_hint(path, tree)).values())


def _lookup(tree: Any, path: str) -> Any:
    for name in names_in(path)[1:]:
        name, _, rest = name.partition("[")
        tree = tree[name] if isinstance(tree, dict) and name in tree else tree
        if rest and rest.rstrip("]").isdigit():
            tree = tree[int(rest.rstrip("]"))]
    return tree
