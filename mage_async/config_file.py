"""Configuration files: TOML in, `Config` out, and errors that say what to write instead.

A file is complete, or begins with `base = "other.toml"`, a path from its own folder, and says what
differs: its keys replace those of the other file, section by section. One level: a base has none
itself. What a run records, compares and digests is the whole, without a trace of the base.
"""

import difflib
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from mage_async.config import Config, Section
from mage_async.errors import ConfigError

BOUNDS = {">=": "at least", ">": "greater than", "<=": "at most", "<": "less than"}
LARGEST = 2**63 - 1
"""Of whole numbers, in TOML."""


def load(path: Path, assignments: list[str]) -> Config:
    """Read a file and its base, apply `a.b=c` assignments, and check every key and value."""
    tree = _resolved(path)
    for assignment in assignments:
        _assign(tree, assignment)
    return parse(tree, str(path))


def read(data: bytes, where: str) -> Config:
    """Read a file's bytes; `where` begins the error."""
    return parse(_tree(data, where), where)


def loads(text: str) -> Config:
    """Read what `dump` gave."""
    return parse(tomllib.loads(text), "configuration")


def parse(tree: dict[str, Any], where: str) -> Config:
    """Turn plain data into a `Config`; `where` begins the error."""
    if unwritable := _unwritable(tree):
        raise ConfigError(f"{where}: {unwritable}")
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_explain(str(error), tree)}") from None


def dump(config: Config) -> str:
    """The configuration as TOML; reading it gives an equal one."""
    lines = [f"seed = {config.seed}"]
    for name, section in msgspec.to_builtins(config).items():
        if isinstance(section, dict):
            lines += _table(name, section)
    return "\n".join(lines) + "\n"


def find(name: str | None) -> Path:
    """The file of that name, or the quickstart, installed or from a checkout."""
    shipped = [Path(__file__).parents[1] / "configs", Path(__file__).parent / "configs"]
    folder = next((folder for folder in shipped if folder.is_dir()), shipped[0])
    if name is None:
        return folder / "quickstart.toml"
    for candidate in (Path(name), folder / name, folder / f"{name}.toml"):
        if candidate.is_file():
            return candidate
    files = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.toml"))
    known = ", ".join(sorted(file.as_posix() for file in files))
    raise ConfigError(f"no configuration file {name!r}; shipped ones: {known}")


def _resolved(path: Path) -> dict[str, Any]:
    """A file's keys over those of its base, where it names one."""
    own = _read(path)
    name = own.pop("base", None)
    if name is None:
        return own
    if not isinstance(name, str):
        raise ConfigError(f"{path}: `base` must be the path of a file, got {name!r}")
    file = path.parent / name
    if not file.is_file():
        raise ConfigError(f"{path}: its base {name!r} is not there: {file}")
    below = _read(file)
    if "base" in below:
        raise ConfigError(
            f"{path}: its base {name!r} has a base itself, {below['base']!r}; there is one "
            "level: name that one, or copy its keys"
        )
    return _over(below, own, Config)


def _over(below: dict[str, Any], own: dict[str, Any], section: type[Section]) -> dict[str, Any]:
    """One section's keys over another's; sections inside are merged, all other values replaced."""
    hints = get_type_hints(section)
    merged = dict(below)
    for key, value in own.items():
        inside, is_table = hints.get(key), isinstance(value, dict)
        if is_table and _is_section(inside) and isinstance(below.get(key), dict):
            merged[key] = _over(below[key], value, inside)
        else:
            merged[key] = value
    return merged


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def _read(path: Path) -> dict[str, Any]:
    try:
        return _tree(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _tree(data: bytes, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}: its values are nested too deeply") from None


def _assign(tree: dict[str, Any], assignment: str) -> None:
    path, equals, text = assignment.partition("=")
    if not equals:
        raise ConfigError(f"--set takes a.b=value, got {assignment!r}")
    *parents, leaf = path.strip().split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {assignment}: `{parent}` is a value, not a table")
    tree[leaf] = _value(text.strip())


def _value(text: str) -> Any:
    """A TOML value, or the text itself where it is none: `engine.kind=embedded` works."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _unwritable(value: Any, path: str = "") -> str:
    """What is wrong with the first number that the files of a run could not hold; "" of none."""
    if isinstance(value, dict):
        inside = ((f"{path}.{key}".removeprefix("."), each) for key, each in value.items())
    elif isinstance(value, list):
        inside = ((f"{path}[{number}]", each) for number, each in enumerate(value))
    elif isinstance(value, float) and not math.isfinite(value):
        return f"`{path}` must be a finite number, got {value}"
    elif isinstance(value, int) and abs(value) > LARGEST:
        return f"`{path}` must be at most {LARGEST}, got {value}"
    else:
        return ""
    return next(filter(None, (_unwritable(each, where) for where, each in inside)), "")


def _explain(message: str, tree: dict[str, Any]) -> str:
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
    is_section = _is_section(_hint(f"$.{keys[0]}"))
    line = f"the section [{keys[0]}]" if is_section else f"`{name} = …`"
    place = f" under [{section}]" if section and not is_section else ""
    return (
        f"lacks {', '.join(f'`{key}`' for key in keys)}: add {line}{place}"
        f"{', and so on' if len(keys) > 1 else ''} (another version may have written the file); "
        "mage_async/config.py says what each key means"
    )


def _lacking(tree: dict[str, Any], section: type[Section], path: str = "$") -> Iterator[str]:
    """Keys of a section that are not there, and of those below it that are."""
    for name, hint in get_type_hints(section).items():
        if name not in tree:
            yield _key(path, name)
        elif _is_section(hint) and isinstance(tree[name], dict):
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


def _table(name: str, section: dict[str, Any]) -> list[str]:
    plain = {key: value for key, value in section.items() if not isinstance(value, dict)}
    nested = {key: value for key, value in section.items() if isinstance(value, dict)}
    lines = ["", f"[{name}]", *(f"{key} = {_literal(value)}" for key, value in plain.items())]
    for key, value in nested.items():
        lines += _table(f"{name}.{key}", value)
    return lines


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return msgspec.json.encode(value).decode()
