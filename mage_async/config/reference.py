"""The reference of all keys: type, default and a sentence each, read from the schema.

`mage config` prints it, and `python -m mage_async.config.reference > docs/configuration.md` writes
it as a page. The sentences are the docstrings in the source of sections and components.
"""

import ast
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from textwrap import wrap
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from mage_async.config.defaults import WITH_TINY
from mage_async.config.schema import Config
from mage_async.config.section import Section, Variant
from mage_async.config.tables import NONE, Table, hints_of, kind_key, kinds, may_be_absent, table_of
from mage_async.errors import ConfigError
from mage_async.methods.registry import METHODS, method_class

PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false"}
PLAIN |= {dict: "table", list: "list"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def in_words(hint: Any) -> str:
    """Describe a key's type for the reader of a file: `whole number, at least 1`."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = [part for part in parts if isinstance(part, Meta)]
        return ", ".join([in_words(parts[0]), *(_bounds(each) for each in bounds)])
    if origin is Literal and len(parts) == 1:
        return f'"{parts[0]}"'
    if origin is Literal:
        return "one of " + ", ".join(f'"{part}"' for part in parts)
    if origin is list:
        return f"list of: {in_words(parts[0])}"
    if origin is dict:
        return PLAIN[dict]
    if parts:
        return " or ".join(in_words(part) for part in parts if part is not NoneType)
    return PLAIN[hint]


def _bounds(meta: Meta) -> str:
    if meta.pattern:
        return f"matching `{meta.pattern}`"
    said = ((word, getattr(meta, name)) for name, word in BOUNDS.items())
    return ", ".join(f"{word} {value:g}" for word, value in said if value is not None)


WIDTH = 100
"""Columns of a line in a terminal."""
INTRODUCTION = """\
# Configuration

This page is generated from the schema by

    python -m mage_async.config.reference > docs/configuration.md

and `mage config` prints the same. A file contains the keys that it changes; every other key has its
default. Defaults suit a pretrained model; those of `policy.kind = "tiny"` follow "tiny:" where they
differ. With `--set` a key is written with its section: `--set learner.steps=60`. A table that has a
key `kind` or `estimator` may be written as that kind alone: `learner.correction = "tis"`. The kinds
of corrections, credits, estimators, matchmakers, weight transports and trackers may also be a class
of your own, `"module:Class"`.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a section."""

    name: str
    kind: str
    """Type, in words."""
    default: str
    """Default as a file writes it; that of a tiny policy follows "tiny:" where it differs."""
    sentence: str


@dataclass(frozen=True, slots=True)
class Described:
    """One table of the configuration."""

    path: str
    """Path such as `learner.correction`; "" for keys above all sections."""
    sentence: str
    keys: tuple[Key, ...]

    def title(self) -> str:
        """Return the heading of the table in a file."""
        return f"[{self.path}]" if self.path else "above all sections"


def sections(prefix: str = "") -> list[Described]:
    """Describe all tables, or those at and below one path.

    Raises:
        ConfigError: there is no such section.
    """
    every = [_described(Config, "", {}), *_below(Config, "", WITH_TINY), *_of_methods()]
    found = [each for each in every if f"{each.path}.".startswith(f"{prefix}.") or not prefix]
    if not found:
        known = ", ".join(dict.fromkeys(each.path for each in every if each.path))
        raise ConfigError(f"no section {prefix!r}; known: {known}")
    return found


def _of_methods() -> Iterator[Described]:
    """Describe the tables of the methods of this package that have keys."""
    for name in METHODS:
        settings = method_class(name).Settings
        if settings.__struct_fields__:
            yield _described(settings, f"methods.{name}", {}, "Absent by default; it is a method.")


def as_lines(found: Sequence[Described]) -> list[str]:
    """Format tables for a terminal."""
    lines: list[str] = []
    for each in found:
        lines += ["", each.title(), *wrap(each.sentence, WIDTH, **_indented(2))]
        for key in each.keys:
            lines += [f"  {key.name} = {key.default}"]
            lines += wrap(f"{key.kind}. {key.sentence}", WIDTH, **_indented(6))
    return lines[1:]


def _indented(by: int) -> dict[str, str]:
    return dict.fromkeys(("initial_indent", "subsequent_indent"), " " * by)


def as_markdown(found: Sequence[Described]) -> str:
    """Format tables as a page."""
    lines = [INTRODUCTION]
    for each in found:
        lines += [f"## `{each.title()}`" if each.path else "## Above all sections", ""]
        lines += [each.sentence, ""]
        if each.keys:
            lines += ["| key | default | type | meaning |", "|---|---|---|---|"]
            lines += [_row(key) for key in each.keys] + [""]
    return "\n".join(lines).rstrip() + "\n"


def _row(key: Key) -> str:
    cells = (f"`{key.name}`", f"`{key.default}`", key.kind, key.sentence)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _below(section: type[Section], path: str, tiny: Table) -> Iterator[Described]:
    for name, hint in hints_of(section).items():
        inside = table_of(hint, None)
        if inside is None:
            continue
        full, own = f"{path}.{name}".strip("."), tiny.get(name, {})
        if kinds(hint):
            default = _defaults(section)[name]
            yield _of_kinds(hint, full, default.kind if default else NONE, own)
            yield from _below(_shared(list(kinds(hint).values())), full, own)
        else:
            yield _described(inside, full, own, _presence(name, hint))
            yield from _below(inside, full, own)


def _of_kinds(hint: Any, path: str, default: str, tiny: Table) -> Described:
    """Describe a table that comes in kinds: each kind, and which kinds have which key."""
    known = kinds(hint)
    owners: dict[Key, list[str]] = {}
    for name, variant in known.items():
        for key in _described(variant, path, tiny).keys:
            owners.setdefault(key, []).append(name)
    meaning = " ".join(f'"{name}": {_doc(variant)}' for name, variant in known.items())
    stated = Key(kind_key(hint), "one of the following", json.dumps(default), meaning)
    keys = (_owned(key, names, len(known)) for key, names in owners.items())
    return Described(path, _doc(_shared(list(known.values()))), (stated, *keys))


def _owned(key: Key, names: list[str], num_kinds: int) -> Key:
    if len(names) == num_kinds:
        return key
    return replace(key, sentence=f"{key.sentence} Only with {', '.join(names)}.")


def _shared(variants: list[type[Variant]]) -> type[Section]:
    """Return the nearest common parent."""
    parents = variants[0].__mro__
    return next(each for each in parents if all(issubclass(other, each) for other in variants))


def _described(section: type[Section], path: str, tiny: Table, presence: str = "") -> Described:
    """Describe a table's own keys, without the tables inside."""
    said, defaults = _sentences(section), _defaults(section)
    keys = tuple(
        Key(name, in_words(hint), _default(defaults[name], name, tiny), said[name])
        for name, hint in hints_of(section).items()
        if table_of(hint, None) is None
    )
    return Described(path, " ".join(filter(None, [_doc(section), presence])), keys)


def _doc(section: type[Section]) -> str:
    return " ".join((inspect.getdoc(section) or "").split())


def _presence(name: str, hint: Any) -> str:
    if not may_be_absent(hint):
        return ""
    with_tiny = " but for a tiny policy" if name in WITH_TINY else ""
    return f'Absent by default{with_tiny}; `{name} = "none"` leaves it out.'


def _defaults(section: type[Section]) -> dict[str, Any]:
    made = section()
    return {name: getattr(made, name) for name in section.__struct_fields__}


def _default(value: Any, name: str, tiny: Table) -> str:
    said = _literal(value)
    return f"{said} (tiny: {_literal(tiny[name])})" if name in tiny else said


def _literal(value: Any) -> str:
    return json.dumps(msgspec.to_builtins(value))


def _sentences(section: type[Section]) -> dict[str, str]:
    """Return the docstring of each key, also of the parents' keys."""
    found: dict[str, str] = {}
    for each in reversed(section.__mro__):
        if not issubclass(each, Section) or each.__name__.startswith("_"):
            continue
        body = ast.parse(inspect.getsource(each)).body[0].body  # type: ignore[attr-defined]
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(text.value.value.split())  # type: ignore
    return found


if __name__ == "__main__":
    print(as_markdown(sections()), end="")
