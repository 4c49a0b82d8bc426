"""Which tables the configuration declares: their keys, and the kinds that some come in."""

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args, get_type_hints

from mage_async.config.sections.section import Section, Variant

Table = dict[str, Any]
NONE = "none"
"""In a file and after `--set`, the word for a section that is left out."""


def kinds(hint: Any) -> dict[str, type[Variant]]:
    """The tables that a type admits, by kind; empty where the type has no kinds."""
    parts = [part for part in (hint, *get_args(hint)) if _is(part, Variant)]
    return {part.__struct_config__.tag: part for part in parts}


def table_of(hint: Any, value: Any) -> type[Section] | None:
    """The table that a type declares, of the kind that a value states; None where it is no table.

    Where the value states no kind that is known, any of the kinds.
    """
    known = kinds(hint)
    if isinstance(value, dict) and (kind := stated_kind(value, known)):
        return known[kind]
    return next((part for part in (hint, *get_args(hint)) if _is(part, Section)), None)


def stated_kind(table: Table, known: dict[str, type[Variant]]) -> str:
    """The kind that a table states; "" where it states none, or none that is known."""
    kind = table.get("kind")
    return kind if isinstance(kind, str) and kind in known else ""


def may_be_absent(hint: Any) -> bool:
    """Whether a configuration may lack a section, which `none` then stands for."""
    return type(None) in get_args(hint)


@cache
def hints_of(section: type[Section]) -> dict[str, Any]:
    """Types of a table's keys, by key."""
    hints = get_type_hints(section, include_extras=True)
    return {key: hints[key] for key in keys_of(section)}


def keys_of(section: type[Section]) -> tuple[str, ...]:
    """A table's keys, without `kind`."""
    return section.__struct_fields__


def tables(section: type[Section], tree: Table) -> Iterator[tuple[Table, str, Any]]:
    """Every key that is declared as a table, outer ones first: the table it stands in, the key, and
    its type; tables that a tree does not have are not entered.
    """
    for key, hint in hints_of(section).items():
        if table_of(hint, None) is not None:
            yield tree, key, hint
            inside = tree.get(key)
            found = table_of(hint, inside)
            if isinstance(inside, dict) and found is not None:
                yield from tables(found, inside)


def over(below: Table, own: Table, section: type[Section]) -> Table:
    """One table's keys over another's; tables inside are merged, all other values replaced.

    Where `own` states another kind, keys of `below` that the kind lacks are left out.
    """
    hints, merged = hints_of(section), dict(below)
    for key, value in own.items():
        inside = table_of(hints.get(key), value)
        is_merged = inside is not None and isinstance(value, dict)
        if is_merged and isinstance(below.get(key), dict):
            merged[key] = over(
                switched(below[key], stated_kind(value, kinds(hints[key])), hints[key]),
                value,
                inside,
            )
        else:
            merged[key] = value
    return merged


def switched(table: Table, kind: str, hint: Any) -> Table:
    """A table as one of another kind: without the keys that the kind lacks; "" is no kind."""
    if not kind or table.get("kind") == kind:
        return table
    known = keys_of(kinds(hint)[kind])
    kept = {key: value for key, value in table.items() if key in known}
    return {"kind": kind} | kept


def _is(part: Any, kind: type[Section]) -> bool:
    return isinstance(part, type) and issubclass(part, kind)
