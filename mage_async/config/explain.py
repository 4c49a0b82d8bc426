"""What is said of a configuration that cannot be read: the key as `--set` takes it, what was got,
and what to write instead.
"""

import difflib
import math
import re
from dataclasses import dataclass
from typing import Any, get_args

from mage_async.config.older import MOVED
from mage_async.config.schema import Config
from mage_async.config.shape import Table, hints_of, keys_of, kinds, table_of

BOUNDS = {">=": "at least", ">": "greater than", "<=": "at most", "<": "less than"}
LARGEST = 2**63 - 1
"""The largest whole number in TOML."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one key."""

    key: str
    sentence: str
    is_unknown: bool = False
    """Whether the key, or its kind, is none of this version."""


def unwritable(tree: Table) -> Fault | None:
    """A number that the files of a run could not hold; None where there is none.

    Without recursion: dotted keys may be nested more deeply than Python calls itself.
    """
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
    """Say a msgspec error in our words: path, what was got, what is known.

    Args:
        tree: what was converted, every kind stated.
    """
    what, _, path = message.partition(" - at ")
    path = path.strip("`") or "$"
    if unknown := re.search(r"unknown field `(.+)`", what):
        return _unknown(unknown[1], path, tree)
    if "Invalid enum value" in what or path.endswith(".kind"):
        choices = ", ".join(map(repr, _choices(path, tree)))
        said = f"`{_key(path)}` must be one of {choices}, got {_lookup(tree, path)!r}"
        return Fault(_key(path), said, path.endswith(".kind"))
    bound = what.removeprefix("Expected ").split(", got ")[0].replace("`", "")
    bound = re.sub(r"^(?:int|float) (>=|>|<=|<) (\S+)$", _in_words, bound)
    bound = bound.replace("object | null", "a table, or 'none'")
    return Fault(_key(path), f"`{_key(path)}` must be {bound}, got {_lookup(tree, path)!r}")


def _in_words(bound: re.Match[str]) -> str:
    return f"{BOUNDS[bound[1]]} {bound[2]}"


def _key(path: str, *names: str) -> str:
    """A key as `--set` takes it; msgspec begins a path with a dollar."""
    return ".".join([*path.split(".")[1:], *names])


def _unknown(key: str, path: str, tree: Table) -> Fault:
    full, hint, value = _key(path, key), _hint(path, tree), _lookup(tree, path)
    table = table_of(hint, value)
    known = (*(("kind",) if kinds(hint) else ()), *(keys_of(table) if table else ()))
    owners = [name for name, each in kinds(hint).items() if key in keys_of(each)]
    near = difflib.get_close_matches(key, known, n=1)
    if owners:
        own = " or ".join(f'"{name}"' for name in owners)
        said = f'only with {_key(path, "kind")} = {own}, which is "{value["kind"]}"'
    elif near:
        said = f"did you mean `{_key(path, near[0])}`?"
    else:
        said = f"known: {', '.join(known)}"
    older = next((f"; once `{old}`" for old, new in MOVED.items() if new == full), "")
    return Fault(full, f"unknown key `{full}` ({said}{older})", is_unknown=not owners)


def _hint(path: str, tree: Table) -> Any:
    """The type that the configuration declares at a path."""
    hint: Any = Config
    for name in path.split(".")[1:]:
        table, name = table_of(hint, tree), name.partition("[")[0]
        hint = hints_of(table).get(name) if table else None
        tree = tree.get(name, {}) if isinstance(tree, dict) else {}
    return hint


def _choices(path: str, tree: Table) -> list[str]:
    """Every kind, or every literal, that the type at a path admits."""
    parent, _, last = path.rpartition(".")
    if last == "kind" and (known := kinds(_hint(parent, tree))):
        return list(known)
    pending, found = [_hint(path, tree)], []
    while pending:
        for part in get_args(pending.pop()):
            (found if isinstance(part, str) else pending).append(part)
    return found


def _lookup(tree: Any, path: str) -> Any:
    for name in path.split(".")[1:]:
        name, _, rest = name.partition("[")
        tree = tree[name] if isinstance(tree, dict) and name in tree else tree
        if rest and rest.rstrip("]").isdigit():
            tree = tree[int(rest.rstrip("]"))]
    return tree
