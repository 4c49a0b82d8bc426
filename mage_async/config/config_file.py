"""Read and write configuration files: TOML in, `Config` out, and errors that say what to write.

A file contains the keys that it changes; all others have the schema's defaults. It may begin with
`base = "other.toml"`, a path relative to its own folder: the keys of the file then replace those of
the base, section by section. A base cannot have a base itself. A run records, compares and
fingerprints the resolved configuration, in which no base is left. `AssignedTree` writes the keys of
`--set a.b=c` over those of the file.

Below, a *tree* is a file's content as nested dictionaries, and a *hint* the declared type of a key.
"""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from mage_async.config.defaults import (
    completed,
    end_no_higher,
    spelled_out,
    stated_absent,
    without_idle_warm_start,
)
from mage_async.config.error_messages import explain, unwritable_value
from mage_async.config.presets import DISCOUNT, PRESETS, keys_of_method
from mage_async.config.schema import Config
from mage_async.config.section import Section, Variant
from mage_async.config.tables import (
    NONE,
    Table,
    hints_of,
    join_key,
    kind_key,
    may_be_absent,
    merged,
    section_of,
    split_key,
    without_short_form,
)
from mage_async.errors import ConfigError
from mage_async.methods.catalogue import METHODS, method_class


def load(path: Path, assignments: Sequence[str] = (), method: str | None = None) -> Config:
    """Read a file and its base, change keys, and check every key and value.

    Args:
        path: The file.
        assignments: Texts `a.b=c`, written over the keys of the file and the preset.
        method: A preset, such as "grpo"; its keys replace those of the file.

    Raises:
        ConfigError: a key or value is wrong; the error begins with the file or the assignment.
    """
    return _parsed(AssignedTree(_resolved(path), str(path), assignments, method))


def note_on_preset(path: Path, assignments: Sequence[str], method: str | None) -> str:
    """Return a note that a method's preset replaces the file's discount; "" if it does not."""

    def discount(preset: str | None) -> Any:
        assigned = AssignedTree(_resolved(path), str(path), assignments, preset)
        return _stated(assigned.tree, DISCOUNT)

    without_method, with_method = discount(None), discount(method)
    if None in (without_method, with_method) or without_method == with_method:
        return ""
    return (
        f"--method {method}: {DISCOUNT} = {with_method} instead of the file's {without_method}; "
        f"--set {DISCOUNT}={without_method} keeps it"
    )


def note_on_staleness(config: Config, method: str | None) -> str:
    """Return a note that a preset trains on stale tokens without a correction; "" if it does not.

    The presets of synchronous algorithms have no correction.
    """
    of_preset = PRESETS.get(method or "", {}).get("learner.correction.kind")
    is_uncorrected = of_preset == "none" and config.learner.correction.kind == "none"
    if config.admission.most_stale == 0 or not is_uncorrected:
        return ""
    return (
        f"--method {method}: stale tokens are trained on as if they were fresh; --set "
        "admission.rule=sync waits for fresh ones, as its authors do, --set "
        "learner.correction=decoupled corrects"
    )


def load_recorded(
    path: Path,
    assignments: Sequence[str] = (),
    method: str | None = None,
    *,
    imports: bool = True,
) -> Config:
    """Read the configuration that a run recorded, and write a preset and assignments over it.

    Args:
        imports: whether to import a user's own components. A command that only shows a run must
            not: importing them would execute the user's code.

    Raises:
        ConfigError: as `load`; or a newer version of mage_async recorded the configuration.
    """
    assigned = AssignedTree(_read(path), str(path), assignments, method)
    return _parsed(assigned, is_recorded=True, imports=imports)


def loads(text: str, *, imports: bool = True) -> Config:
    """Read the text that `dump` returned; see `load_recorded` for `imports`.

    Raises:
        ConfigError: as `load_recorded`.
    """
    tree = AssignedTree(_tree(text.encode(), "configuration"), "configuration")
    return _parsed(tree, is_recorded=True, imports=imports)


def dump(config: Config) -> str:
    """Return the whole configuration as TOML, from which `loads` gives an equal configuration."""
    return tomli_w.dumps(stated_absent(msgspec.to_builtins(config)))


def find(name: str | None) -> Path:
    """Return the path of a configuration file: the user's own, or a shipped one by its name.

    None is the shipped `quickstart.toml`.

    Raises:
        ConfigError: there is no such file; the error lists the shipped ones.
    """
    folder = _shipped_folder()
    if name is None:
        return folder / "quickstart.toml"
    for candidate in (Path(name), folder / name, folder / f"{name}.toml"):
        if os.path.isfile(candidate):  # `Path.is_file` raises an error if the name is too long
            return candidate
    raise ConfigError(f"no configuration file {name!r}; shipped ones: {', '.join(shipped())}")


def shipped() -> list[str]:
    """Return the names of the shipped configuration files, as `find` takes them."""
    folder = _shipped_folder()
    files = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.toml"))
    return sorted(file.as_posix() for file in files)


def _shipped_folder() -> Path:
    """Return the folder of shipped files: in a checkout, or inside the installed package."""
    folders = [Path(__file__).parents[2] / "configs", Path(__file__).parents[1] / "configs"]
    return next((folder for folder in folders if folder.is_dir()), folders[0])


def as_tables(config: Config) -> Table:
    """Return a configuration as nested dictionaries, for a message to another process."""
    tree: Table = msgspec.to_builtins(config)
    return tree


def from_tables(tree: Table, *, imports: bool = True) -> Config:
    """Convert nested dictionaries, in which every table states its kind, into a `Config`.

    Args:
        imports: whether to import a user's own components; if not, they are replaced by structs
            that accept any value of each key.

    Raises:
        msgspec.ValidationError: as `msgspec.convert`, with the path from the root of `Config`.
    """
    config: Config = _section(Config, tree, "$", imports=imports)
    return config


def _section(section: type[Section], tree: Table, path: str, *, imports: bool) -> Any:
    """Convert a table into a struct of class `section`.

    The tables inside it are converted one by one and then put into the struct. msgspec could not
    convert them all at once, because the schema's unions lack the classes of a user's components.
    """
    inside: dict[str, Any] = {}
    for key, hint in hints_of(section).items():
        value, kind = tree.get(key), kind_key(hint)
        if isinstance(value, dict) and kind and kind not in value:
            raise msgspec.ValidationError(f"Invalid value - at `{path}.{key}.{kind}`")
        if isinstance(value, dict) and (found := section_of(hint, value, imports=imports)):
            inside[key] = _section(found, value, f"{path}.{key}", imports=imports)
    plain = {key: value for key, value in tree.items() if key not in inside}
    return msgspec.structs.replace(_convert(plain, section, path), **inside)


def _convert(table: Table, section: Any, path: str) -> Any:
    """Convert a table by msgspec, and complete the path in an error to one from the root."""
    try:
        return msgspec.convert(table, section)
    except msgspec.ValidationError as error:
        what, _, below = str(error).partition(" - at ")
        full = path + below.strip("`").removeprefix("$")
        raise msgspec.ValidationError(f"{what} - at `{full}`") from None


class AssignedTree:
    """Hold the tree of a file, over which a preset's keys and then assignments `a.b=c` are written.

    It remembers the assignments, so that an error can name the one that caused it (`culprit`). An
    error about a preset's key names the file.

    Args:
        tree: The file's content, which is changed.
        where: The file, for errors.
        assignments: Texts such as `a.b=c`.
        method: Name of a preset.

    Raises:
        ConfigError: a text is no assignment, or a key is written below a value that is no table.
    """

    def __init__(
        self,
        tree: Table,
        where: str,
        assignments: Sequence[str] = (),
        method: str | None = None,
    ) -> None:
        self.tree, self._where = tree, where
        """Content of the file with the changes, as nested dictionaries; and the file."""
        keys: Mapping[str, Any] = {}
        if method:
            environment = _stated(tree, "environment.name")
            for key, _, value in (text.partition("=") for text in assignments):
                if key.strip() == "environment.name":
                    environment = toml_value(value.strip())
            keys = keys_of_method(
                method, environment=environment, stated_discount=_stated(tree, DISCOUNT)
            )
        self._texts: dict[str, str] = {}
        """Texts of the assignments by key, the newest last."""
        self._has_preset_steps = "learner.steps" in keys
        for key, value in keys.items():
            if value == {}:  # the empty table of a method turns the method on
                self._table_at(split_key(key))
            else:
                self._set(key, value)
        for text in assignments:
            self._assign(text)
        assigned = {key.removeprefix("learner.") for key in self._texts}
        end_no_higher(tree.get("learner"), assigned)

    def error(self, key: str, sentence: str) -> ConfigError:
        """Return an error about `key`: the sentence after the assignment that may have caused it
        (`culprit`) or, if there is none, after the file.
        """
        return ConfigError(f"{self.culprit(key) or self._where}: {sentence}")

    def culprit(self, key: str) -> str:
        """Return the newest assignment that may have caused an error about `key`, or "".

        It assigns to the key itself, to a table that holds the key, or to a key inside it. The key
        may be an item of a list, such as `doctor.halt[0]`, which is assigned with its whole list.
        """
        key = re.sub(r"(\[\d+\])+(?=\.|$)", "", key)
        for name, text in reversed(self._texts.items()):
            if f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}."):
                return f"--set {text}"
        return ""

    def _assign(self, text: str) -> None:
        """Set a key as an assignment `a.b=value` says.

        Raises:
            ConfigError: the text is no assignment, or a value is where its path needs a table.
        """
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not split_key(key):
            raise ConfigError(f"--set takes a.b=value, got {text!r}")
        if key == "policy.source" and "policy.kind" not in self._texts:
            self._set("policy.kind", "pretrained")  # the only kind with a source
        if key == "environment.name" and not self._has_preset_steps:
            own, learner = _stated(self.tree, key), self.tree.get("learner")
            is_other = toml_value(value) != (own or Config().environment.name)
            if is_other and isinstance(learner, dict) and not self._has_assigned("learner.steps"):
                # The file's number of steps was chosen for its own environment, which is the
                # schema's if the file states none.
                learner.pop("steps", None)
        self._texts.pop(key, None)
        self._texts[key] = text
        self._set(key, toml_value(value))

    def _set(self, key: str, value: Any) -> None:
        """Set a key.

        If the key is the kind of its table, the file's keys that the new kind does not have are
        removed. Keys that `--set` has assigned stay, so that the schema refuses them with an error
        instead of ignoring them.
        """
        *names, leaf = split_key(key)
        table, hint = self._table_at(names)
        section = section_of(hint, table)
        inside = hints_of(section).get(leaf) if section else None
        if isinstance(value, str) and isinstance(without_short_form(value, inside), dict):
            # `learner.correction=tis` is short for `learner.correction.kind=tis`.
            self._set(f"{key}.{kind_key(inside)}", value)
        elif leaf == kind_key(hint):
            path = join_key(names)
            # The file's warm start was chosen for its own kind of policy, which is the schema's if
            # the file states none.
            is_other_policy = path == "policy" and value != table.get(leaf, Config().policy.kind)
            if is_other_policy and not self._has_assigned("warm_start"):
                self.tree.pop("warm_start", None)
            # Keys are removed even if the kind stays the same, because a preset may have set keys
            # of another kind.
            known = hints_of(section_of(hint, {leaf: value}, imports=True) or Variant)
            for name in [*table]:
                if name not in known and not self._has_assigned(f"{path}.{name}"):
                    del table[name]
            table[leaf] = value
        else:
            table[leaf] = without_short_form(value, inside)

    def _has_assigned(self, key: str) -> bool:
        """Return whether `--set` has assigned a key, or a key of the table at this path."""
        return any(f"{name}.".startswith(f"{key}.") for name in self._texts)

    def _table_at(self, names: Sequence[str]) -> tuple[Table, Any]:
        """Return the table at a path, which is created if it is not there, and its type.

        Raises:
            ConfigError: there is a value at the path or above it.
        """
        table: Table = self.tree
        hint: Any = Config
        for depth, name in enumerate(names):
            section = section_of(hint, table)
            hint = hints_of(section).get(name) if section else None
            is_method = names[:depth] == ["methods"]
            # An assignment to a key of a table that is left out ("none") brings the table back.
            if table.get(name) == NONE and (is_method or may_be_absent(hint)):
                table[name] = {}
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                path = join_key(names[: depth + 1])
                raise self.error(path, f"`{path}` is a value, not a table")
        return table, hint


def _stated(tree: Table, key: str) -> Any:
    """Return the value that a file states for a key `a.b`; None if it states none."""
    name, _, leaf = key.partition(".")
    table = tree.get(name)
    return table.get(leaf) if isinstance(table, dict) else None


def toml_value(text: str) -> Any:
    """Parse a TOML value. Return text that is no TOML value unchanged, so that
    `engine.kind=embedded` needs no quotes.
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def toml_text(value: Any) -> str:
    """Write a value as `toml_value` reads it: on one line, tables inline."""
    if isinstance(value, dict):
        pairs = (f"{toml_text(key)} = {toml_text(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    return tomli_w.dumps({"_": value}, multiline_strings=False).removeprefix("_ = ").strip()


def _parsed(assigned: AssignedTree, *, is_recorded: bool = False, imports: bool = True) -> Config:
    """Complete and check a tree, and convert it into a `Config`.

    Raises:
        ConfigError: a key or value is wrong; see `AssignedTree.error`.
    """
    tree = assigned.tree
    # `unwritable_value` finds NaN, an infinite number, an integer beyond 64 bits, or a date.
    if (fault := unwritable_value(tree)) is None:
        tree = completed(tree, is_recorded=is_recorded)
        try:
            tree["methods"] = _method_tables(assigned, tree, is_recorded=is_recorded)
            return without_idle_warm_start(from_tables(tree, imports=imports))
        except msgspec.ValidationError as error:
            fault = explain(str(error), tree)
    if is_recorded and fault.is_unknown and not assigned.culprit(fault.key):
        raise assigned.error(
            fault.key,
            f"a newer version of mage_async wrote it: this one has no such `{fault.key}`; use the "
            "version that wrote it",
        )
    raise assigned.error(fault.key, fault.sentence)


def _method_tables(assigned: AssignedTree, tree: Table, *, is_recorded: bool) -> dict[str, Any]:
    """Return the tables of all methods that are not "none", completed with the keys' defaults.

    A value that is no table is returned as it is, and the schema refuses it later.

    Args:
        is_recorded: whether a run wrote the tables. They then have all keys, so a user's own method
            is not imported, which would execute the user's code.

    Raises:
        ConfigError: a name is not the name of a method.
        msgspec.ValidationError: a table has an unknown key or a wrong value.
    """
    tables: dict[str, Any] = tree.get("methods", {})
    if not isinstance(tables, dict):
        return tables
    found = {name: table for name, table in tables.items() if table != NONE}
    for name, table in found.items():
        if isinstance(table, dict) and (name in METHODS or not is_recorded):
            try:
                settings = method_class(name).Settings
            except ConfigError as error:
                raise assigned.error(join_key(["methods", name]), str(error)) from error
            found[name] = msgspec.to_builtins(_convert(table, settings, f'$.methods."{name}"'))
    return found


def _resolved(path: Path) -> Table:
    """Read a file and its base, if it names one, and merge them.

    Raises:
        ConfigError: a file cannot be read, or `base` is wrong.
    """
    own = _read(path)
    name = own.pop("base", None)
    if name is None:
        return own
    if not isinstance(name, str):
        raise ConfigError(f"{path}: `base` must be the path of a file, got {name!r}")
    file = path.parent / name
    if not os.path.isfile(file):
        raise ConfigError(f"{path}: its base {name!r} does not exist: {file}")
    below = _read(file)
    if "base" in below:
        raise ConfigError(
            f"{path}: its base {name!r} has a base itself, {below['base']!r}, which is not "
            f"allowed: name {below['base']!r} as the base, or copy the keys"
        )
    return merged(below, own, Config)


def _read(path: Path) -> Table:
    """Read and parse a file, without its base."""
    try:
        return _tree(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _tree(data: bytes, where: str) -> Table:
    """Parse TOML, and expand the short forms of tables, such as `correction = "icepop"`."""
    try:
        # Some editors begin a file with a BOM.
        return spelled_out(tomllib.loads(data.decode("utf-8-sig")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}: its values are nested too deeply") from None


def flat_config(config: Config) -> dict[str, Any]:
    """Return the value of every key of a configuration by its path, such as `learner.steps`; keys
    of the top level come first.
    """
    pending, flat = [("", msgspec.to_builtins(config))], {}
    while pending:
        prefix, tree = pending.pop(0)
        for key, value in tree.items():
            # A user's own method may have no keys; its empty table says that it is turned on.
            if isinstance(value, dict) and (value or prefix != "methods."):
                pending.append((f"{prefix}{key}.", value))
            else:
                flat[f"{prefix}{key}"] = "none" if value is None else value
    return flat


def differences(one: Config, other: Config, absent: str) -> list[tuple[str, Any, Any]]:
    """Return the keys in which two configurations differ, with both values.

    Args:
        absent: Text in place of the value of a key that a configuration lacks.
    """
    left, right = flat_config(one), flat_config(other)
    pairs = [(key, left.get(key, absent), right.get(key, absent)) for key in left | right]
    return [each for each in pairs if each[1] != each[2]]
