"""`--set a.b=c`: one key of a configuration at a time, and which assignment a fault is due to."""

import tomllib
from typing import Any

from mage_async.config.older import named_today
from mage_async.config.schema import Config
from mage_async.config.shape import NONE, Table, hints_of, keys_of, kinds, may_be_absent, table_of
from mage_async.errors import ConfigError


class Assignments:
    """What is written over a file: a method's keys, which count as the file's, then `--set`."""

    def __init__(self, tree: Table) -> None:
        self.tree = tree
        self._given: dict[str, str] = {}

    def method(self, keys: Table) -> None:
        """Write a method's keys."""
        for key, value in keys.items():
            self._write(key, value)

    def give(self, assignment: str) -> None:
        """Write `a.b=value`; where a kind changes, keys that were not given so and that the new
        kind lacks go.

        Raises:
            ConfigError: it is no assignment, or goes through a value.
        """
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set takes a.b=value, got {assignment!r}")
        for name, value in named_today(key.strip(), _value(text.strip())):
            if name != key and self._given.get(name, "").startswith(f"{name}="):
                continue  # a kind that was given itself is not guessed
            self._given.pop(name, None)
            self._given[name] = assignment
            self._write(name, value)

    def blamed(self, key: str) -> str:
        """The newest assignment that wrote a key, something above it or below it; "" for none."""
        for name, assignment in reversed(self._given.items()):
            if f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}."):
                return f"--set {assignment}"
        return ""

    def _write(self, key: str, value: Any) -> None:
        *parents, leaf = key.split(".")
        table, hint, place = self.tree, Config, Config
        for depth, parent in enumerate(parents):
            hint = _hint(place, parent)
            if table.get(parent) == NONE and may_be_absent(hint):
                table[parent] = {}
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                path = ".".join(parents[: depth + 1])
                raise ConfigError(f"--set {self._given[key]}: `{path}` is a value, not a table")
            place = table_of(hint, table)
        own = _hint(place, leaf)
        if leaf == "kind" and isinstance(value, str) and value in kinds(hint):
            self._switch(table, ".".join(parents), value, hint)
        elif isinstance(value, str) and kinds(own):
            inside = table.setdefault(leaf, {})
            if value in kinds(own) and isinstance(inside, dict):
                self._switch(inside, key, value, own)
            table[leaf] = inside | {"kind": value} if isinstance(inside, dict) else {"kind": value}
        else:
            table[leaf] = value

    def _switch(self, table: Table, path: str, kind: str, hint: Any) -> None:
        """Make a table one of another kind; a file's warm start is one of the file's policy."""
        known = keys_of(kinds(hint)[kind])
        for key in [*table]:
            if key not in known and f"{path}.{key}" not in self._given:
                del table[key]
        if path == "policy" and table.get("kind") != kind and "warm_start" not in self._tops():
            self.tree.pop("warm_start", None)
        table["kind"] = kind

    def _tops(self) -> set[str]:
        """Sections of which an assignment said something."""
        return {key.partition(".")[0] for key in self._given}


def _hint(place: Any, key: str) -> Any:
    """The type that a table declares for a key; None where it does not."""
    return None if place is None else hints_of(place).get(key)


def _value(text: str) -> Any:
    """A TOML value, or the text itself where it is none: `engine.kind=embedded` works."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
