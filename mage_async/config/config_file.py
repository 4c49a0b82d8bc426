"""Configuration files: TOML in, `Config` out, and errors that say what to write instead.

A file contains the keys that it changes; all others have the schema's defaults. It may begin with
`base = "other.toml"`, a path from its own folder, whose keys it replaces section by section; a base
has no base itself. A run records, compares and digests the resolved configuration, without the
base.
"""

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from mage_async.config.defaults import completed, spelled_out, stated_absent, without_empty
from mage_async.config.explain import Fault, explain, unwritable
from mage_async.config.presets import keys_of_method
from mage_async.config.schema import Config
from mage_async.config.section import Section, Variant
from mage_async.config.tables import (
    NONE,
    Table,
    hints_of,
    in_full,
    is_own,
    joined,
    keys_of,
    kind_class,
    kind_key,
    may_be_absent,
    names_in,
    over,
    own_component,
    table_of,
)
from mage_async.errors import ConfigError
from mage_async.methods.registry import METHODS, method_class

DEFAULT_POLICY = Config().policy.kind


class Assignments:
    """The keys of a file, over which first a preset and then `--set a.b=c` are written.

    A preset's keys count as the file's: an error about one of them names the file.
    """

    def __init__(self, tree: Table) -> None:
        self.tree = tree
        self._given: dict[str, str] = {}

    def method(self, keys: Table) -> None:
        """Write the keys of a preset; an empty table turns a method on."""
        for key, value in keys.items():
            if value == {}:
                self._table(names_in(key))
            else:
                self._write(key, value)

    def give(self, assignment: str) -> None:
        """Write `a.b=value`. If it changes a kind, the file's keys that the new kind lacks are
        removed.

        Raises:
            ConfigError: the text is no assignment, or its path goes through a value.
        """
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set takes a.b=value, got {assignment!r}")
        key, value = key.strip(), _value(text.strip())
        if key == "policy.source" and not self._given.get("policy.kind"):
            self._write("policy.kind", "pretrained")  # the only kind with a source
        self._given.pop(key, None)
        self._given[key] = assignment
        self._write(key, value)

    def blamed(self, key: str) -> str:
        """Return the newest assignment to a key, a table above or a key below; "" for none."""
        for name, assignment in reversed(self._given.items()):
            if f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}."):
                return f"--set {assignment}"
        return ""

    def _write(self, key: str, value: Any) -> None:
        *names, leaf = names_in(key)
        path = joined(names)
        table, hint = self._table(names)
        inside = _hint(table_of(hint, table), leaf)
        # `learner.correction=tis` is short for `learner.correction.kind=tis`.
        if isinstance(value, str) and isinstance(in_full(value, inside), dict):
            self._write(f"{key}.{kind_key(inside)}", value)
        # A new kind: keys of the old kind that the new one lacks are removed.
        elif leaf == kind_key(hint) and (kind := kind_class(hint, value)):
            self._switch(table, path, kind, hint)
        else:
            table[leaf] = in_full(value, inside)

    def _table(self, names: list[str]) -> tuple[Table, Any]:
        """Return the table at a path, which is created if it is not there, and its type.

        Raises:
            ConfigError: there is a value at the path or above it.
        """
        table, hint = self.tree, Config
        for depth, name in enumerate(names):
            hint = _hint(table_of(hint, table), name)
            is_method = names[:depth] == ["methods"]
            if table.get(name) == NONE and (is_method or may_be_absent(hint)):
                table[name] = {}
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                path = joined(names[: depth + 1])
                raise ConfigError(f"{self.blamed(path) or path}: `{path}` is a value, not a table")
        return table, hint

    def _switch(self, table: Table, path: str, kind: type[Variant], hint: Any) -> None:
        """Change the kind of a table.

        With another kind of policy a file's warm start, which suits the file's policy, is removed.
        """
        name = str(kind.__struct_config__.tag)
        is_other_policy = path == "policy" and table.get("kind", DEFAULT_POLICY) != name
        for key in [*table]:
            if key not in keys_of(kind) and f"{path}.{key}" not in self._given:
                del table[key]
        if is_other_policy and "warm_start" not in self._sections():
            self.tree.pop("warm_start", None)
        table[kind_key(hint)] = name

    def _sections(self) -> set[str]:
        """Return the sections that an assignment has written to."""
        return {key.partition(".")[0] for key in self._given}


def _hint(place: Any, key: str) -> Any:
    """Return the type that a table declares for a key; None if it declares none."""
    return None if place is None else hints_of(place).get(key)


def _value(text: str) -> Any:
    """Parse a TOML value; other text is returned as it is, so that `engine.kind=embedded` works."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def load(path: Path, assignments: Sequence[str] = (), method: str | None = None) -> Config:
    """Read a file and its base, write a method's keys and then `a.b=c` assignments over them, and
    check every key and value.

    Raises:
        ConfigError: a key or value is wrong; the error begins with the file or the assignment.
    """
    return _parsed(_written(_resolved(path), assignments, method), str(path))


def load_recorded(
    path: Path,
    assignments: Sequence[str] = (),
    method: str | None = None,
    *,
    imports: bool = True,
) -> Config:
    """Read the configuration that a run recorded, and write a preset and assignments over it.

    Args:
        imports: whether to import components of a user's own. Whoever only looks at a run must not
            execute its code.

    Raises:
        ConfigError: as `load`; or a newer version recorded it.
    """
    written = _written(_read(path), assignments, method)
    return _parsed(written, str(path), is_recorded=True, imports=imports)


def read(data: bytes, where: str) -> Config:
    """Read a configuration from bytes; an error begins with `where`."""
    return _parsed(Assignments(_tree(data, where)), where)


def loads(text: str, *, imports: bool = True) -> Config:
    """Read the text that `dump` returned; `imports` as in `load_recorded`."""
    tree = _tree(text.encode(), "configuration")
    return _parsed(Assignments(tree), "configuration", is_recorded=True, imports=imports)


def dump(config: Config) -> str:
    """Return the whole configuration as TOML; reading it gives an equal one."""
    return tomli_w.dumps(stated_absent(msgspec.to_builtins(config)))


def find(name: str | None) -> Path:
    """Return the path of a configuration file, shipped or the user's; the quickstart without a
    name.

    Raises:
        ConfigError: there is no such file.
    """
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


def _written(tree: Table, assignments: Sequence[str], method: str | None) -> Assignments:
    written = Assignments(tree)
    written.method(keys_of_method(method) if method else {})
    for assignment in assignments:
        written.give(assignment)
    return written


def _parsed(
    written: Assignments, where: str, *, is_recorded: bool = False, imports: bool = True
) -> Config:
    """Turn plain data into a `Config`; an error that no assignment causes begins with `where`."""
    if fault := unwritable(written.tree):
        raise _error(fault, written, where)
    tree = completed(written.tree, is_recorded=is_recorded)
    try:
        tree["methods"] = _method_tables(written, tree, where, is_recorded=is_recorded)
        return without_empty(from_tables(tree, imports=imports))
    except msgspec.ValidationError as error:
        fault = explain(str(error), tree)
    if is_recorded and fault.is_unknown and not written.blamed(fault.key):
        raise ConfigError(
            f"{where}: a newer version of mage_async wrote it: this one has no such "
            f"`{fault.key}`; use the version that wrote it"
        )
    raise _error(fault, written, where)


def _method_tables(written: Assignments, tree: Table, where: str, *, is_recorded: bool) -> Any:
    try:
        return with_all_keys(tree.get("methods", {}), is_recorded=is_recorded)
    except ConfigError as error:
        raise ConfigError(f"{written.blamed('methods') or where}: {error}") from error


def as_tables(config: Config) -> Table:
    """Return a configuration as plain data, for a message to another process."""
    return msgspec.to_builtins(config)


def from_tables(tree: Table, *, imports: bool = True) -> Config:
    """Convert plain data, with all kinds stated, into a `Config`.

    Args:
        imports: whether to import components of a user's own; if not, they only hold their keys.

    Raises:
        msgspec.ValidationError: as `msgspec.convert`; the path begins at the whole configuration.
    """
    # msgspec converts the components it knows by the types of the schema. Those of a user's own are
    # converted by themselves and put in the place of the defaults.
    own = {path: (hint, table) for path, hint, table in _own_tables(Config, tree, ())}
    config = msgspec.convert(_without(tree, own), Config)
    for path, (hint, table) in own.items():
        try:
            component = own_component(hint, table, imports=imports)
        except msgspec.ValidationError as error:
            what, _, below = str(error).partition(" - at ")
            full = ".".join(["$", *path]) + below.strip("`").removeprefix("$")
            raise msgspec.ValidationError(f"{what} - at `{full}`") from None
        config = _replaced(config, path, component)
    return config


def _own_tables(
    section: type[Section], tree: Table, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any, Table]]:
    """Yield the path, type and table of each component of a user's own, without importing it."""
    for key, hint in hints_of(section).items():
        value = tree.get(key)
        if isinstance(value, dict) and is_own(hint, value):
            yield (*path, key), hint, value
        elif isinstance(value, dict) and (found := table_of(hint, value)) is not None:
            yield from _own_tables(found, value, (*path, key))


def _without(tree: Table, paths: Iterable[tuple[str, ...]]) -> Table:
    """Return a tree without the values at some paths."""
    here = {path[0]: [other[1:] for other in paths if other[0] == path[0]] for path in paths}
    return {
        key: _without(value, here[key]) if key in here else value
        for key, value in tree.items()
        if () not in here.get(key, ())
    }


def _replaced(struct: Any, path: Sequence[str], value: Any) -> Any:
    """Return a struct with the value at a path replaced."""
    key, *below = path
    new = _replaced(getattr(struct, key), below, value) if below else value
    return msgspec.structs.replace(struct, **{key: new})


def _error(fault: Fault, written: Assignments, where: str) -> ConfigError:
    return ConfigError(f"{written.blamed(fault.key) or where}: {fault.sentence}")


def _resolved(path: Path) -> Table:
    """Read a file and its base, if it names one."""
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
    return over(below, own, Config)


def _read(path: Path) -> Table:
    try:
        return _tree(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _tree(data: bytes, where: str) -> Table:
    """Parse TOML, and spell out tables that are written in short."""
    try:
        return spelled_out(tomllib.loads(data.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}: its values are nested too deeply") from None


# The tables `[methods.NAME]`, typed by the methods' own structs.

SECTION = "methods"


def with_all_keys(tables: Any, *, is_recorded: bool) -> Any:
    """Return the methods' tables with the defaults of all keys, without those that are "none".

    Anything but tables is returned as it is: the schema refuses it.

    Args:
        is_recorded: a run wrote the tables, so they have all keys. Then a user's own method is not
            imported: to look at a run must not execute its code.

    Raises:
        ConfigError: there is no method of a name.
        msgspec.ValidationError: a table has an unknown key or a wrong value; the path begins at the
            whole configuration.
    """
    if not isinstance(tables, dict):
        return tables

    def skips(name: str) -> bool:
        return is_recorded and name not in METHODS

    return {
        name: table if not isinstance(table, dict) or skips(name) else _whole(name, table)
        for name, table in tables.items()
        if table != NONE
    }


def _whole(name: str, table: Table) -> Table:
    settings = method_class(name).Settings
    try:
        return msgspec.to_builtins(msgspec.convert(table, settings))
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at ")
        below = path.strip("`").removeprefix("$")
        raise msgspec.ValidationError(f'{what} - at `$.{SECTION}."{name}"{below}`') from None
