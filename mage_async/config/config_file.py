"""Configuration files: TOML in, `Config` out, and errors that say what to write instead.

A file is complete, or begins with `base = "other.toml"`, a path from its own folder, and says what
differs: its keys replace those of the other file, section by section. One level: a base has none
itself. What a run records, compares and digests is the whole, without a trace of the base.
"""

import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from mage_async.config.explain import explain, is_section, unwritable
from mage_async.config.schema import Config, Section
from mage_async.errors import ConfigError


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
    if said := unwritable(tree):
        raise ConfigError(f"{where}: {said}")
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {explain(str(error), tree)}") from None


def dump(config: Config) -> str:
    """The configuration as TOML; reading it gives an equal one."""
    lines = [f"seed = {config.seed}"]
    for name, section in msgspec.to_builtins(config).items():
        if isinstance(section, dict):
            lines += _table(name, section)
    return "\n".join(lines) + "\n"


def find(name: str | None) -> Path:
    """The file of that name, or the quickstart, installed or from a checkout."""
    shipped = [Path(__file__).parents[2] / "configs", Path(__file__).parents[1] / "configs"]
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
        if is_table and is_section(inside) and isinstance(below.get(key), dict):
            merged[key] = _over(below[key], value, inside)
        else:
            merged[key] = value
    return merged


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
