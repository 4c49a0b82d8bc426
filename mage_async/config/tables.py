"""Look up the tables of the configuration's schema: their keys, types and kinds.

A *hint* is the declared type of a key, a *tree* is data as TOML gives it, and a *kind* is the name
by which a table says which of several classes it is, as in `policy.kind = "tiny"`. The reader of
files, the error messages and the reference of all keys are made from these functions.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec

from mage_async.config.components import REGISTRIES, Components, component_class
from mage_async.config.section import Section, Variant

Table = dict[str, Any]
"""A table of a tree: values by key, some of which are tables again."""
MethodTables = dict[str, dict[str, Any]]
"""The type of `Config.methods`: tables by name, of keys that the schema does not know."""
NONE = "none"
"""The value by which a file or `--set` leaves out a table."""


def split_key(path: str) -> list[str]:
    """Split a key at its dots; a quoted name may hold dots: `methods."package.file:Mine".rate`."""
    return [name.strip('"') for name in re.findall(r'"[^"]*"|[^."]+', path)]


def join_key(names: Iterable[str]) -> str:
    """Join names to a key, the reverse of `split_key`."""
    return ".".join(f'"{name}"' if "." in name else name for name in names)


@cache
def fields_of(section: type[Section]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields of a table."""
    return msgspec.structs.fields(section)


@cache
def hints_of(section: type[Section]) -> dict[str, Any]:
    """Return the types of a table's keys, without the key that states its kind."""
    hints = get_type_hints(section, include_extras=True)
    return {key: hints[key] for key in section.__struct_fields__}


@cache
def kinds(hint: Any) -> dict[str, type[Variant]]:
    """Return the classes among which a table of this type chooses, by kind; empty if the type is no
    table or has only one class.
    """
    parts = [part for part in get_args(hint) if _is_subclass(part, Variant)]
    return {part.__struct_config__.tag: part for part in parts} if len(parts) > 1 else {}


@cache
def kind_key(hint: Any) -> str:
    """Return the key that states the kind of a table, such as "kind"; "" without a choice."""
    return next((str(each.__struct_config__.tag_field) for each in kinds(hint).values()), "")


def may_be_absent(hint: Any) -> bool:
    """Return whether a file may leave out a table, by writing "none" in its place."""
    return type(None) in get_args(hint)


def registry_of(hint: Any) -> Components | None:
    """Return the registry of the components that a type admits; None if it admits no component."""
    parts = kinds(hint).values()
    return next((each for each in REGISTRIES if any(issubclass(p, each.base) for p in parts)), None)


def table_class(hint: Any, value: Any = None, *, imports: bool = False) -> type[Section] | None:
    """Return the class of a table that a type declares; None for other types.

    If the type has several kinds, the class is that of the kind which `value` states, or of the
    first kind if it states none.

    Args:
        imports: Whether to import a component of a user's own; if not, a stand-in holds its keys.

    Raises:
        ConfigError: a user's own class cannot be imported.
    """
    key = kind_key(hint)
    kind = value.get(key) if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in kinds(hint):
        return kinds(hint)[kind]
    if isinstance(kind, str) and ":" in kind and (registry := registry_of(hint)):
        if imports:
            return component_class(registry, kind)
        # A key that is no identifier is unknown to every class, so the stand-in does not take it.
        names = (name for name in value if name != key and name.isidentifier())
        return _stand_in(key, kind, tuple(names))
    return _first_class(hint)


@cache
def _first_class(hint: Any) -> type[Section] | None:
    """Return the first class of a table that a type names; None for other types."""
    return next((part for part in (hint, *get_args(hint)) if _is_subclass(part, Section)), None)


@cache  # otherwise every configuration that `mage view` reads would leave a class in memory
def _stand_in(key: str, kind: str, names: tuple[str, ...]) -> type[Variant]:
    """Make a class for a user's own component: its keys are `names`, with values of any type."""
    fields = [(name, Any) for name in names]
    stand_in = msgspec.defstruct(
        "StandIn", fields, bases=(Variant,), tag_field=key, tag=kind, frozen=True
    )
    assert issubclass(stand_in, Variant)
    return stand_in


def _is_subclass(part: Any, kind: type[Section]) -> bool:
    return isinstance(part, type) and issubclass(part, kind)


def expanded(value: Any, hint: Any) -> Any:
    """Return a value with the short forms of a table written out: a kind alone, which stands for a
    table with that kind, and `true`, which stands for an empty optional table.
    """
    if value is True and may_be_absent(hint):
        return {}
    if isinstance(value, str) and kinds(hint) and not (value == NONE and may_be_absent(hint)):
        return {kind_key(hint): value}
    return value


def tables(section: type[Section], tree: Table) -> Iterator[tuple[Table, str, Any]]:
    """Yield every key of a tree that the schema declares as a table, outer tables first.

    Tables that the tree lacks are not entered.

    Yields:
        The dictionary that has the key, or would have it; the key; and its type.
    """
    for key, hint in hints_of(section).items():
        if table_class(hint) is not None:
            yield tree, key, hint
            # Looked up only now: the caller may have replaced the value, as
            # `defaults.spelled_out` does.
            inside = tree.get(key)
            found = table_class(hint, inside)
            if isinstance(inside, dict) and found is not None:
                yield from tables(found, inside)


def merged(below: Table, own: Table, section: type[Section]) -> Table:
    """Return the table `below` with the values of `own` written over it; tables inside are merged.

    Where `own` states another kind, keys of `below` that the kind lacks are left out.

    Args:
        section: Class of both tables.
    """
    hints, result = hints_of(section), dict(below)
    for key, value in own.items():
        hint, earlier = hints.get(key), below.get(key)
        inside = table_class(hint, value)
        if not isinstance(value, dict):
            result[key] = value
        elif hint == MethodTables:
            result[key] = dict(earlier) if isinstance(earlier, dict) else {}
            for name, table in value.items():
                is_merged = isinstance(result[key].get(name), dict) and isinstance(table, dict)
                result[key][name] = result[key][name] | table if is_merged else table
        elif inside is not None and isinstance(earlier, dict):
            of_kind = changed_to_kind(earlier, value.get(kind_key(hint)), hint)
            result[key] = merged(of_kind, value, inside)
        else:
            result[key] = value
    return result


def changed_to_kind(table: Table, kind: Any, hint: Any) -> Table:
    """Return a table changed to another kind, without the keys that this kind does not have."""
    name = kind_key(hint)
    if not name or kind is None or table.get(name) == kind:
        return table
    # A user's own class is imported, because a stand-in made from `{name: kind}` has no keys, so
    # that all keys of the table would be dropped.
    known = hints_of(table_class(hint, {name: kind}, imports=True) or Variant)
    return {name: kind} | {key: value for key, value in table.items() if key in known}
