"""Calls of tools in what a model said, in the two common forms.

<tool_call>{"name": ..., "arguments": {...}}</tool_call>    Hermes, Qwen: any number, text between
{"name": ..., "parameters": {...}}                          Llama 3: nothing else, `;` between
"""

import json
import re
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON = "<|python_tag|>"
_ENDS = re.compile(r"(\s*<\|\w+\|>)+\s*$")
_DECODER = json.JSONDecoder()
_FORM = '{"name": ..., "arguments": {...}}'


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as it was written; nothing of it is checked against a tool."""

    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class NoCall:
    """Something that was meant as a call and cannot be read."""

    why: str


def parse_calls(said: str) -> list[ToolCall | NoCall]:
    """All calls in order; none where a text is no call but an answer."""
    text = without_end(said)
    if _OPEN in text:
        return [_tagged(part) for part in text.split(_OPEN)[1:]]
    bare = text.strip().removeprefix(_PYTHON).strip()
    return _bare(bare) if bare.startswith("{") and '"name"' in bare else []


def without_end(said: str) -> str:
    """A completion without the special tokens that end it, such as `<|im_end|>`."""
    return _ENDS.sub("", said)


def _tagged(part: str) -> ToolCall | NoCall:
    text, closing, _ = part.partition(_CLOSE)
    if not closing:
        return NoCall("a tool call is not closed by its tag")
    try:
        return _call(json.loads(text))
    except ValueError as error:
        return NoCall(f"a tool call is no JSON: {error}")


def _bare(text: str) -> list[ToolCall | NoCall]:
    calls: list[ToolCall | NoCall] = []
    while text:
        try:
            found, end = _DECODER.raw_decode(text)
        except ValueError as error:
            return [*calls, NoCall(f"a tool call is no JSON: {error}")]
        calls.append(_call(found))
        text = text[end:].lstrip("; \n\t\r")
    return calls


def _call(found: Any) -> ToolCall | NoCall:
    """Arguments may be called parameters, or be JSON in a string, as OpenAI writes them."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return NoCall(f"a tool call must be {_FORM}")
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return NoCall(f"the arguments of {found['name']} are no JSON: {error}")
    return ToolCall(found["name"], arguments)
