"""Look up the sections of the configuration's schema, and merge tables by them.

A *table* holds values by key, as TOML gives them; some of the values are tables again. A *section*
is the class that declares the keys of a table (`section.py`). The *hint* of a key is its type hint
in the section, such as `Tiny | Pretrained`. If a hint has several sections, the table states its
*kind*, which chooses one of them: `policy.kind = "tiny"`. A *component* is a section that a kind
names by module and class: `learner.correction.kind = "my_losses:Squared"`.

The reader of files, the error messages and the reference of all keys use these functions.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec

from mage_async.config.components import REGISTRIES, Components, component_class
from mage_async.config.section import Section, Variant

Table = dict[str, Any]
"""A table: values by key."""
MethodTables = dict[str, dict[str, Any]]
"""Hint of `Config.methods`: tables by the method's name, whose keys are declared by the methods."""
NONE = "none"
"""Value that a file or `--set` writes in the place of a table to leave the table out."""


def split_key(path: str) -> list[str]:
    """Split a key at its dots; a quoted name may hold dots: `methods."package.file:Mine".rate`."""
    return [name.strip('"') for name in re.findall(r'"[^"]*"|[^."]+', path)]


def join_key(names: Iterable[str]) -> str:
    """Join names to a key, the reverse of `split_key`."""
    return ".".join(f'"{name}"' if "." in name else name for name in names)


@cache
def fields_of(section: type[Section]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields of a section."""
    return msgspec.structs.fields(section)


@cache
def hints_of(section: type[Section]) -> dict[str, Any]:
    """Return the hint of each key of a section, without the key that states the kind."""
    hints = get_type_hints(section, include_extras=True)
    return {key: hints[key] for key in section.__struct_fields__}


@cache
def kinds(hint: Any) -> dict[str, type[Variant]]:
    """Return the sections of a hint by kind; empty if the hint has no section, or only one."""
    sections = [each for each in get_args(hint) if _is_subclass(each, Variant)]
    return {each.__struct_config__.tag: each for each in sections} if len(sections) > 1 else {}


@cache
def kind_key(hint: Any) -> str:
    """Return the key that states the kind, such as "kind"; "" if a hint has no kinds."""
    return next((str(each.__struct_config__.tag_field) for each in kinds(hint).values()), "")


def may_be_absent(hint: Any) -> bool:
    """Return whether a hint lets a file leave out the table, by writing `NONE` in its place."""
    return type(None) in get_args(hint)


def registry_of(hint: Any) -> Components | None:
    """Return the registry of the components that a hint admits; None if it admits none."""
    sections = kinds(hint).values()
    return next(
        (each for each in REGISTRIES if any(issubclass(one, each.base) for one in sections)), None
    )


def section_of(hint: Any, value: Any = None, *, imports: bool = False) -> type[Section] | None:
    """Return the section of a key's table; None if the key holds no table.

    If the hint has several sections, the kind that `value` states chooses one. If it states none,
    or an unknown one, the first section is returned.

    Args:
        hint: Hint of the key.
        value: Value of the key.
        imports: Whether to import a component. If not, a placeholder is returned, a section with
            the keys of `value` and no check of their values.

    Raises:
        ConfigError: a component cannot be imported.
    """
    key = kind_key(hint)
    kind = value.get(key) if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in kinds(hint):
        return kinds(hint)[kind]
    if isinstance(kind, str) and ":" in kind and (registry := registry_of(hint)):
        if imports:
            return component_class(registry, kind)
        # A key that is no identifier is unknown to every section, so the placeholder lacks it.
        names = (name for name in value if name != key and name.isidentifier())
        return _placeholder(key, kind, tuple(names))
    return _first_section(hint)


@cache
def _first_section(hint: Any) -> type[Section] | None:
    """Return the first section of a hint; None if it has none."""
    return next((each for each in (hint, *get_args(hint)) if _is_subclass(each, Section)), None)


@cache  # otherwise every configuration that `mage view` reads would leave a class in memory
def _placeholder(key: str, kind: str, names: tuple[str, ...]) -> type[Variant]:
    """Make a section for a component that is not imported: its keys are `names`, with values of any
    type.
    """
    fields = [(name, Any) for name in names]
    section = msgspec.defstruct(
        "Placeholder", fields, bases=(Variant,), tag_field=key, tag=kind, frozen=True
    )
    assert issubclass(section, Variant)
    return section


def _is_subclass(value: Any, base: type[Section]) -> bool:
    """Return whether a value is a class that inherits `base`."""
    return isinstance(value, type) and issubclass(value, base)


def without_short_form(value: Any, hint: Any) -> Any:
    """Return the table for which a short form stands; any other value is returned as it is.

    There are two short forms. `correction = "icepop"` stands for a table with this kind, and
    `tensorboard = true` for an empty table, if the table may be absent.
    """
    if value is True and may_be_absent(hint):
        return {}
    if isinstance(value, str) and kinds(hint) and not (value == NONE and may_be_absent(hint)):
        return {kind_key(hint): value}
    return value


def keys_of_tables(section: type[Section], table: Table) -> Iterator[tuple[Table, str, Any]]:
    """Yield the keys of a table, and of all tables inside, whose values should be tables.

    Outer tables come first. A key that the table lacks is yielded too.

    Yields:
        The table that has the key or lacks it, the key, and the key's hint.
    """
    for key, hint in hints_of(section).items():
        if section_of(hint) is not None:
            yield table, key, hint
            # Looked up only now: the caller may have replaced the value, as
            # `defaults.spelled_out` does.
            inside = table.get(key)
            section_inside = section_of(hint, inside)
            if isinstance(inside, dict) and section_inside is not None:
                yield from keys_of_tables(section_inside, inside)


def merged(base: Table, changes: Table, section: type[Section]) -> Table:
    """Return a copy of `base` with the values of `changes` written over it.

    Tables inside are merged in the same way. Where `changes` states another kind than `base`, the
    keys of `base` that the section of this kind lacks are left out.

    Args:
        section: Section of both tables.
    """
    hints, result = hints_of(section), dict(base)
    for key, value in changes.items():
        hint, earlier = hints.get(key), base.get(key)
        section_inside = section_of(hint, value)
        if not isinstance(value, dict):
            result[key] = value
        elif hint == MethodTables:
            result[key] = dict(earlier) if isinstance(earlier, dict) else {}
            for name, table in value.items():
                is_merged = isinstance(result[key].get(name), dict) and isinstance(table, dict)
                result[key][name] = result[key][name] | table if is_merged else table
        elif section_inside is not None and isinstance(earlier, dict):
            of_kind = _changed_to_kind(earlier, value.get(kind_key(hint)), hint)
            result[key] = merged(of_kind, value, section_inside)
        else:
            result[key] = value
    return result


def _changed_to_kind(table: Table, kind: Any, hint: Any) -> Table:
    """Return a table changed to another kind, without the keys that this kind's section lacks.

    If `kind` is None, or the table's own, the table is returned as it is.
    """
    name = kind_key(hint)
    if not name or kind is None or table.get(name) == kind:
        return table
    # A component is imported: a placeholder made from `{name: kind}` has no keys, so that all keys
    # of the table would be dropped.
    known = hints_of(section_of(hint, {name: kind}, imports=True) or Variant)
    return {name: kind} | {key: value for key, value in table.items() if key in known}
