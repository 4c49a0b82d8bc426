"""Read and check requests of OpenAI's responses, and write answers."""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from mage_async.trials.agent_run import Choice, Message, PolicyCall
from mage_services.gateway.chat_completions import (
    BadRequest,
    Content,
    Json,
    events_response,
    policy_call_of,
    schema_in,
    text_of,
    tools_of,
)


class Item(msgspec.Struct, frozen=True):
    """Hold an item of `input`: a message, the call of a function, its output, or reasoning."""

    type: str = "message"
    role: str = ""
    """Role of a message."""
    content: Content = None
    """Content of a message."""
    name: str = ""
    """Name of the function that an item of type "function_call" calls."""
    arguments: str = "{}"
    """Arguments of that call, as JSON."""
    call_id: str | None = None
    """Id of that call. In an item of type "function_call_output": id of the call whose result it
    holds."""
    output: Content = None
    """Result of a call, in an item of type "function_call_output"."""


class TextSettings(msgspec.Struct, frozen=True):
    """State the form that the text of a response must have."""

    format: dict[str, Any] | None = None
    """Text, any JSON object, or JSON that follows a schema; None: text."""


class ResponsesRequest(msgspec.Struct, frozen=True):
    """Request a response, by OpenAI's protocol; other fields are ignored."""

    input: str | list[Item]
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    text: TextSettings | None = None

    def policy_call(self, before: Sequence[Message]) -> PolicyCall:
        """Convert the request to the form that is the same for all protocols.

        Args:
            before: the conversation up to and including the response `previous_response_id`,
                without the instructions of earlier requests.

        Raises:
            BadRequest: the request asks for something that is not supported.
        """
        form = (self.text and self.text.format) or {"type": "text"}
        schema = schema_in(form, form, "text.format")
        functions = []
        for each in self.tools or ():
            if each.get("type") != "function":
                raise BadRequest(f"`tools` must be functions, got {each.get('type')!r:.60}")
            names = ("name", "description", "parameters")
            functions.append({"function": {name: each[name] for name in names if each.get(name)}})
        tools, must_call = tools_of(functions, self.tool_choice)
        head = [Message("system", self.instructions)] if self.instructions else []
        given = self.input
        items = [Item(role="user", content=given)] if isinstance(given, str) else given
        return policy_call_of(
            [*head, *before, *_messages(items)],
            tools=tools,
            max_tokens=self.max_output_tokens,
            schema=schema,
            must_call=must_call,
            is_parallel=self.parallel_tool_calls is not False,
        )


def _messages(items: Sequence[Item]) -> list[Message]:
    """Convert the items of `input` to messages; calls of functions become part of the assistant's
    message before them.
    """
    messages: list[Message] = []
    for item in items:
        match item.type:
            case "message":
                role = {"developer": "system"}.get(item.role, item.role)
                if role not in ("system", "user", "assistant"):
                    raise BadRequest(f"`input`: {role!r:.60} is no role")
                messages.append(Message(role, text_of(item.content)))
            case "function_call":
                if not item.name:
                    raise BadRequest("`input`: a function_call must have a `name`")
                call, identity = (item.name, item.arguments), item.call_id or ""
                if messages and messages[-1].role == "assistant":
                    last = messages[-1]
                    calls, ids = (*last.calls, call), (*last.ids, identity)
                    messages[-1] = last._replace(calls=calls, ids=ids)
                else:
                    messages.append(Message("assistant", "", (call,), (identity,)))
            case "function_call_output":
                messages.append(Message("tool", text_of(item.output), ids=(item.call_id or "",)))
            case "reasoning":
                pass
            case other:
                raise BadRequest(f"`input`: an item of type {other!r:.60} cannot be read")
    return messages


def responses_response(
    choice: Choice, request: ResponsesRequest, identity: str, call_ids: Sequence[str], model: str
) -> web.Response:
    """Return an answer, whole or as server-sent events.

    Args:
        identity: id of the response, by which a later request can continue the conversation.
        call_ids: ids of the calls of the answer.
    """
    is_cut = choice.finish == "length"
    output: list[Json] = []
    if choice.text or not choice.calls:
        part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
        own = {"id": f"msg_{secrets.token_hex(8)}", "type": "message", "role": "assistant"}
        status = "incomplete" if is_cut and not choice.calls else "completed"
        output.append({**own, "status": status, "content": [part]})
    for (name, arguments), call_id in zip(choice.calls, call_ids, strict=True):
        called = {"call_id": call_id, "name": name, "arguments": arguments}
        own = {"id": f"fc_{secrets.token_hex(8)}", "type": "function_call", "status": "completed"}
        output.append({**own, **called})
    num_prompt, num_sampled = choice.num_prompt_tokens, len(choice.tokens)
    whole: Json = {
        "id": identity,
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": request.instructions,
        "metadata": {},
        "model": model,
        "output": output,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": 1.0,
        "top_p": 1.0,
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": choice.num_reused},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_sampled,
        },
    }
    if not request.stream:
        return web.json_response(whole)
    events = [*_events(whole), {"type": f"response.{whole['status']}", "response": whole}]
    return events_response(
        f"event: {each['type']}\ndata: {json.dumps({**each, 'sequence_number': number})}"
        for number, each in enumerate(events)
    )


def _events(whole: Json) -> list[Json]:
    """Return the events of a stream before the last one."""
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    events: list[Json] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for number, item in enumerate(whole["output"]):
        place = {"output_index": number, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            inside = {**place, "content_index": 0}
            empty = item | {"content": [], "status": "in_progress"}
            text = {**inside, "logprobs": []}
            parts = [
                {"type": "response.content_part.added", **inside, "part": part | {"text": ""}},
                {"type": "response.output_text.delta", **text, "delta": part["text"]},
                {"type": "response.output_text.done", **text, "text": part["text"]},
                {"type": "response.content_part.done", **inside, "part": part},
            ]
        else:
            empty = item | {"arguments": "", "status": "in_progress"}
            arguments, kind = item["arguments"], "response.function_call_arguments"
            parts = [
                {"type": f"{kind}.delta", **place, "delta": arguments},
                {"type": f"{kind}.done", **place, "name": item["name"], "arguments": arguments},
            ]
        added, done = (f"response.output_item.{each}" for each in ("added", "done"))
        events.append({"type": added, "output_index": number, "item": empty})
        events += [*parts, {"type": done, "output_index": number, "item": item}]
    return events
