"""Write the reference of all keys from the schema: type, default and a sentence for each.

`mage config` prints it, and `bench/lib/reference_pages.py` writes it as a page. The sentences are
the docstrings in the source of sections and components.
"""

import ast
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from mage_async.config.defaults import (
    CALLS_ON_CORES,
    FREE_TEXT_ON_CORES,
    MASTERS,
    ON_CORES,
    ON_GPU,
    WITH_FOREIGN_ENVIRONMENT,
    WITH_TINY,
)
from mage_async.config.error_messages import SYNONYMS, successor
from mage_async.config.schema import Config
from mage_async.config.section import Section
from mage_async.config.tables import (
    NONE,
    Table,
    hints_of,
    kind_key,
    kinds,
    may_be_absent,
    merged,
    section_of,
)
from mage_async.errors import ConfigError
from mage_async.methods.catalogue import METHODS, method_class
from mage_async.user_modules import did_you_mean

OTHER_DEFAULTS: Mapping[str, Table] = {
    "tiny": WITH_TINY,
    "own class": WITH_FOREIGN_ENVIRONMENT,
    "CPU": ON_CORES,
    "program or tools on a CPU": CALLS_ON_CORES,
    "free text on a CPU": FREE_TEXT_ON_CORES,
    "GPU": merged(ON_GPU, MASTERS, Config),
}
"""Defaults that replace those of the schema, by the label printed before each, such as "CPU"."""
WIDTH = 100
"""Columns of a line that `as_lines` writes."""


@dataclass(frozen=True, slots=True)
class KeyDescription:
    """Describe one key of a table: its type, default and meaning in words."""

    name: str
    type_in_words: str
    """Type of the value in words, such as "whole number, at least 1"."""
    default: str
    """Default as a file writes it, followed by those of `OTHER_DEFAULTS` in brackets."""
    sentence: str
    """What the key means: its docstring in the schema."""
    kinds: tuple[str, ...] = ()
    """Kinds of the table that have the key; empty if all have it."""


@dataclass(frozen=True, slots=True)
class TableDescription:
    """Describe one table of the configuration, and its own keys."""

    path: str
    """Path such as `learner.correction`; "" for keys above all sections."""
    sentence: str
    """What the table is for: the docstring of its class."""
    keys: list[KeyDescription]

    def title(self) -> str:
        """Return the heading of the table, or "above all sections", which no file has."""
        return f"[{self.path}]" if self.path else "above all sections"


def sections(prefix: str = "") -> list[TableDescription]:
    """Describe all tables of the configuration, or the tables at and below a path, or one key.

    Args:
        prefix: path of a table, such as `learner`, or of a key, such as `learner.steps`; "" is all.

    Returns:
        The descriptions; for a key, the description of its table with this key alone.

    Raises:
        ConfigError: there is no such section or key.
    """
    every = [*_described("", {"": Config}, OTHER_DEFAULTS)]
    for name in METHODS:
        settings = method_class(name).Settings
        if settings.__struct_fields__:
            presence_note = " Absent by default; it is a method."
            every += _described(f"methods.{name}", {"": settings}, {}, presence_note)
    # Both end with a dot, so that `learn` does not match `learner`.
    found = [each for each in every if not prefix or f"{each.path}.".startswith(f"{prefix}.")]
    if not found:
        path, _, name = prefix.rpartition(".")
        of_name = {each.path: [key for key in each.keys if key.name == name] for each in every}
        if of_name.get(path):
            table = next(each for each in every if each.path == path)
            return [replace(table, keys=of_name[path])]
        if cure := successor(prefix):
            raise ConfigError(f"no section or key {prefix!r}: {cure}")
        paths = [each.path for each in every if each.path]
        meant = SYNONYMS.get(name)
        near = did_you_mean(meant or prefix, [*paths, *key_names(every)])
        raise ConfigError(f"no section or key {prefix!r}{near}; known: {', '.join(paths)}")
    return found


def key_names(found: Sequence[TableDescription]) -> list[str]:
    """Return all keys of some tables as `--set` takes them, each once."""
    names = (f"{each.path}.{key.name}".strip(".") for each in found for key in each.keys)
    return list(dict.fromkeys(names))


def as_lines(found: Sequence[TableDescription]) -> list[str]:
    """Format tables as lines of at most `WIDTH` columns, without line ends.

    A default is not cut, however long it is.
    """
    lines: list[str] = []
    for each in found:
        lines += ["", each.title(), *_indented(each.sentence, 2)]
        for key in each.keys:
            lines += [
                f"  {key.name} = {key.default}",
                *_indented(f"{key.type_in_words}. {key.sentence}{_only_with(key)}", 6),
            ]
    return lines[1:]  # without the empty line before the first table


def _only_with(key: KeyDescription) -> str:
    return f" Only with {', '.join(key.kinds)}." if key.kinds else ""


def _indented(text: str, by: int) -> list[str]:
    return wrap(text, WIDTH, initial_indent=" " * by, subsequent_indent=" " * by)


def _described(
    path: str,
    variants: Mapping[str, type[Section]],
    others: Mapping[str, Table],
    presence_note: str = "",
    kind_description: Sequence[KeyDescription] = (),
    purpose: str = "",
) -> Iterator[TableDescription]:
    """Describe a table, then the tables in it.

    Args:
        variants: class of the table by its kind, such as "tiny" and "pretrained"; a table without
            kinds has one class, by the name "".
        others: defaults that replace those of the schema, by the label printed before each.
        presence_note: sentence that says whether the table is there by default, or "".
        kind_description: description of the key that states the kind, which is listed first.
        purpose: docstring of the key whose value is the table; "" takes the docstring of its class.
    """
    # The kinds that have a key, by its description. If two kinds give one key different defaults or
    # meanings, it has two descriptions, and each is listed with its own kinds.
    owners: dict[KeyDescription, list[str]] = {}
    for name, variant in variants.items():
        for key in _keys(variant, others):
            owners.setdefault(key, []).append(name)
    keys = [
        key if len(names) == len(variants) else replace(key, kinds=tuple(names))
        for key, names in owners.items()
    ]
    # The closest class that all kinds inherit describes the table, and has the tables inside it.
    first, *more = variants.values()
    shared = next(each for each in first.__mro__ if all(issubclass(kind, each) for kind in more))
    yield TableDescription(
        path, (purpose or _doc(shared)) + presence_note, [*kind_description, *keys]
    )
    defaults, sentences = shared(), _sentences(shared)
    for name, hint in hints_of(shared).items():
        full, choices = f"{path}.{name}".strip("."), kinds(hint)
        inside_of = {label: table.get(name) for label, table in others.items()}
        others_inside = {label: each for label, each in inside_of.items() if isinstance(each, dict)}
        inside = section_of(hint)
        if choices:
            default = getattr(defaults, name)
            meaning = " ".join(f'"{kind}": {_doc(variant)}' for kind, variant in choices.items())
            kind = json.dumps(default.kind if default else NONE)
            kind += _in_brackets(kind_key(hint), kind, others_inside)
            description_inside = [
                KeyDescription(kind_key(hint), "one of the following", kind, meaning)
            ]
            yield from _described(
                full,
                choices,
                others_inside,
                kind_description=description_inside,
                purpose=sentences.get(name, ""),
            )
        elif inside is not None:
            present = "".join(f" ({label}: present)" for label in others_inside)
            absent = f' Absent by default{present}; `{name} = "none"` leaves it out.'
            note_inside = absent if may_be_absent(hint) else ""
            yield from _described(full, {"": inside}, others_inside, note_inside)


def _keys(section: type[Section], others: Mapping[str, Table]) -> Iterator[KeyDescription]:
    """Describe a table's own keys, without the tables inside."""
    sentences, defaults = _sentences(section), section()
    for name, hint in hints_of(section).items():
        if section_of(hint) is None:
            default = json.dumps(msgspec.to_builtins(getattr(defaults, name)))
            default += _in_brackets(name, default, others)
            yield KeyDescription(name, in_words(hint), default, sentences[name])


def _in_brackets(name: str, default: str, others: Mapping[str, Table]) -> str:
    """Return the other defaults of a key, such as ` (tiny: 160; CPU: 2048)`, or "" if none differs
    from `default`.
    """
    texts = {label: json.dumps(table[name]) for label, table in others.items() if name in table}
    if set(texts.values()) <= {default}:
        return ""
    return f" ({'; '.join(f'{label}: {text}' for label, text in texts.items())})"


def _doc(section: type[Section]) -> str:
    return " ".join((inspect.getdoc(section) or "").split())


def _sentences(section: type[Section]) -> dict[str, str]:
    """Return the docstring of each key, also of keys that the class inherits."""
    found: dict[str, str] = {}
    for each in reversed(section.__mro__):
        # A class that `defstruct` made (`_TrackerTables`) has no source. No other class of sections
        # may begin with an underscore.
        if not issubclass(each, Section) or each.__name__.startswith("_"):
            continue
        # Python keeps no docstrings of fields: they are read from the source.
        classes = _classes(inspect.getfile(each))
        for field, text in pairwise(classes[each.__qualname__].body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(text.value.value.split())  # type: ignore[union-attr, attr-defined]
    return found


@cache
def _classes(file: str) -> dict[str, ast.ClassDef]:
    """Parse a file, and return its classes by qualified name, such as `Outer.Settings`."""
    found: dict[str, ast.ClassDef] = {}

    def add(body: Sequence[ast.stmt], prefix: str) -> None:
        for each in body:
            if isinstance(each, ast.ClassDef):
                found[prefix + each.name] = each
                add(each.body, f"{prefix}{each.name}.")

    add(ast.parse(Path(file).read_text(encoding="utf-8")).body, "")
    return found


TYPE_WORDS = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    dict: "table",
}
"""Words for a type."""
BOUND_WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
"""Words for a bound, by its field of `msgspec.Meta`."""


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
        return TYPE_WORDS[dict]
    if parts:
        return " or ".join(in_words(part) for part in parts if part is not NoneType)
    return TYPE_WORDS[hint]


def _bounds(meta: Meta) -> str:
    if meta.pattern:
        return f"matching `{meta.pattern}`"
    bounds = ((word, getattr(meta, name)) for name, word in BOUND_WORDS.items())
    return ", ".join(f"{word} {value:g}" for word, value in bounds if value is not None)
