"""Every key of the configuration with its type, its default and a sentence, read from the schema.

`mage config` prints it, and `python -m mage_async.config.reference > docs/configuration.md` writes
it as a page. The sentences are the docstrings of the sections' source.
"""

import ast
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from textwrap import wrap
from typing import Any

import msgspec

from mage_async.config.defaults import WITH_TINY
from mage_async.config.key_types import in_words
from mage_async.config.schema import Config
from mage_async.config.sections.section import Section, Variant
from mage_async.config.shape import Table, hints_of, kinds, may_be_absent, table_of
from mage_async.errors import ConfigError

WIDTH = 100
"""Columns of a terminal's line."""
INTRODUCTION = """\
# Configuration

This page is made from the schema, by

    python -m mage_async.config.reference > docs/configuration.md

and `mage config` prints the same. A file says what it is about; every other key has its default. A
default suits a pretrained model; with `policy.kind = "tiny"` some are others, which stand behind
"tiny:". After `--set`, a key is written with its section: `--set learner.steps=60`.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a section."""

    name: str
    kind: str
    """The type in words."""
    default: str
    """As a file says it; behind "tiny:" that of a tiny policy, where it is another."""
    sentence: str


@dataclass(frozen=True, slots=True)
class Described:
    """One table of the configuration."""

    path: str
    """`learner.correction`; "" for keys above all sections."""
    sentence: str
    keys: tuple[Key, ...]

    def title(self) -> str:
        """The head under which a file writes the table."""
        return f"[{self.path}]" if self.path else "above all sections"


def sections(prefix: str = "") -> list[Described]:
    """All tables, or those at and below one path.

    Raises:
        ConfigError: there is no such section.
    """
    every = [_described(Config, "", {}), *_below(Config, "", WITH_TINY)]
    found = [each for each in every if f"{each.path}.".startswith(f"{prefix}.") or not prefix]
    if not found:
        known = ", ".join(dict.fromkeys(each.path for each in every if each.path))
        raise ConfigError(f"no section {prefix!r}; known: {known}")
    return found


def as_lines(found: Sequence[Described]) -> list[str]:
    """The tables for a terminal."""
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
    """The tables as a page."""
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
            yield _of_kinds(hint, full, _defaults(section)[name].kind, own)
            yield from _below(_shared(list(kinds(hint).values())), full, own)
        else:
            yield _described(inside, full, own, _presence(name, hint))
            yield from _below(inside, full, own)


def _of_kinds(hint: Any, path: str, default: str, tiny: Table) -> Described:
    """A table that comes in kinds: what each kind is, and which kinds have which key."""
    known = kinds(hint)
    owners: dict[Key, list[str]] = {}
    for name, variant in known.items():
        for key in _described(variant, path, tiny).keys:
            owners.setdefault(key, []).append(name)
    meaning = " ".join(f'"{name}": {_doc(variant)}' for name, variant in known.items())
    stated = Key("kind", "one of the following", json.dumps(default), meaning)
    keys = (_owned(key, names, len(known)) for key, names in owners.items())
    return Described(path, _doc(_shared(list(known.values()))), (stated, *keys))


def _owned(key: Key, names: list[str], num_kinds: int) -> Key:
    if len(names) == num_kinds:
        return key
    return replace(key, sentence=f"{key.sentence} Only with {', '.join(names)}.")


def _shared(variants: list[type[Variant]]) -> type[Section]:
    """The nearest parent of all."""
    parents = variants[0].__mro__
    return next(each for each in parents if all(issubclass(other, each) for other in variants))


def _described(section: type[Section], path: str, tiny: Table, presence: str = "") -> Described:
    """A table's own keys, without the tables inside."""
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
    """The docstring of each key, of parents too."""
    found: dict[str, str] = {}
    for each in reversed(section.__mro__):
        if not (issubclass(each, Section) and each.__struct_fields__):
            continue
        body = ast.parse(inspect.getsource(each)).body[0].body  # type: ignore[attr-defined]
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(text.value.value.split())  # type: ignore
    return found


if __name__ == "__main__":
    print(as_markdown(sections()), end="")
