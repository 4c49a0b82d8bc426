"""Read and check requests of Anthropic's messages, and write answers."""

import json
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web

from mage_async.trials.agent_run import Choice, Message, PolicyCall
from mage_services.gateway.chat_completions import (
    BadRequest,
    Json,
    Part,
    events_response,
    policy_call_of,
    text_of,
    tools_of,
)


class Block(Part, frozen=True):
    """Hold a block of a message's content: a part, the call of a tool, or the result of one."""

    id: str | None = None
    """Id of the call that a block of type "tool_use" makes."""
    name: str = ""
    """Name of the tool that a block of type "tool_use" calls."""
    input: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of that call."""
    tool_use_id: str | None = None
    """Id of the call whose result a block of type "tool_result" holds."""
    content: str | list[Part] | None = None
    """Content of a block of type "tool_result"."""


class AnthropicMessage(msgspec.Struct, frozen=True):
    """Hold a message of a conversation as Anthropic's clients send it: the results of tools are
    blocks of a user's message.
    """

    role: str
    content: str | list[Block]

    def read(self) -> Iterator[Message]:
        """Convert the message to the form that is the same for all protocols, in which each result
        of a tool is a message of its own.

        Raises:
            BadRequest: it holds a block that cannot be read, such as an image.
        """
        if self.role not in ("user", "assistant", "system"):
            raise BadRequest(f"`messages`: a role is user or assistant, got {self.role!r:.60}")
        blocks = self.content
        if isinstance(blocks, str):
            yield Message(self.role, blocks)
            return
        calls = [each for each in blocks if each.type == "tool_use"]
        if not all(each.name for each in calls):
            raise BadRequest("`messages`: a block of type 'tool_use' must have a `name`")
        for each in blocks:
            if each.type == "tool_result":
                yield Message("tool", text_of(each.content), ids=(each.tool_use_id or "",))
        rest = [each for each in blocks if each.type not in ("tool_use", "tool_result")]
        made = tuple((each.name, json.dumps(each.input)) for each in calls)
        # An answer without text comes back from the client as a message without blocks.
        if rest or made or not blocks:
            yield Message(self.role, text_of(rest), made, tuple(each.id or "" for each in calls))


class MessagesRequest(msgspec.Struct, frozen=True):
    """Request the next message, by Anthropic's protocol; other fields are ignored."""

    messages: list[AnthropicMessage]
    model: str = ""
    system: str | list[Part] = ""
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None

    def policy_call(self) -> PolicyCall:
        """Convert the request to the form that is the same for all protocols.

        Raises:
            BadRequest: the request asks for something that is not supported.
        """
        # `tools_of` reads tools, and the choice among them, in OpenAI's form.
        functions = [
            {
                "function": {
                    "name": each.get("name"),
                    "description": each.get("description", ""),
                    "parameters": each.get("input_schema", {"type": "object"}),
                }
            }
            for each in self.tools or ()
        ]
        chosen = self.tool_choice or {"type": "auto"}
        choices = {"any": "required", "auto": "auto", "none": "none"}
        # Any other type names one tool, in the field `name`.
        tools, must_call = tools_of(functions, choices.get(str(chosen.get("type")), chosen))
        head = [Message("system", text_of(self.system))] if self.system else []
        return policy_call_of(
            [*head, *(part for each in self.messages for part in each.read())],
            tools=tools,
            max_tokens=self.max_tokens,
            stops=tuple(filter(None, self.stop_sequences or ())),
            must_call=must_call,
            is_parallel=not chosen.get("disable_parallel_tool_use", False),
        )


def messages_response(choice: Choice, model: str, *, is_streamed: bool) -> web.Response:
    """Return an answer, whole or as server-sent events."""
    blocks: list[Json] = [{"type": "text", "text": choice.text}] if choice.text else []
    for name, arguments in choice.calls:
        made = {"id": f"toolu_{secrets.token_hex(8)}", "name": name, "input": json.loads(arguments)}
        blocks.append({"type": "tool_use", **made})
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    reason = "stop_sequence" if choice.stop is not None else reasons[choice.finish]
    ended = {"stop_reason": reason, "stop_sequence": choice.stop}
    usage = {"input_tokens": choice.num_prompt_tokens, "output_tokens": len(choice.tokens)}
    head = {"id": f"msg_{secrets.token_hex(8)}", "type": "message", "role": "assistant"}
    whole = {**head, "model": model, "content": blocks, **ended, "usage": usage}
    if not is_streamed:
        return web.json_response(whole)
    # A stream begins with the empty message. Each block follows as its start, its whole content and
    # its end, and then the reason why the message ended.
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    events: list[Json] = [{"type": "message_start", "message": begun}]
    for number, block in enumerate(blocks):
        empty: Json
        delta: Json
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            text = json.dumps(block["input"])
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": text}
        events += [
            {"type": "content_block_start", "index": number, "content_block": block | empty},
            {"type": "content_block_delta", "index": number, "delta": delta},
            {"type": "content_block_stop", "index": number},
        ]
    events += [{"type": "message_delta", "delta": ended, "usage": usage}, {"type": "message_stop"}]
    return events_response(f"event: {each['type']}\ndata: {json.dumps(each)}" for each in events)


def anthropic_error(status: int, message: str) -> web.Response:
    """Return an error as Anthropic's clients read it."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }
    other = "api_error" if status >= 500 else "invalid_request_error"
    error = {"type": kinds.get(status, other), "message": message}
    return web.json_response({"type": "error", "error": error}, status=status)
