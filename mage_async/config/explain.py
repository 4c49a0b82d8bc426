"""What is said of a configuration that cannot be read: the key as `--set` takes it, what was got,
and what to write instead.
"""

import difflib
import math
import re
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec

from mage_async.config.schema import Config, Section

BOUNDS = {">=": "at least", ">": "greater than", "<=": "at most", "<": "less than"}
LARGEST = 2**63 - 1
"""Of whole numbers, in TOML."""


def unwritable(tree: dict[str, Any]) -> str:
    """What is wrong with a number that the files of a run could not hold; "" where there is none.

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
            return f"`{path[1:]}` must be a finite number, got {value}"
        elif isinstance(value, int) and abs(value) > LARGEST:
            return f"`{path[1:]}` must be at most {LARGEST}, got {value}"
    return ""


def explain(message: str, tree: dict[str, Any]) -> str:
    """Say a msgspec error in our words: path, what was got, what is known."""
    what, _, path = message.partition(" - at ")
    path = path.strip("`") or "$"
    if unknown := re.search(r"unknown field `(.+)`", what):
        return _unknown(unknown[1], path)
    if "missing required field" in what:
        return _incomplete(list(_lacking(tree, Config)))
    if "Invalid enum value" in what:
        choices = ", ".join(map(repr, _choices(path)))
        return f"`{_key(path)}` must be one of {choices}, got {_lookup(tree, path)!r}"
    bound = what.removeprefix("Expected ").split(", got ")[0].replace("`", "")
    bound = re.sub(r"^(?:int|float) (>=|>|<=|<) (\S+)$", _in_words, bound)
    return f"`{_key(path)}` must be {bound}, got {_lookup(tree, path)!r}"


def _in_words(bound: re.Match[str]) -> str:
    return f"{BOUNDS[bound[1]]} {bound[2]}"


def _key(path: str, *names: str) -> str:
    """A key as `--set` takes it; msgspec begins a path with a dollar."""
    return ".".join([*path.split(".")[1:], *names])


def _unknown(key: str, path: str) -> str:
    known = _keys_at(path)
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean `{_key(path, near[0])}`?" if near else f"known: {', '.join(known)}"
    return f"unknown key `{_key(path, key)}` ({hint})"


def _incomplete(keys: list[str]) -> str:
    """A whole file lacks keys where another version wrote it, such as that of an older run."""
    section, _, name = keys[0].rpartition(".")
    if is_section(_hint(f"$.{keys[0]}")):
        line = f"the section [{keys[0]}]"
    else:
        line = f"`{name} = …`" + (f" under [{section}]" if section else "")
    return (
        f"lacks {', '.join(f'`{key}`' for key in keys)}: add {line}"
        f"{', and so on' if len(keys) > 1 else ''} (another version may have written the file); "
        "mage_async/config/schema.py says what each key means"
    )


def _lacking(tree: dict[str, Any], section: type[Section], path: str = "$") -> Iterator[str]:
    """Keys of a section that are not there, and of those below it that are."""
    for name, hint in get_type_hints(section).items():
        if name not in tree:
            yield _key(path, name)
        elif is_section(hint) and isinstance(tree[name], dict):
            yield from _lacking(tree[name], hint, f"{path}.{name}")


def _keys_at(path: str) -> list[str]:
    return [field.name for field in msgspec.structs.fields(_hint(path))]


def _hint(path: str) -> Any:
    """The type the configuration declares at a path."""
    hint: Any = Config
    for name in path.split(".")[1:]:
        hint = get_type_hints(hint)[name.partition("[")[0]]
    return hint


def _choices(path: str) -> list[str]:
    """Every literal the type at a path admits, however deep."""
    pending, found = [_hint(path)], []
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


def is_section(hint: Any) -> bool:
    """Whether the configuration declares a table of its own there."""
    return isinstance(hint, type) and issubclass(hint, Section)
