"""Requests whose fields are missing or of another type: each is answered, and none ends a trial."""

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import TEMPLATE, build_tokenizer, save_tokenizer
from mage_async.trajectory import Trial
from mage_async.trials.chat_format import ChatFormat
from tests.helpers.agent_site import asked, played, said, scripted, small_chat, tasks_of

SCHEMA = {"type": "object", "properties": {"box": {"type": "integer"}}, "required": ["box"]}
CALLED = {"name": "look", "arguments": '{"box": 1}'}
TEXT = {"type": "text", "text": "hm"}
TOOL = {"name": "look", "description": "looks", "input_schema": SCHEMA}
FUNCTION = {"name": "look", "description": "looks", "parameters": SCHEMA}
CHATS = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [TEXT, TEXT]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": CALLED},
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "empty"},
    ],
    "model": "m", "max_tokens": 9, "max_completion_tokens": 9, "temperature": 1.0, "top_p": 1.0,
    "seed": 1, "n": 1, "stream": False, "stop": ["x"], "logprobs": True,
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "parallel_tool_calls": True,
}  # fmt: skip
FORM = {"messages": said("a"), "response_format": {
    "type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA},
}}  # fmt: skip
PATTERN = {"messages": said("a"), "response_format": {"type": "regex", "pattern": "a/b"}}
MESSAGES = {
    "messages": [
        {"role": "user", "content": [TEXT]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "h"}, TEXT,
            {"type": "tool_use", "id": "1", "name": "look", "input": {"box": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [TEXT]}, TEXT,
        ]},
    ],
    "model": "m", "system": [TEXT], "max_tokens": 9, "stop_sequences": ["x"], "stream": False,
    "tools": [TOOL],
    "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
}  # fmt: skip
RESPONSES = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "1", **CALLED},
        {"type": "function_call_output", "call_id": "1", "output": "empty"},
    ],
    "model": "m", "instructions": "s", "max_output_tokens": 9, "stream": False,
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "look"}, "parallel_tool_calls": True,
}  # fmt: skip
SHAPED = {"input": "a", "text": {
    "format": {"type": "json_schema", "name": "n", "schema": SCHEMA},
}}  # fmt: skip
BODIES = [
    ("chat/completions", CHATS),
    ("chat/completions", FORM),
    ("chat/completions", PATTERN),
    ("messages", MESSAGES),
    ("responses", RESPONSES),
    ("responses", SHAPED),
]
IMAGE = [{"type": "image", "source": {}}]
ONE_BLOCK = [
    ("messages", "user", {"type": "text"}, "with a `text`"),
    ("messages", "user", {"type": "text", "text": None}, "with a `text`"),
    ("messages", "user", {"type": "text", "text": 1}, "Expected `str"),
    ("messages", "user", {"text": "a"}, "missing required field `type`"),
    ("messages", "user", IMAGE[0], "got one of type 'image'"),
    ("messages", "user", {"type": "tool_result", "content": IMAGE}, "got one of type 'image'"),
    ("messages", "user", {"type": "tool_result", "content": [None]}, "Expected `object`"),
    ("messages", "assistant", {"type": "tool_use", "input": {}}, "must have a `name`"),
    ("messages", "assistant", {"type": "tool_use", "name": 1}, "Expected `str`"),
    ("messages", "assistant", {"type": "tool_use", "name": "x", "input": 1}, "Expected `object`"),
    ("chat/completions", "user", {"type": "text"}, "with a `text`"),
    ("chat/completions", "user", {"type": "image_url"}, "got one of type 'image_url'"),
]
WORDS = {"messages": said("a"), "input": "a"}
ITEMS = [
    ({"type": "function_call"}, "must have a `name`"),
    ({"type": "function_call", "name": "x", "arguments": {}}, "Expected `str`"),
    ({"type": "function_call_output", "output": IMAGE}, "got one of type 'image'"),
    ({"role": [], "content": "a"}, "Expected `str`"),
    ({"type": "item_reference", "id": "1"}, "cannot be read"),
]
UNREADABLE = [
    *(
        (path, {"messages": [{"role": role, "content": [block]}, *said("a")]}, sentence)
        for path, role, block, sentence in ONE_BLOCK
    ),
    *(("responses", {"input": [item]}, sentence) for item, sentence in ITEMS),
    ("responses", {"input": "a", "text": {"format": {"type": []}}}, "`text.format` has type text"),
    ("responses", {"input": "a", "text": {"format": "text"}}, "Expected `object | null`"),
    ("chat/completions", {**WORDS, "tools": [{"function": FUNCTION | {"parameters": 1}}]},
     "parameters must be a JSON schema"),
    ("chat/completions", {**WORDS, "tool_choice": {"function": 1}}, "`tool_choice`: 1 is none of"),
    ("chat/completions", {**WORDS, "tool_choice": "any"}, '`tool_choice` must be "none", "auto"'),
]  # fmt: skip
"""Path, body and a part of the answer."""
OTHERS = (None, True, 0, -1, 1.5, "", "x", [], [None], [{}], {}, {"type": "image"})
"""Values that a field has in place of its own."""


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every dictionary and list below a node, with each of its keys."""
    keys = list(node) if isinstance(node, dict) else range(len(node))
    for key in keys:
        yield node, key
        if isinstance(node[key], dict | list):
            yield from places(node[key])


def changed(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The body itself, and with each of its fields left out, or with another value."""
    body = json.loads(json.dumps(body))  # no part occurs twice
    yield copy.deepcopy(body)
    for node, key in places(body):
        own = node[key]
        for other in OTHERS:
            node[key] = other
            yield copy.deepcopy(body)
        node[key] = own
        if isinstance(node, dict):
            before = dict(node)
            del node[key]
            yield copy.deepcopy(body)
            node.clear()
            node.update(before)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return small_chat(tmp_path_factory.mktemp("policy"))


def answers_to(chat: ChatFormat, requests: Sequence[tuple[str, Any]]) -> list[tuple[int, str]]:
    """Status and text of the answers to requests, which the episodes of some trials share."""
    num_trials = len(requests) // 200 + 1  # a trial has at most 256 conversations
    answers: dict[int, tuple[int, str]] = {}

    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        async with aiohttp.ClientSession() as http:
            for number in range(2 * int(task) + episode, len(requests), 2 * num_trials):
                path, body = requests[number]
                data = body if isinstance(body, str) else json.dumps(body)
                async with http.post(f"{url}/{path}", data=data) as answer:
                    answers[number] = answer.status, await answer.text()
        assert (await asked(url, said("a")))["content"]
        return 1.0

    tasks = [str(each) for each in range(num_trials)]
    call = '<tool_call>\n{"name": "look", "arguments": {"box": 1}}\n</tool_call>'
    trials = played(tasks_of(run, max_turns=500), chat, scripted(chat, call), tasks=tasks)
    for trial in trials:
        assert isinstance(trial, Trial), trial
        assert trial.episode_rewards() == [1.0, 1.0]
    return [answers[number] for number in range(len(requests))]


def test_a_block_that_cannot_be_read_is_refused_in_a_sentence(chat: ChatFormat) -> None:
    refused = [
        answer for answer in answers_to(chat, [(path, body) for path, body, _ in UNREADABLE])
    ]
    for (path, body, sentence), (status, text) in zip(UNREADABLE, refused, strict=True):
        assert status == 400, (path, body, text)
        assert sentence in json.loads(text)["error"]["message"]


def test_a_request_with_everything_is_answered(chat: ChatFormat) -> None:
    answers = answers_to(chat, BODIES)
    assert [status for status, _ in answers] == [200] * len(BODIES), answers


def test_a_request_nested_deeply_is_answered_in_a_sentence(chat: ChatFormat) -> None:
    call = {"name": "look", "arguments": "[" * 10_000}
    asked_before = {"role": "assistant", "tool_calls": [{"function": call}]}
    given = {"input": [{"type": "function_call", **call}, {"role": "user", "content": "a"}]}
    whole = {"messages": [*said("a"), asked_before, *said("b")]}
    shallow: list[tuple[str, Any]] = [("chat/completions", whole), ("responses", given)]
    block = {"type": "tool_use", "name": "look", "input": "DEEP"}
    used = [*said("a"), {"role": "assistant", "content": [block]}, *said("b")]
    offered = {"input": "a", "tools": [{"type": "function", "name": "look", "parameters": "DEEP"}]}
    # Decoder and encoder have one limit, but the encoder is called from deeper in the stack.
    deep = [
        (path, json.dumps(body).replace('"DEEP"', '{"a":' * depth + "1" + "}" * depth))
        for depth in (*range(900, 1000, 4), 100_000)
        for path, body in (("messages", {"messages": used}), ("responses", offered))
    ]
    answers = answers_to(chat, [*shallow, *deep])
    assert [status for status, _ in answers[:2]] == [200, 200]
    for status, text in answers[2:]:
        assert status == 200 or (status == 400 and json.loads(text)["error"]["message"]), text
    assert answers[-1][0] == 400


def test_what_a_chat_template_cannot_write_is_refused_in_a_sentence(
    tmp_path: Path,
) -> None:
    # Templates such as gpt-oss's join a tool's description to other text.
    describes = "{% for each in tools or [] %}{{ '// ' + each.function.description }}{% endfor %}"
    save_tokenizer(build_tokenizer(["rock"]), tmp_path)
    (tmp_path / "chat_template.jinja").write_text(describes + TEMPLATE)
    tools = [
        {"type": "function", "function": FUNCTION | {"description": each}} for each in ("a", 1)
    ]
    bodies = [{"messages": said("a"), "tools": [tool]} for tool in tools]
    requests = [("chat/completions", body) for body in bodies]
    answered, (status, text) = answers_to(load_chat(tmp_path), requests)
    assert answered[0] == 200
    assert status == 400
    assert "the chat template refuses the conversation: " in json.loads(text)["error"]["message"]


@pytest.mark.slow  # 2400 requests
def test_a_request_with_a_field_left_out_or_of_another_type_is_answered_in_a_sentence(
    chat: ChatFormat,
) -> None:
    requests = [(path, each) for path, body in BODIES for each in changed(body)]
    for request, (status, text) in zip(requests, answers_to(chat, requests), strict=True):
        assert status in (200, 400), (request, text)
        assert status == 200 or " " in json.loads(text)["error"]["message"], (request, text)
