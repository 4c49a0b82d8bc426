"""`--set a.b=c`: one key of a configuration at a time, and which assignment a fault is due to."""

import tomllib
from typing import Any

from mage_async.config.older import named_today
from mage_async.config.schema import Config
from mage_async.config.shape import NONE, Table, hints_of, keys_of, kinds, may_be_absent, table_of
from mage_async.errors import ConfigError

DEFAULT_POLICY = Config().policy.kind


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
        """Write `a.b=value`. Where a kind changes, keys of the file that the new kind lacks go.

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
        path, _, leaf = key.rpartition(".")
        table, hint = self._table(path.split(".") if path else [])
        if isinstance(value, str) and kinds(_hint(table_of(hint, table), leaf)):
            self._write(f"{key}.kind", value)
        elif leaf == "kind" and isinstance(value, str) and value in kinds(hint):
            self._switch(table, path, value, hint)
        else:
            table[leaf] = value

    def _table(self, names: list[str]) -> tuple[Table, Any]:
        """The table of that path, made where it is not there, and its type.

        Raises:
            ConfigError: there is a value.
        """
        table, hint = self.tree, Config
        for depth, name in enumerate(names):
            hint = _hint(table_of(hint, table), name)
            if table.get(name) == NONE and may_be_absent(hint):
                table[name] = {}
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                path = ".".join(names[: depth + 1])
                raise ConfigError(f"{self.blamed(path) or path}: `{path}` is a value, not a table")
        return table, hint

    def _switch(self, table: Table, path: str, kind: str, hint: Any) -> None:
        """Make a table one of another kind; a file's warm start is one of the file's policy."""
        known = keys_of(kinds(hint)[kind])
        for key in [*table]:
            if key not in known and f"{path}.{key}" not in self._given:
                del table[key]
        is_other_policy = path == "policy" and table.get("kind", DEFAULT_POLICY) != kind
        if is_other_policy and "warm_start" not in self._sections():
            self.tree.pop("warm_start", None)
        table["kind"] = kind

    def _sections(self) -> set[str]:
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
