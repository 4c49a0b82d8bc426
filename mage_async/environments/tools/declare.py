"""Tools of a user's class: what a method's signature and docstring say, as a JSON schema."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints, overload

import msgspec

from mage_async.environments.tools.given_schema import arguments_of
from mage_async.errors import ConfigError

_Method = TypeVar("_Method", bound=Callable[..., Any])
_MARK = "is_offered_tool"
_ARGUMENT = re.compile(r"(\w+)(?: \(.*?\))?: (.+)")


@overload
def tool(method: _Method) -> _Method: ...
@overload
def tool(*, schema: Mapping[str, Any]) -> Callable[[_Method], _Method]: ...
def tool(method: Any = None, *, schema: Mapping[str, Any] | None = None) -> Any:
    """Offer a method, plain or `async`, to the agent: its parameters are typed, its docstring says
    what it does, and lines `name: text` below `Args:` say what its parameters are.

    Args:
        schema: says all that instead, as OpenAI's form of a function does in `parameters`,
            `description` and `name`, which has to be the method's.
    """

    def mark(marked: _Method) -> _Method:
        setattr(marked, _MARK, schema)
        return marked

    return mark if method is None else mark(method)


@dataclass(frozen=True, slots=True)
class Tool:
    """A method that the agent may call."""

    name: str
    arguments: type[msgspec.Struct]
    """What a call's arguments have to be."""
    is_given: bool
    """The user gave the schema, so the method takes what JSON holds."""
    schema: dict[str, Any]
    """As chat templates take it: OpenAI's form of a function."""
    is_async: bool

    def read(self, arguments: object) -> dict[str, Any]:
        """Checked arguments by name, defaults among them.

        Raises:
            msgspec.ValidationError: they do not follow the schema.
        """
        read = msgspec.convert(arguments, self.arguments)
        if self.is_given and isinstance(arguments, dict):
            return arguments
        return {name: getattr(read, name) for name in read.__struct_fields__}


def has_tools(kind: type) -> bool:
    """Whether a class offers any."""
    return any(hasattr(method, _MARK) for each in kind.__mro__ for method in vars(each).values())


def tools_of(kind: type) -> dict[str, Tool]:
    """The tools of a class by name, in the order of the class.

    Raises:
        ConfigError: a signature or a docstring does not say what it should.
    """
    names = [name for each in reversed(kind.__mro__) for name in vars(each)]
    methods = {name: getattr(kind, name, None) for name in names}
    return {name: _tool(kind, method) for name, method in methods.items() if hasattr(method, _MARK)}


def _tool(kind: type, method: Any) -> Tool:
    place = f"{kind.__name__}.{method.__name__}"
    if given := getattr(method, _MARK):
        function = _given(place, method.__name__, given)
        arguments = arguments_of(place, function["parameters"])
    else:
        arguments = _arguments(place, method)
        function = _function(place, method, arguments)
    schema = {"type": "function", "function": function}
    is_async = inspect.iscoroutinefunction(method)
    return Tool(method.__name__, arguments, bool(given), schema, is_async)


def _function(place: str, method: Any, arguments: type[msgspec.Struct]) -> dict[str, Any]:
    """What a signature and a docstring say."""
    says, says_of_arguments = _documented(place, method)
    parameters = _schema(place, arguments)
    for name, said in says_of_arguments.items():
        if name in parameters["properties"]:
            parameters["properties"][name]["description"] = said
    return {"name": method.__name__, "description": says, "parameters": parameters}


def _given(place: str, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The function of a given schema, with or without OpenAI's envelope."""
    function = schema.get("function", schema)
    named = function.get("name", name)
    if named != name or not isinstance(function.get("parameters"), Mapping):
        raise ConfigError(
            f"tool {place}: its schema must have `parameters`, and the method's name, got {named!r}"
        )
    return {"name": name, **function}


def _arguments(place: str, method: Any) -> type[msgspec.Struct]:
    hints = get_type_hints(method, include_extras=True)
    _, *parameters = inspect.signature(method).parameters.values()
    fields: list[Any] = []
    for each in parameters:
        if each.name not in hints or each.kind is not each.POSITIONAL_OR_KEYWORD:
            raise ConfigError(f"tool {place}: the parameter `{each}` must be named and have a type")
        default = () if each.default is each.empty else (each.default,)
        fields.append((each.name, hints[each.name], *default))
    return msgspec.defstruct(method.__name__, fields, forbid_unknown_fields=True, kw_only=True)


def _schema(place: str, arguments: type[msgspec.Struct]) -> dict[str, Any]:
    try:
        (_,), parts = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    except TypeError as error:
        raise ConfigError(f"tool {place}: a type has no JSON form: {error}") from error
    parameters = parts.pop(arguments.__name__)
    wanted = ("type", "properties", "required")
    schema = {key: parameters[key] for key in wanted if key in parameters}
    return {**schema, "$defs": parts} if parts else schema


def _documented(place: str, method: Any) -> tuple[str, dict[str, str]]:
    """What a method does, and what its parameters are."""
    text = inspect.getdoc(method)
    if not text:
        raise ConfigError(f"tool {place}: a docstring must say what it does")
    says, _, rest = text.partition("Args:")
    found = (_ARGUMENT.fullmatch(line.strip()) for line in rest.splitlines())
    return " ".join(says.split()), {each[1]: each[2] for each in found if each is not None}
