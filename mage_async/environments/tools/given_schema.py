"""A JSON schema that a user gives, as a type that arguments are checked against."""

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

import msgspec

from mage_async.errors import ConfigError

_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": None,
}
_BOUNDS = {
    "minimum": "ge",
    "maximum": "le",
    "exclusiveMinimum": "gt",
    "exclusiveMaximum": "lt",
    "multipleOf": "multiple_of",
    "pattern": "pattern",
    "minLength": "min_length",
    "maxLength": "max_length",
    "minItems": "min_length",
    "maxItems": "max_length",
}
_READ = {"type", "enum", "items", "properties", "required", *_BOUNDS}
_WORDS = {"title", "description", "default", "examples", "additionalProperties", "$schema"}


def arguments_of(place: str, schema: Mapping[str, Any]) -> type[msgspec.Struct]:
    """The type of an object; fields that are not required may be left out.

    Raises:
        ConfigError: a keyword or a type is none that is checked.
    """
    required = schema.get("required", ())
    fields: list[Any] = []
    for name, each in schema.get("properties", {}).items():
        kind = _type(place, each)
        is_needed = name in required
        unset = kind | msgspec.UnsetType
        fields.append((name, kind) if is_needed else (name, unset, msgspec.UNSET))
    return msgspec.defstruct("Arguments", fields, forbid_unknown_fields=True, kw_only=True)


def _type(place: str, schema: Mapping[str, Any]) -> Any:
    if unknown := set(schema) - _READ - _WORDS:
        raise ConfigError(
            f"tool {place}: the schema's {', '.join(sorted(unknown))} would not be checked; "
            f"these are: {', '.join(sorted(_READ))}"
        )
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    if schema.get("properties"):
        return arguments_of(place, schema)
    names = schema.get("type", list(_TYPES))
    return reduce(or_, (_one(place, name, schema) for name in _listed(names)))


def _listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names


def _one(place: str, name: str, schema: Mapping[str, Any]) -> Any:
    if name not in _TYPES:
        raise ConfigError(f"tool {place}: {name!r} is no type of JSON; {', '.join(_TYPES)} are")
    kind = _TYPES[name]
    if name == "array" and "items" in schema:
        kind = list[_type(place, schema["items"])]
    bounds = {_BOUNDS[key]: schema[key] for key in schema if key in _BOUNDS}
    return Annotated[kind, msgspec.Meta(**bounds)] if bounds and kind is not None else kind
