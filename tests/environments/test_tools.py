"""A class with tools: what is offered, and how calls are read and checked."""

import asyncio
import json
import re
from typing import Any

import numpy as np
import pytest

from mage_async.environments.catalogue import load
from mage_async.environments.environment import Outcome
from mage_async.environments.tools import (
    MAX_CALLS,
    InvalidCall,
    ToolCall,
    parse_calls,
    tool,
    tools_of,
    with_step,
)
from mage_async.environments.user_calls import make_pending_calls
from mage_async.environments.user_class import ResetStep
from mage_async.errors import CallFault, ConfigError
from tests.environments.boxes import TASK, Boxes, call


def outcomes(kind: type, *said: str) -> list[Outcome]:
    play = ResetStep(with_step(kind), {}).begin(TASK, 0)
    make_pending_calls(play)
    found = []
    for each in said:
        answered = play.act(each)
        found.append(make_pending_calls(play) or answered)
    return found


def test_a_signature_and_a_docstring_are_a_schema() -> None:
    look, move, fall = (each.schema for each in tools_of(Boxes).values())
    assert look == {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look into a box.",
            "parameters": {
                "type": "object",
                "properties": {
                    "box": {"type": "integer", "description": "the number of the box."},
                    "closely": {"type": "boolean", "default": False},
                },
                "required": ["box"],
            },
        },
    }
    properties = move["function"]["parameters"]["properties"]
    assert properties["to"] == {"enum": ["left", "right"]}
    assert properties["steps"] == {"type": "integer", "minimum": 1}
    assert fall["function"]["parameters"]["properties"] == {}


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        ("The key is in box 2.", []),
        ("Look: " + call("look", box=1), [ToolCall("look", {"box": 1})]),
        (
            f"{call('look', box=1)}\n{call('fall')}",
            [ToolCall("look", {"box": 1}), ToolCall("fall", {})],
        ),
        ('{"name": "look", "parameters": {"box": 1}}', [ToolCall("look", {"box": 1})]),
        (
            '<|python_tag|>{"name": "fall", "parameters": {}}; {"name": "fall"}',
            [ToolCall("fall", {}), ToolCall("fall", {})],
        ),
        (
            '<tool_call>{"name": "look", "arguments": "{\\"box\\": 1}"}</tool_call>',
            [ToolCall("look", {"box": 1})],
        ),
        ('{"box": 2}', []),
        ('{"name": "key", "box": 2}', []),
        ('{"key": {"name": "iron", "parameters": {}}}', []),
    ],
)
def test_calls_are_read_in_the_common_forms(said: str, calls: list[ToolCall]) -> None:
    assert parse_calls(said) == calls


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ('<tool_call>{"name": "look"}', "a tool call is not closed by its tag"),
        ("<tool_call>look</tool_call>", "a tool call is no JSON"),
        ("<tool_call>[1]</tool_call>", 'a tool call must be {"name": ..., "arguments": {...}}'),
        ('{"name": "look", ', "a tool call is no JSON"),
        ('{"name": "look", "parameters": "x"}', "the arguments of look are no JSON"),
        ('{"name": "look", "parameters": [1]}', "the arguments of look must be an object"),
        ('{"name": "look", "parameters": {"box": NaN}}', "the arguments of look are no JSON"),
        (f"<tool_call>{'[' * 5000}</tool_call>", "a tool call is no JSON"),
        (f'{{"name": "look", "parameters": {"[" * 5000}', "a tool call is no JSON"),
        (f'{{"name": "look", "parameters": "{"[" * 5000}"}}', "the arguments of look are no JSON"),
    ],
)
def test_what_cannot_be_read_says_why(said: str, why: str) -> None:
    (found,) = parse_calls(said)
    assert isinstance(found, InvalidCall)
    assert found.why.startswith(why)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("peek"), "Error: there is no tool 'peek'; there are look, move, fall."),
        (call("look", box="1"), "Error: look: Expected `int`, got `str` - at `$.box`."),
        (call("look"), "Error: look: Object missing required field `box`."),
        (call("look", box=1, by=2), "Error: look: Object contains unknown field `by`."),
        (call("move", to="up", steps=1), "Error: move: Invalid enum value 'up' - at `$.to`."),
        (call("move", to="left", steps=0), "Error: move: Expected `int` >= 1 - at `$.steps`."),
        ("<tool_call>{}", "Error: a tool call is not closed by its tag."),
    ],
)
def test_a_wrong_call_is_told_what_is_wrong(said: str, told: str) -> None:
    (outcome,) = outcomes(Boxes, said)
    assert outcome == Outcome(told, 0.0, is_valid=False, tool_answers=(told,))


def test_several_calls_of_a_turn_are_answered_in_order_beside_wrong_ones() -> None:
    said = call("look", box=1) + call("peek") + call("move", to="left", steps=2)
    (outcome,) = outcomes(Boxes, said)
    first, second, third = outcome.tool_answers
    assert (first, third) == ("box 1: nothing", '{"to":"left","steps":2}')
    assert second.startswith("Error: there is no tool")
    assert outcome.observation == "\n".join(outcome.tool_answers)
    assert not outcome.is_valid


def test_a_turn_has_a_most_of_calls() -> None:
    (outcome,) = outcomes(Boxes, call("look", box=1) * (MAX_CALLS + 5))
    assert len(outcome.tool_answers) == MAX_CALLS + 1
    assert outcome.tool_answers[-1] == "Not called: a turn has at most 16 calls."


def test_rewards_are_what_the_score_grew_by_and_an_answer_ends_the_episode() -> None:
    look, wrong, end = outcomes(Boxes, call("look", box=2), call("look", box=1), "box 2")
    assert (look.reward, wrong.reward, end.reward) == (1.0, 0.0, 10.0)
    assert (look.is_done, wrong.is_done, end.is_done) == (False, False, True)
    assert end.observation == "You said box 2."


def test_after_the_end_no_call_is_made() -> None:
    (outcome,) = outcomes(Boxes, call("look", box=2) * 3)
    assert outcome.is_done
    assert outcome.reward == 2.0
    assert outcome.tool_answers[-1] == "The episode is over."


def test_calls_after_the_end_are_answered_up_to_the_most_of_a_turn_too() -> None:
    (outcome,) = outcomes(Boxes, call("look", box=2) * (MAX_CALLS + 5))
    assert outcome.tool_answers[2:MAX_CALLS] == ("The episode is over.",) * (MAX_CALLS - 2)
    assert outcome.tool_answers[MAX_CALLS:] == ("Not called: a turn has at most 16 calls.",)


class DoneOverANetwork:
    """Say over a network whether the episode is over."""

    def reset(self, seed: int, task: int) -> str:
        self.looks = 0
        return "There are three boxes."

    @tool
    def look(self, box: int) -> str:
        """Look into a box."""
        self.looks += 1
        return f"box {box}"

    async def is_done(self) -> bool:
        return self.looks == 2

    def score(self) -> float:
        return 0.0


def test_an_async_is_done_is_awaited() -> None:
    async def play() -> list[tuple[str, bool]]:
        played: Any = with_step(DoneOverANetwork)()
        played.reset(0, 0)
        steps = [await played.step(call("look", box=box)) for box in (1, 2)]
        return [(observation, is_done) for observation, _, is_done, *_ in steps]

    assert asyncio.run(play()) == [("box 1", False), ("box 2", True)]


def test_what_a_tool_raises_is_the_environments_fault() -> None:
    with pytest.raises(CallFault, match=r"boxes, task 0, .*turn 1: step\(.* raised KeyError"):
        outcomes(Boxes, call("fall"))


class Measuring(Boxes):
    """Return values of NumPy."""

    @tool
    def measure(self) -> object:
        """Measure."""
        return {"found": np.int64(3), "sides": np.ones(2), "is_open": np.bool_(True)}


def test_values_of_numpy_are_written_as_json() -> None:
    (outcome,) = outcomes(Measuring, call("measure"))
    assert json.loads(outcome.observation) == {"found": 3, "sides": [1.0, 1.0], "is_open": True}


class Careful(Boxes):
    """Override one tool, and remove another."""

    fall = None

    def look(self, box: int) -> str:
        """Look into a box with care."""
        return f"carefully: {super().look(box)}"


def test_a_method_that_overrides_a_tool_is_a_tool() -> None:
    look, move = (each.schema["function"] for each in tools_of(Careful).values())
    assert (look["description"], move["name"]) == ("Look into a box with care.", "move")
    (outcome,) = outcomes(Careful, call("look", box=1))
    assert outcome.observation == "carefully: box 1: nothing"


class Unbound(Boxes):
    """Tools that need no object, marked below or above the other decorator."""

    @staticmethod
    @tool
    def weigh(box: int) -> str:
        """Weigh a box."""
        return f"weighed {box}"

    @tool
    @staticmethod
    def lift(box: int) -> str:
        """Lift a box."""
        return f"lifted {box}"

    @classmethod
    @tool
    async def count(cls, box: int) -> str:
        """Count the boxes from a box on."""
        return f"{cls.__name__} {3 - box}"


def test_static_and_class_methods_are_tools() -> None:
    names = ("weigh", "lift", "count")
    offered = tools_of(Unbound)
    for name in names:
        parameters = offered[name].schema["function"]["parameters"]
        assert parameters["properties"] == {"box": {"type": "integer"}}

    async def play() -> str:
        played: Any = with_step(Unbound)()
        played.reset(0, 0)
        observation, *_ = await played.step("".join(call(name, box=1) for name in names))
        return str(observation)

    assert asyncio.run(play()) == "weighed 1\nlifted 1\nUnbound 2"


class ByCriterion(Boxes):
    """Several scores, which nobody has added up."""

    def score(self) -> Any:
        return {"right": 1.0}


def test_a_score_that_is_no_number_is_named() -> None:
    said = r"raised TypeError: score\(\) must return a number, got \{'right': 1.0\}"
    with pytest.raises(CallFault, match=said):
        outcomes(ByCriterion, "it is in the first")


class Turning:
    """A tool with almost the name of an optional part."""

    @staticmethod
    @tool
    def max_turn(box: int) -> str:
        """Turn a box as far as it goes."""
        return f"turned {box}"

    def reset(self, seed: int, task: int) -> str:
        return "There are three boxes."

    def score(self) -> float:
        return 0.0


def test_a_static_tool_is_no_misspelt_part() -> None:
    assert outcomes(Turning, call("max_turn", box=1))[0].observation == "turned 1"


SHAKE = {
    "type": "function",
    "function": {
        "name": "shake",
        "description": "Shake boxes.",
        "parameters": {
            "type": "object",
            "properties": {
                "boxes": {"type": "array", "items": {"type": "integer", "minimum": 1}},
                "how": {"enum": ["hard", "softly"]},
                "by": {"type": "object", "properties": {"hand": {"type": "string"}}},
            },
            "required": ["boxes"],
        },
    },
}


class Given(Boxes):
    """A schema in OpenAI's form."""

    @tool(schema=SHAKE)
    def shake(self, boxes, how="softly", by=None):  # type: ignore[no-untyped-def]
        return {"boxes": boxes, "how": how, "by": by}


class GivenBefore(Given):
    """Override a method whose schema is given."""

    def shake(self, boxes, how="softly", by=None):  # type: ignore[no-untyped-def]
        return super().shake(boxes, how, by)


@pytest.mark.parametrize("kind", [Given, GivenBefore])
def test_a_given_schema_is_offered_and_checked_as_it_is(kind: type) -> None:
    assert tools_of(kind)["shake"].schema == SHAKE
    said = (
        call("shake", boxes=[1], by={"hand": "left"}),
        call("shake", boxes=[0]),
        call("shake", boxes=[1], how="well"),
        call("shake", boxes=[1], by={"hand": 1}),
    )
    right, *wrong = outcomes(kind, *said)
    assert right.observation == '{"boxes":[1],"how":"softly","by":{"hand":"left"}}'
    assert [each.observation for each in wrong] == [
        "Error: shake: Expected `int` >= 1 - at `$.boxes[0]`.",
        "Error: shake: Invalid enum value 'well' - at `$.how`.",
        "Error: shake: Expected `str`, got `int` - at `$.by.hand`.",
    ]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"name": "look"}, "its schema must have `parameters`, and the method's name, got 'look'"),
        (
            {"parameters": {"properties": {"a": {"not": {}}}}},
            "the schema's not would not be checked",
        ),
        (
            {"parameters": {"properties": {"a": {"const": 1, "minimum": 0}}}},
            "the schema's minimum next to const would not be checked: leave it out",
        ),
        (
            {"parameters": {"properties": {"a": {"enum": [1, 5], "maximum": 2}}}},
            "the schema's maximum next to enum would not be checked: leave it out",
        ),
        (
            {"parameters": {"properties": {"a": {"type": "string", "oneOf": [{"const": "b"}]}}}},
            "the schema's type next to oneOf would not be checked: write each part of oneOf",
        ),
        *(
            ({"parameters": {"properties": {"a": {"oneOf": parts}}}}, f"a value of type {name} may")
            for name, parts in (
                ("number", [{"type": "integer"}, {"type": "number"}]),
                ("string", [{"type": "string"}, {"const": "b"}]),
                ("string", [{"enum": ["b", "c"]}, {"const": "c"}]),
                ("null", [{}, {"type": "null"}]),
                ("boolean", [{"anyOf": [{"type": "boolean"}, {"const": 1}]}, {"const": True}]),
            )
        ),
        (
            {"parameters": {"type": "object", "anyOf": [{"required": ["a"]}]}},
            "the schema's type next to anyOf would not be checked",
        ),
        (
            {"parameters": {"properties": {"a": {"$ref": "#/$defs/b"}}}},
            "its schema has no part '#/$defs/b'",
        ),
        (
            {"parameters": {"properties": {"a": {"$ref": "other.json#/b"}}}},
            "its schema has no part 'other.json#/b'",
        ),
        (
            {
                "parameters": {
                    "properties": {"a": {"$ref": "#/$defs/b"}},
                    "$defs": {"b": {"type": "array", "items": {"$ref": "#/$defs/b"}}},
                }
            },
            "'#/$defs/b' refers to itself, which cannot be checked",
        ),
        (
            {"parameters": {"properties": {"a": {"type": "text"}}}},
            "'text' is no type of JSON",
        ),
    ],
)
def test_a_schema_that_would_not_be_checked_is_refused(schema: dict[str, Any], said: str) -> None:
    class Own(Boxes):
        @tool(schema=schema)
        def shake(self, a: str) -> str:
            return a

    with pytest.raises(ConfigError, match=re.escape(said)):
        with_step(Own)


def given_one(schema: dict[str, Any], name: str = "a") -> type:
    """A class with a tool whose schema is given, with one property."""

    class Own(Boxes):
        @tool(schema={"parameters": {"type": "object", "properties": {name: schema}}})
        def shake(self, **arguments: Any) -> Any:
            return arguments

    return Own


@pytest.mark.parametrize(
    ("schema", "right", "wrong", "said"),
    [
        ({"minimum": 1}, [1, 1.5, "x", None, [0]], 0, "Expected `float` >= 1"),
        ({"minimum": 0.5}, [1, 0.5], 0, "Expected `float` >= 0.5"),
        ({"type": ["string", "integer"], "minLength": 1}, ["x", 0], "", "Expected `str` of length"),
        ({"minItems": 1, "maxLength": 2}, [[1, 2, 3], "xy", 100], [], "Expected `array` of length"),
    ],
)
def test_a_bound_holds_for_values_of_its_types_alone(
    schema: dict[str, Any], right: list[Any], wrong: Any, said: str
) -> None:
    kind = given_one(schema)
    answers = outcomes(kind, *(call("shake", a=each) for each in (*right, wrong)))
    assert [json.loads(each.observation) for each in answers[:-1]] == [{"a": one} for one in right]
    assert answers[-1].observation.startswith(f"Error: shake: {said}")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"enum": [0.5, 1.0]}, "Literal may only contain None/booleans/integers/strings"),
        ({"enum": []}, "Literal types must have at least one item"),
        ({"anyOf": []}, "empty iterable"),
        ({"oneOf": []}, "empty iterable"),
        ({"const": 0.5}, "Literal may only contain None/booleans/integers/strings"),
        ({"oneOf": [{"const": ["x"]}, {"const": ["y"]}]}, "unhashable type"),
        ({"anyOf": [{"type": "array"}, {"items": {"type": "integer"}}]}, "more than one"),
        ({"enum": [["x"]]}, "unhashable type"),
        ({"type": "string", "pattern": "("}, "missing \\)"),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": 0}, "both `gt` and `ge`"),
        ({"type": "integer", "multipleOf": 0.5}, "cannot be interpreted as an integer"),
    ],
)
def test_a_schema_with_values_that_cannot_be_checked_is_refused_when_it_is_read(
    schema: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"^tool Own.shake: its schema cannot .*: .*{said}"):
        with_step(given_one(schema))


OPEN = {"type": "object", "additionalProperties": {"type": "integer"}}
PAIR = {"type": ["object", "null"], "properties": {"left": {"type": "integer"}}}
CLOSED = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    "parameters",
    [
        OPEN,
        {"type": "object", "properties": {"a": OPEN}},
        {"type": "object", "properties": {"a": {**PAIR, "additionalProperties": OPEN}}},
        {"type": "object", "properties": {"a": {"type": "array", "items": OPEN}}},
    ],
)
def test_properties_that_would_not_be_checked_are_refused(parameters: dict[str, Any]) -> None:
    class Own(Boxes):
        @tool(schema={"parameters": parameters})
        def shake(self, a: Any) -> Any:
            return a

    with pytest.raises(
        ConfigError, match=r"tool Own.shake: additionalProperties must be false or true"
    ):
        with_step(Own)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (PAIR, [{"left": 1}, {}, None], [{"left": "x"}, {"right": 1}, 1]),
        (CLOSED, [{}], [{"k": "no"}, None]),
        ({"type": "object"}, [{}, {"k": "no"}], [None]),
        ({**CLOSED, "additionalProperties": True}, [{}, {"k": "no"}], [None]),
        ({**PAIR, "additionalProperties": True}, [{"right": 1}, None], [{"left": "x"}]),
        ({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}, [1, None], [0, "x"]),
        ({"oneOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}, [1, None], [0, "x"]),
        ({"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}]}, ["a", "b"], ["c", 1, None]),
        ({"oneOf": [{"const": 1}, {"const": True}, {"type": "array"}]}, [1, True, []], [0, False]),
        ({"const": "a"}, ["a"], ["b", None]),
        ({"type": "null", "const": None}, [None], ["a", 0]),
        ({"type": "string", "format": "date"}, ["2024-02-30", "soon"], [1]),
    ],
)
def test_an_object_has_the_properties_that_its_schema_lists(
    schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    kind = given_one(schema)
    valid = [outcomes(kind, call("shake", a=each))[0].is_valid for each in (*right, *wrong)]
    assert valid == [True] * len(right) + [False] * len(wrong)


def test_a_given_schema_may_refer_to_its_parts() -> None:
    """As pydantic and servers of MCP write schemas."""
    parameters = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": {
            "Side": {"enum": ["left", "right"]},
            "Grip": {
                "type": "object",
                "properties": {"side": {"$ref": "#/$defs/Side", "description": "which hand"}},
                "required": ["side"],
                "additionalProperties": False,
            },
        },
        "type": "object",
        "properties": {
            "grips": {"type": "array", "items": {"$ref": "#/$defs/Grip"}},
            "last": {"anyOf": [{"$ref": "#/$defs/Grip"}, {"type": "null"}], "default": None},
        },
        "required": ["grips"],
        "additionalProperties": False,
    }

    class Own(Boxes):
        @tool(schema={"parameters": parameters})
        def shake(self, grips: list[dict[str, str]], last: dict[str, str] | None = None) -> Any:
            return [*grips, last]

    left = {"side": "left"}
    right, other, *wrong = outcomes(
        Own,
        call("shake", grips=[left], last=left),
        call("shake", grips=[], last=None),
        call("shake", grips=[{"side": "up"}]),
        call("shake", grips=[], last={}),
        call("shake", grips=[], by=1),
    )
    assert json.loads(right.observation) == [left, left]
    assert json.loads(other.observation) == [None]
    assert [each.observation for each in wrong] == [
        "Error: shake: Invalid enum value 'up' - at `$.grips[0].side`.",
        "Error: shake: Object missing required field `side` - at `$.last`.",
        "Error: shake: Object contains unknown field `by`.",
    ]
    assert tools_of(Own)["shake"].schema["function"]["parameters"] == parameters


def test_further_arguments_reach_a_method_that_takes_them_and_a_schema_that_allows_them() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}

    class Own(Boxes):
        @tool(schema={"parameters": parameters | {"additionalProperties": True}})
        def shake(self, a: int = 0, **more: Any) -> Any:
            return {"a": a, **more}

        @tool(schema={"parameters": parameters})
        def turn(self, a: int = 0, **more: Any) -> Any:
            return {"a": a, **more}

        @tool(schema={"parameters": parameters | {"additionalProperties": True}})
        def lift(self, a: int = 0) -> Any:
            return {"a": a}

    calls = (call(name, a=1, b="x") for name in ("shake", "turn", "lift"))
    taken, *refused = outcomes(Own, *calls)
    assert taken.observation == '{"a":1,"b":"x"}'
    for name, outcome in zip(("turn", "lift"), refused, strict=True):
        assert outcome.observation == f"Error: {name}: Object contains unknown field `b`."


def test_the_name_of_a_property_may_be_no_identifier() -> None:
    kind = given_one({"type": "integer"}, "max-items")
    right, wrong = outcomes(
        kind, call("shake", **{"max-items": 3}), call("shake", **{"max-items": "x"})
    )
    assert right.observation == '{"max-items":3}'
    assert wrong.observation == "Error: shake: Expected `int`, got `str` - at `$.max-items`."


class Untyped(Boxes):
    """A parameter has no type."""

    @tool
    def look(self, box) -> str:  # type: ignore[no-untyped-def]
        """Look."""
        return ""


class Unsaid(Boxes):
    """A tool says nothing."""

    @tool
    def sniff(self, box: int) -> str:
        return ""


class Stepping(Boxes):
    """A step beside tools."""

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", 0.0, True


class Unscored:
    """Nothing says what was earned."""

    @tool
    def look(self) -> str:
        """Look."""
        return ""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Untyped, "tool Untyped.look: the parameter `box` must be named and have a type"),
        (Unsaid, "tool Unsaid.sniff: a docstring must say what it does"),
        (Stepping, "Stepping: has tools and `step`; a class has one of the two"),
        (Unscored, r"Unscored: has tools and no `score\(\)`, which says what it earned"),
    ],
)
def test_a_class_that_cannot_be_offered_is_one_sentence(kind: type, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_step(kind)


class Kitchen:
    """Rules."""

    tools: tuple[Any, ...] = ("knife", "spoon")
    legal_actions = ("knife", "spoon")

    def reset(self, seed: int, task: int) -> str:
        return "soup"

    def step(self, action: str) -> tuple[str, float, bool]:
        return "done", 1.0, True


class ListedFunctions(Kitchen):
    """Rules."""

    tools = (len, max)


def test_functions_in_a_list_of_tools_are_refused_and_words_are_not() -> None:
    assert load(Kitchen).facts.name
    with pytest.raises(ConfigError, match=r"not read: make .*, give the list another name$"):
        load(ListedFunctions)
