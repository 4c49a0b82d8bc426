"""The tables that the configuration declares: their keys, and the kinds that some come in.

A *hint* is the declared type of a key, a *tree* is data as TOML gives it.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec

from mage_async.config.components import component_class, registry_of
from mage_async.config.section import Section, Variant
from mage_async.registry import Registry

Table = dict[str, Any]
METHOD_TABLES = dict[str, dict[str, Any]]
"""The type of `Config.methods`: tables by name, of keys that the schema does not know."""
NONE = "none"
"""The value by which a file or `--set` leaves out a table."""


def names_in(path: str) -> list[str]:
    """Split a key at its dots; a quoted name may hold dots: `methods."package.file:Mine".rate`."""
    return [name.strip('"') for name in re.findall(r'"[^"]*"|[^."]+', path)]


def joined(names: Iterable[str]) -> str:
    """Join names to a key, the reverse of `names_in`."""
    return ".".join(f'"{name}"' if "." in name else name for name in names)


def kinds(hint: Any) -> dict[str, type[Variant]]:
    """Return the tables that a type admits, by kind; empty where there is no choice."""
    parts = [part for part in get_args(hint) if _is(part, Variant)]
    return {part.__struct_config__.tag: part for part in parts} if len(parts) > 1 else {}


def kind_key(hint: Any) -> str:
    """Return the key that states the kind of a table, such as "kind"; "" without a choice."""
    return next((str(each.__struct_config__.tag_field) for each in kinds(hint).values()), "")


def kind_class(hint: Any, kind: Any) -> type[Variant] | None:
    """Return the table of a kind, which may be a `module:Class` of a user's own; None if unknown.

    Raises:
        ConfigError: a class of a user's own cannot be imported.
    """
    registry = _registry(hint)
    if registry is not None and isinstance(kind, str) and ":" in kind:
        return component_class(registry, kind)
    return kinds(hint).get(kind) if isinstance(kind, str) else None


def is_own(hint: Any, table: Table) -> bool:
    """Return whether a table is a component of a user's own."""
    kind = table.get(kind_key(hint))
    return _registry(hint) is not None and isinstance(kind, str) and ":" in kind


def own_component(hint: Any, table: Table, *, imports: bool) -> Any:
    """Return the component of a user's own that a table configures.

    Args:
        imports: whether to import its class; if not, a stand-in holds the table's keys.

    Raises:
        ConfigError: the class cannot be imported.
        msgspec.ValidationError: a key or a value is wrong.
    """
    key = kind_key(hint)
    if imports:
        return msgspec.convert(table, kind_class(hint, table[key]))
    values = {name: value for name, value in table.items() if name != key}
    fields = [(name, Any) for name in values]
    stand_in = msgspec.defstruct(
        "StandIn",
        fields,
        bases=(Variant,),
        tag_field=key,
        tag=table[key],
        frozen=True,
        kw_only=True,
    )
    return stand_in(**values)


def _registry(hint: Any) -> Registry | None:
    """Return the registry of the components that a type admits; None if it admits no component."""
    return next((found for kind in kinds(hint).values() if (found := registry_of(kind))), None)


def table_of(hint: Any, value: Any) -> type[Section] | None:
    """Return the table that a type declares, of the kind that a value states; None for other types.

    If the value states no kind of the package's own, return any of the kinds.
    """
    if isinstance(value, dict) and (stated := _known(hint, value)):
        return stated
    return next((part for part in (hint, *get_args(hint)) if _is(part, Section)), None)


def _known(hint: Any, table: Table) -> type[Variant] | None:
    kind = table.get(kind_key(hint))
    return kinds(hint).get(kind) if isinstance(kind, str) else None


def may_be_absent(hint: Any) -> bool:
    """Return whether a table may be left out, for which a file writes "none"."""
    return type(None) in get_args(hint)


def in_full(value: Any, hint: Any) -> Any:
    """Return a table that a file writes in short: a kind alone, or `true` for an optional table."""
    if value is True and may_be_absent(hint):
        return {}
    if isinstance(value, str) and kinds(hint) and not (value == NONE and may_be_absent(hint)):
        return {kind_key(hint): value}
    return value


@cache
def hints_of(section: type[Section]) -> dict[str, Any]:
    """Return the types of a table's keys."""
    hints = get_type_hints(section, include_extras=True)
    return {key: hints[key] for key in keys_of(section)}


def keys_of(section: type[Section]) -> tuple[str, ...]:
    """Return a table's keys, without the one that states its kind."""
    return section.__struct_fields__


def tables(section: type[Section], tree: Table) -> Iterator[tuple[Table, str, Any]]:
    """Yield every key that is declared as a table, outer ones first, with the table that holds it
    and its type; tables that a tree lacks are not entered.
    """
    for key, hint in hints_of(section).items():
        if table_of(hint, None) is not None:
            yield tree, key, hint
            inside = tree.get(key)
            found = table_of(hint, inside)
            if isinstance(inside, dict) and found is not None:
                yield from tables(found, inside)


def over(below: Table, own: Table, section: type[Section]) -> Table:
    """Return a table's keys over another's: tables inside are merged, other values replaced.

    Where `own` states another kind, keys of `below` that the kind lacks are left out.
    """
    hints, merged = hints_of(section), dict(below)
    for key, value in own.items():
        inside = table_of(hints.get(key), value)
        is_merged = inside is not None and isinstance(value, dict)
        if hints.get(key) == METHOD_TABLES and isinstance(value, dict):
            earlier = merged.get(key, {})
            merged[key] = earlier | {
                name: earlier[name] | table if _are_tables(earlier.get(name), table) else table
                for name, table in value.items()
            }
        elif is_merged and isinstance(below.get(key), dict):
            merged[key] = over(
                switched(below[key], value.get(kind_key(hints[key])), hints[key]),
                value,
                inside,
            )
        else:
            merged[key] = value
    return merged


def switched(table: Table, kind: Any, hint: Any) -> Table:
    """Return a table as one of another kind: without the keys that the kind lacks."""
    name, found = kind_key(hint), kind_class(hint, kind)
    if found is None or table.get(name) == kind:
        return table
    return {name: kind} | {key: value for key, value in table.items() if key in keys_of(found)}


def _are_tables(one: Any, other: Any) -> bool:
    return isinstance(one, dict) and isinstance(other, dict)


def _is(part: Any, kind: type[Section]) -> bool:
    return isinstance(part, type) and issubclass(part, kind)
