"""Offer methods of a user's class as tools that the agent may call.

A method's signature and docstring become a JSON schema; a completion is parsed into calls, the
arguments are checked, and `with_step` turns a class with tools into one with `reset` and `step`.
Mistakes of the agent are answered with an error message: an unknown tool, arguments that do not
follow the schema, a call that cannot be parsed. An exception of a tool is a fault of the
environment: the trial is played again, or its group is dropped.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import combinations, product
from operator import or_
from types import GenericAlias
from typing import Annotated, Any, Literal, TypeVar, get_type_hints, overload

import msgspec
import numpy as np

from mage_async.errors import ConfigError

MAX_CALLS = 16
"""Largest number of calls in one turn; all further ones together get one error message."""
_OVER = "The episode is over."
"""Answer to a tool call after the end of the episode."""
_MARK = "is_offered_tool"
"""Name of the attribute that marks a method as a tool; its value is the given schema, or None."""
_Method = TypeVar("_Method", bound=Callable[..., Any])
_ARGUMENT = re.compile(r"(\w+)(?: \(.*?\))?: (.+)")
"""Line about a parameter in a docstring: its name, perhaps its type, and its description."""


# The functions below parse calls.


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON = "<|python_tag|>"
"""Token before a call of Llama 3."""
_DECODER = json.JSONDecoder()
_NO_JSON = ValueError, RecursionError
"""Errors of a JSON decoder: for text that is no JSON, and for brackets nested too deeply."""
_FORM = '{"name": ..., "arguments": {...}}'
"""Form of a tool call, for errors."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Hold a parsed call, not yet checked against a tool."""

    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class InvalidCall:
    """Hold the reason why text that was meant as a call cannot be parsed."""

    why: str


def parse_calls(text: str) -> list[ToolCall | InvalidCall]:
    """Parse all calls of a completion, in order; none if the text is no call but an answer. The
    text has no stop token at its end.

    Two forms are read. `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` is that of Hermes
    and Qwen: any number of calls, with text between them. `{"name": ..., "parameters": {...}}` is
    that of Llama 3: calls alone, with `;` between them. If Llama's token `<|python_tag|>` is
    missing, JSON without `parameters` and `arguments` is an answer.
    """
    if _OPEN in text:
        return [_tagged(part) for part in text.split(_OPEN)[1:]]
    bare = text.strip().removeprefix(_PYTHON).strip()
    if not bare.startswith("{") or '"name"' not in bare:
        return []
    return _bare(bare, has_token=_PYTHON in text)


def _tagged(part: str) -> ToolCall | InvalidCall:
    """Parse the text after an opening tag."""
    text, closing, _ = part.partition(_CLOSE)
    if not closing:
        return InvalidCall("a tool call is not closed by its tag")
    try:
        return _call(json.loads(text))
    except _NO_JSON as error:
        return InvalidCall(f"a tool call is no JSON: {error}")


def _bare(text: str, *, has_token: bool) -> list[ToolCall | InvalidCall]:
    """Parse JSON objects with `;` between, up to the first one that cannot be read.

    Args:
        has_token: whether `<|python_tag|>` precedes them; if not, the first object may be an
            answer.
    """
    calls: list[ToolCall | InvalidCall] = []
    while text:
        try:
            found, end = _DECODER.raw_decode(text)
        except _NO_JSON as error:
            return [*calls, InvalidCall(f"a tool call is no JSON: {error}")]
        is_call = has_token or bool(calls)
        if not is_call and ("name" not in found or not found.keys() & {"arguments", "parameters"}):
            return []
        calls.append(_call(found))
        text = text[end:].lstrip("; \n\t\r")
    return calls


def _call(found: Any) -> ToolCall | InvalidCall:
    """Read a call. Arguments may be called parameters, or be JSON in a string, as OpenAI writes
    them.
    """
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return InvalidCall(f"a tool call must be {_FORM}")
    arguments = found.get("arguments", found.get("parameters", {}))
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        json.dumps(arguments, allow_nan=False)
    except _NO_JSON as error:
        return InvalidCall(f"the arguments of {found['name']} are no JSON: {error}")
    if not isinstance(arguments, dict):
        return InvalidCall(f"the arguments of {found['name']} must be an object")
    return ToolCall(found["name"], arguments)


# The code below makes types from JSON schemas, against which arguments are checked.


_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": None,
}
"""Python type of each of JSON's types."""
_NAMES = {kind: name for name, kind in _TYPES.items()} | {int: "number", type(None): "null"}
"""JSON's type of each Python type; that of an integer is "number"."""
_ANY = object()
"""Marker for all values of a type."""
_NUMBER_BOUNDS = {
    "minimum": "ge",
    "maximum": "le",
    "exclusiveMinimum": "gt",
    "exclusiveMaximum": "lt",
    "multipleOf": "multiple_of",
}
_BOUNDS: dict[str, dict[str, str]] = {
    "integer": _NUMBER_BOUNDS,
    "number": _NUMBER_BOUNDS,
    "string": {"pattern": "pattern", "minLength": "min_length", "maxLength": "max_length"},
    "array": {"minItems": "min_length", "maxItems": "max_length"},
}
"""For each of JSON's types the schema keywords that bound its values, and the constraints of
msgspec that they become. Values of other types have no such bound.
"""
_CHECKED_KEYS = {
    *("type", "enum", "const", "anyOf", "oneOf"),
    *("items", "properties", "required", "additionalProperties"),
}.union(*_BOUNDS.values())
"""Schema keywords that are checked."""
_ALONE = {"anyOf": set[str](), "oneOf": set[str](), "const": {"type"}, "enum": {"type"}}
"""Keywords that decide alone whether a value is valid, with the checked keywords that may stand
next to them.
"""
_UNCHECKED_KEYS = {"title", "description", "default", "examples", "format", "$schema"}
"""Schema keywords that need no check. In the standard, JSON Schema 2020-12, `format` describes a
value and restricts none.
"""
_DEFINITIONS = {"$defs", "definitions"}
"""Keywords of a whole schema that hold parts of it, to which `$ref` refers."""


def arguments_of(
    place: str, schema: Mapping[str, Any], *, takes_more: bool = False
) -> type[msgspec.Struct]:
    """Return the type of a JSON object schema; fields that are not required may be left out.

    Args:
        place: Class and method of the tool, for errors.
        takes_more: Whether the method takes arguments that the schema does not list, if the schema
            allows them.

    Raises:
        ConfigError: the schema has a keyword, a type or a value that could not be checked.
    """
    own = {key: each for key, each in schema.items() if key not in _DEFINITIONS}
    schema = _without_references(place, own, schema)
    _check_keys(place, schema)
    if not takes_more:
        schema = {**schema, "additionalProperties": False}
    try:
        arguments = _struct(place, schema)
        # `defstruct` does not look at the types of fields; a decoder does.
        msgspec.json.Decoder(arguments)
    except (TypeError, ValueError, re.error) as error:
        raise ConfigError(f"tool {place}: its schema cannot be checked: {error}") from error
    return arguments


def _without_references(
    place: str, part: Any, whole: Mapping[str, Any], inside: tuple[str, ...] = ()
) -> Any:
    """Replace each `$ref` in a part of a schema by the part of the whole schema that it refers to.

    Args:
        inside: References that have led to this part.
    """
    if isinstance(part, list):
        return [_without_references(place, each, whole, inside) for each in part]
    if not isinstance(part, Mapping):
        return part
    found = {key: _without_references(place, each, whole, inside) for key, each in part.items()}
    reference = found.get("$ref")
    if not isinstance(reference, str):  # `$ref` may be the name of a property, with its schema
        return found
    del found["$ref"]
    start, *names = reference.split("/")
    target: Any = whole if start == "#" else None
    for name in names:
        target = target.get(name) if isinstance(target, Mapping) else None
    if not isinstance(target, Mapping):
        raise ConfigError(
            f"tool {place}: its schema has no part {reference!r:.80}: write the part into `$defs`, "
            "or in place of the `$ref`"
        )
    if reference in inside:
        raise ConfigError(
            f"tool {place}: {reference!r:.80} refers to itself, which cannot be checked: leave its "
            "properties out, as in {'type': 'object'}"
        )
    return _without_references(place, target, whole, (*inside, reference)) | found


def _struct(place: str, schema: Mapping[str, Any]) -> type[msgspec.Struct]:
    """Return the type that the properties of a schema describe."""
    required, fields, names = schema.get("required", ()), list[Any](), dict[str, str]()
    for number, (name, each) in enumerate(schema.get("properties", {}).items()):
        kind = _type(place, each)
        # A property's name, such as `max-items`, may be no identifier.
        field = f"field_{number}"
        unset = (field, kind | msgspec.UnsetType, msgspec.UNSET)
        fields.append((field, kind) if name in required else unset)
        names[field] = name
    is_closed = schema.get("additionalProperties") is not True
    return msgspec.defstruct(
        "Arguments", fields, rename=names, forbid_unknown_fields=is_closed, kw_only=True
    )


def _check_keys(place: str, schema: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` if a schema has a keyword that would not be checked."""
    if unknown := set(schema) - _CHECKED_KEYS - _UNCHECKED_KEYS:
        raise ConfigError(
            f"tool {place}: the schema's {', '.join(sorted(unknown))} would not be checked; "
            f"these are: {', '.join(sorted(_CHECKED_KEYS))}"
        )
    for key, allowed in _ALONE.items():
        if key in schema and (others := _CHECKED_KEYS.intersection(schema) - allowed - {key}):
            advice = (
                "leave it out"
                if key in ("const", "enum")
                else f"write each part of {key} as a whole schema"
            )
            raise ConfigError(
                f"tool {place}: the schema's {', '.join(sorted(others))} next to {key} would not "
                f"be checked: {advice}"
            )
    if not isinstance(given := schema.get("additionalProperties", False), bool):
        raise ConfigError(
            f"tool {place}: additionalProperties must be false or true, got {given!r:.60}: list "
            "the arguments in `properties`, or leave both out where an object may hold anything"
        )


def _type(place: str, schema: Mapping[str, Any]) -> Any:
    """Return the type that a schema describes."""
    _check_keys(place, schema)
    if "const" in schema:
        return Literal[schema["const"]]
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    if (parts := _parts(schema)) is not None:
        kind = reduce(or_, [_type(place, each) for each in parts])
        if "oneOf" in schema:
            _check_disjoint(place, parts)
        return kind
    return reduce(or_, (_bounded_type(place, name, schema) for name in _type_names(schema)))


def _parts(schema: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    """Return the schemas in `anyOf` or `oneOf`; None if a schema has neither."""
    parts: Sequence[Mapping[str, Any]] | None = schema.get("anyOf", schema.get("oneOf"))
    return parts


def _type_names(schema: Mapping[str, Any]) -> list[str]:
    """Return the names of the types of a schema without parts and constants."""
    # Without "type" a value of any type is valid, except where properties are listed.
    given = schema.get("type", "object" if "properties" in schema else list(_TYPES))
    names: list[str] = [given] if isinstance(given, str) else given
    if "number" in names:  # every integer is a number too
        names = [name for name in names if name != "integer"]
    return names


def _check_disjoint(place: str, parts: Sequence[Mapping[str, Any]]) -> None:
    """Raise a `ConfigError` if a value might be valid for several parts of `oneOf`.

    Arguments are checked as by `anyOf`, which means the same only if no value is valid for two
    parts.
    """
    for first, second in combinations(map(_allowed, parts), 2):
        for (name, value), (other_name, other) in product(first, second):
            if name == other_name and (_ANY in (value, other) or value == other):
                raise ConfigError(
                    f"tool {place}: a value of type {name} may follow several parts of oneOf, and "
                    "nothing would check that it follows exactly one: give the parts other types "
                    "or other constants, or write anyOf"
                )


def _allowed(schema: Mapping[str, Any]) -> set[tuple[str, Any]]:
    """Return the values that a schema may allow, as pairs: the name of a type, and one value of it
    or, for all of its values, `_ANY`. The type of integers is "number".
    """
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return {(_NAMES[type(value)], value) for value in values}
    if (parts := _parts(schema)) is not None:
        return set[tuple[str, Any]]().union(*map(_allowed, parts))
    return {(_NAMES[_TYPES[name] or type(None)], _ANY) for name in _type_names(schema)}


def _bounded_type(place: str, name: str, schema: Mapping[str, Any]) -> Any:
    """Return one of the types of a schema, with the bounds that the schema sets for it."""
    if name not in _TYPES:
        raise ConfigError(f"tool {place}: {name!r} is no type of JSON; {', '.join(_TYPES)} are")
    kind: Any = _TYPES[name]
    if name == "object" and (
        schema.get("properties") or schema.get("additionalProperties") is False
    ):
        return _struct(place, schema)
    if name == "array" and "items" in schema:
        kind = GenericAlias(list, _type(place, schema["items"]))
    known = _BOUNDS.get(name, {})
    bounds = {known[key]: schema[key] for key in schema if key in known}
    return Annotated[kind, msgspec.Meta(**bounds)] if bounds else kind


# The code below makes tools from the methods of a class.


@overload
def tool(method: _Method) -> _Method: ...


@overload
def tool(*, schema: Mapping[str, Any]) -> Callable[[_Method], _Method]: ...


def tool(method: Any = None, *, schema: Mapping[str, Any] | None = None) -> Any:
    """Mark a method as a tool: its parameters are typed, its docstring says what it does, and lines
    `name: text` below `Args:` describe its parameters. It may be `async`, a static method or a
    class method.

    Args:
        schema: Schema that replaces the one made from signature and docstring, in OpenAI's form of
            a function: `parameters`, `description` and `name`, which must be the method's name.
    """

    def mark(marked: _Method) -> _Method:
        setattr(_function_of(marked), _MARK, schema)
        return marked

    return mark if method is None else mark(method)


@dataclass(frozen=True, slots=True)
class Tool:
    """Describe a method that the agent may call."""

    arguments: type[msgspec.Struct]
    """Type of a call's arguments."""
    is_given: bool
    """Whether the user gave the schema. The method then gets the arguments as JSON values, without
    conversion to the types of its signature."""
    schema: dict[str, Any]
    """Schema for chat templates, in OpenAI's form of a function."""
    is_async: bool

    def read(self, arguments: object) -> dict[str, Any]:
        """Return checked arguments by name, with the defaults of the method's signature.

        Raises:
            msgspec.ValidationError: the arguments do not follow the schema.
        """
        read = msgspec.convert(arguments, self.arguments)
        if self.is_given and isinstance(arguments, dict):
            return arguments
        return {name: getattr(read, name) for name in read.__struct_fields__}


def has_tools(kind: type) -> bool:
    """Return whether a class has tools."""
    return bool(_schemas(kind))


def tools_of(kind: type) -> dict[str, Tool]:
    """Return the tools of a class by name, in the order of the class.

    Raises:
        ConfigError: a signature or a docstring lacks what a tool needs.
    """
    return {name: _tool(kind, name, given) for name, given in _schemas(kind).items()}


def _schemas(kind: type) -> dict[str, Mapping[str, Any] | None]:
    """Return the given schema, or None, of each method that is a tool, in the order of the class.

    A method that overrides a tool needs no mark to be a tool too. A subclass that sets a tool's
    name to None removes the tool.
    """
    found = dict[str, Mapping[str, Any] | None]()
    for each in reversed(kind.__mro__):
        for name, method in vars(each).items():
            if hasattr(function := _function_of(method), _MARK):
                found[name] = getattr(function, _MARK)
            elif method is None:
                found.pop(name, None)
    return found


def _function_of(method: Any) -> Any:
    """Return the function of a static or class method, and any other object as it is."""
    return method.__func__ if isinstance(method, staticmethod | classmethod) else method


def _tool(kind: type, name: str, given: Mapping[str, Any] | None) -> Tool:
    """Return the tool of a method."""
    method = getattr(kind, name)
    place = f"{kind.__name__}.{method.__name__}"
    parameters = list(inspect.signature(method).parameters.values())
    if given:
        function = _given_function(place, method.__name__, given)
        takes_more = any(each.kind is each.VAR_KEYWORD for each in parameters)
        arguments = arguments_of(place, function["parameters"], takes_more=takes_more)
    else:
        # A static method has no `self`, and the signature of a class method lacks `cls`.
        if inspect.isfunction(inspect.getattr_static(kind, name)):
            parameters = parameters[1:]
        arguments = _arguments(place, method, parameters)
        function = _function(place, method, arguments)
    schema = {"type": "function", "function": function}
    is_async = inspect.iscoroutinefunction(method)
    return Tool(arguments, bool(given), schema, is_async)


def _given_function(place: str, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function of a given schema, with or without OpenAI's envelope."""
    function = schema.get("function", schema)
    named = function.get("name", name)
    if named != name or not isinstance(function.get("parameters"), Mapping):
        raise ConfigError(
            f"tool {place}: its schema must have `parameters`, and the method's name, got {named!r}"
        )
    return {"name": name, **function}


def _function(place: str, method: Any, arguments: type[msgspec.Struct]) -> dict[str, Any]:
    """Build a function schema from signature and docstring."""
    text = inspect.getdoc(method)
    if not text:
        raise ConfigError(f"tool {place}: a docstring must say what it does")
    summary, _, rest = text.partition("Args:")
    parameters = _schema(place, arguments)
    for line in rest.splitlines():
        described = _ARGUMENT.fullmatch(line.strip())
        if described and described[1] in parameters["properties"]:
            parameters["properties"][described[1]]["description"] = described[2]
    return {
        "name": method.__name__,
        "description": " ".join(summary.split()),
        "parameters": parameters,
    }


def _arguments(
    place: str, method: Any, parameters: Sequence[inspect.Parameter]
) -> type[msgspec.Struct]:
    """Return the type of a tool's arguments, from the parameters of its method."""
    hints = get_type_hints(method, include_extras=True)
    fields: list[Any] = []
    for each in parameters:
        if each.name not in hints or each.kind is not each.POSITIONAL_OR_KEYWORD:
            raise ConfigError(f"tool {place}: the parameter `{each}` must be named and have a type")
        default = () if each.default is each.empty else (each.default,)
        fields.append((each.name, hints[each.name], *default))
    return msgspec.defstruct(method.__name__, fields, forbid_unknown_fields=True, kw_only=True)


def _schema(place: str, arguments: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments."""
    try:
        (_,), parts = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    except TypeError as error:
        raise ConfigError(f"tool {place}: a type has no JSON form: {error}") from error
    parameters = parts.pop(arguments.__name__)
    kept = ("type", "properties", "required")
    schema = {key: parameters[key] for key in kept if key in parameters}
    return {**schema, "$defs": parts} if parts else schema


# The code below makes the calls of a turn, as the step of a class with tools.

StepValue = tuple[str, float, bool, bool, dict[str, Any]]
"""Value of `step`: observation, reward, terminated, truncated, info."""


def with_step(kind: type) -> type:
    """Return a subclass with `step`, which makes the calls of a turn, and `offered_tools`, the
    schemas of its tools.

    Raises:
        ConfigError: the class has a `step` of its own, or no `score`.
    """
    tools = tools_of(kind)
    if callable(getattr(kind, "step", None)):
        raise ConfigError(f"{kind.__name__}: has tools and `step`; a class has one of the two")
    if not callable(getattr(kind, "score", None)):
        raise ConfigError(f"{kind.__name__}: has tools and no `score()`, which says what it earned")
    others = (getattr(kind, name, None) for name in ("score", "answer", "is_done"))
    is_async = any(each.is_async for each in tools.values()) or any(
        map(inspect.iscoroutinefunction, others)
    )

    async def async_step(self: Any, action: str) -> StepValue:
        return await _step(self, tools, action)

    def step(self: Any, action: str) -> StepValue:
        """Make the calls of a turn without an event loop."""
        # No method is a coroutine function, so the coroutine ends without having waited.
        try:
            _step(self, tools, action).send(None)
        except StopIteration as end:
            value: StepValue = end.value
            return value
        raise TypeError("a method that is no coroutine function returned an awaitable object")

    added = {
        "step": async_step if is_async else step,
        "offered_tools": tuple(each.schema for each in tools.values()),
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "_earned": 0.0,
    }
    return type(kind.__name__, (kind,), added)


async def _step(user_object: Any, tools: Mapping[str, Tool], text: str) -> StepValue:
    """Make the calls of a turn; a text without calls is the answer that ends the episode."""
    answers, is_valid = list[str](), True
    if calls := parse_calls(text):
        answers, is_valid = await _answers(user_object, tools, calls)
        observation, is_done = "\n".join(answers), await _is_done(user_object)
    else:
        is_done = True
        observation = await _final_observation(user_object, text.strip())
    # `score` is the total of the episode so far; the reward is what this turn has added to it.
    score = await _result(user_object.score)
    try:
        reward, user_object._earned = score - user_object._earned, score
    except TypeError:  # None, a dictionary of several scores, …
        raise TypeError(f"score() must return a number, got {score!r:.60}") from None
    return observation, reward, is_done, False, {"is_valid": is_valid, "tool_answers": answers}


async def _answers(
    user_object: Any, tools: Mapping[str, Tool], calls: Sequence[ToolCall | InvalidCall]
) -> tuple[list[str], bool]:
    """Make the calls; return the answers in order, and whether all calls were valid. Calls beyond
    `MAX_CALLS` have one answer together.
    """
    # Chat templates write a tool's message without the id of its call, so fewer messages than calls
    # are allowed; one answer for each of a thousand calls would fill the context.
    answers, is_valid = list[str](), True
    for number, call in enumerate(calls):
        if number == MAX_CALLS:
            return [*answers, f"Not called: a turn has at most {MAX_CALLS} calls."], False
        if await _is_done(user_object):
            answers.append(_OVER)
        elif isinstance(function := _checked(user_object, tools, call), str):
            answers.append(function)
            is_valid = False
        else:
            answers.append(_text(await _result(function)))
    return answers, is_valid


def _checked(
    user_object: Any, tools: Mapping[str, Tool], call: ToolCall | InvalidCall
) -> Callable[[], Any] | str:
    """Return the function to call, or the error message if the call is wrong."""
    if isinstance(call, InvalidCall):
        return f"Error: {call.why}."
    if call.name not in tools:
        return f"Error: there is no tool {call.name!r:.60}; there are {', '.join(tools)}."
    try:
        return partial(getattr(user_object, call.name), **tools[call.name].read(call.arguments))
    except msgspec.ValidationError as error:
        return f"Error: {call.name}: {error}."


async def _final_observation(user_object: Any, text: str) -> str:
    """Return the observation after an answer that is no call; `answer(text)` receives it, if the
    class has that method.
    """
    if not callable(getattr(user_object, "answer", None)):
        return _OVER
    reply = await _result(partial(user_object.answer, text))
    return _OVER if reply is None else _text(reply)


async def _result(function: Callable[[], Any]) -> Any:
    """Call a plain or `async` function, and return its result."""
    value = function()
    return await value if inspect.isawaitable(value) else value


async def _is_done(user_object: Any) -> bool:
    """Return whether the object declares that its episode is over; `is_done` may be a method, plain
    or `async`.
    """
    found = getattr(user_object, "is_done", False)
    return bool(await _result(found) if callable(found) else found)


def _text(value: Any) -> str:
    """Return text as it is, anything else as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=_plain).decode()


def _plain(value: Any) -> Any:
    """Return numbers and arrays of NumPy as Python's, for JSON."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a tool returned a {type(value).__name__}, which is neither text nor JSON")
