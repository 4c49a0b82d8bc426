"""Types of the configuration's keys, in words."""

from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from msgspec import Meta

PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false"}
PLAIN |= {dict: "table", list: "list"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def in_words(hint: Any) -> str:
    """A key's type as a reader of a file needs it: `whole number, at least 1`."""
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
