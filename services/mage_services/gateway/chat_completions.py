"""Read and check requests of OpenAI's chat completions, and write answers.

This module knows no engine and no run, so that the gateway of trials and the server of a trained
policy (`serving/chat_server.py`) can both use it.
"""

import json
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from itertools import count, groupby
from typing import Any, Literal

import msgspec
from aiohttp import web

from mage_async.errors import MageError
from mage_async.trials import agent_run
from mage_async.trials.agent_run import Choice, PolicyCall

Json = dict[str, Any]
"""A JSON object."""


class BadRequest(MageError):
    """Refuse a request that cannot be read; the message of the error is sent to the client."""


class Part(msgspec.Struct, frozen=True):
    """Hold a part of a message's content; only parts with a text can be read."""

    type: str
    text: str | None = None


Content = str | list[Part] | None
"""Content of a message, as OpenAI's clients send it."""


class CalledFunction(msgspec.Struct, frozen=True):
    """Hold the name of the function that an assistant's message calls, and its arguments."""

    name: str
    arguments: str = "{}"
    """JSON."""


class MessageCall(msgspec.Struct, frozen=True):
    """Hold a call of a tool in an assistant's message; OpenAI wraps the function into an object."""

    function: CalledFunction
    id: str | None = None


class Message(msgspec.Struct, frozen=True):
    """Hold a message of a conversation as OpenAI's clients send it."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    """Id of the call whose result a message of the role "tool" holds."""

    def read(self) -> agent_run.Message:
        """Convert the message to the form that is the same for all protocols.

        Raises:
            BadRequest: the content holds something other than text, such as an image.
        """
        roles = {"developer": "system", "function": "tool"}
        made = self.tool_calls or ()
        calls = tuple((each.function.name, each.function.arguments) for each in made)
        role = roles.get(self.role, self.role)
        ids = (self.tool_call_id,) if role == "tool" else [each.id for each in made]
        return agent_run.Message(
            role, text_of(self.content), calls, tuple(each or "" for each in ids)
        )


class StreamOptions(msgspec.Struct, frozen=True):
    """Hold what a request says about its stream."""

    include_usage: bool | None = False
    """Whether a last chunk, without choices, has the numbers of tokens."""


class ChatRequest(msgspec.Struct, frozen=True):
    """Hold a request for a chat completion, by OpenAI's protocol; other fields are ignored."""

    messages: list[Message]
    model: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """The newer name of `max_tokens`."""
    temperature: float | None = None
    """Used by the server of a trained policy alone, like `top_p` and `seed`: the sampling of trials
    is configured by the run."""
    top_p: float | None = None
    seed: int | None = None
    n: int | None = 1
    """Number of choices to sample."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    """Regular expression that the answer matches, as SGLang's clients send it; a `response_format`
    of type "regex" with a `pattern` says the same."""
    logprobs: bool | None = False

    def limit(self) -> int | None:
        """Return the largest number of tokens of an answer; None: the request does not say."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    def has_form(self) -> bool:
        """Return whether the request restricts the form of its answer."""
        return self.regex is not None or (self.response_format or {}).get("type", "text") != "text"

    def policy_call(self) -> PolicyCall:
        """Convert the request to the form that is the same for all protocols.

        Raises:
            BadRequest: the request asks for something that is not supported.
        """
        form = self.response_format or {"type": "text"}
        schema = schema_in(form, form.get("json_schema"), "response_format", "regex")
        pattern = form.get("pattern") if form["type"] == "regex" else self.regex
        if form["type"] == "regex" and not isinstance(pattern, str):
            raise BadRequest(
                f"`response_format` of type regex needs a text `pattern`, got {pattern!r:.60}"
            )
        if self.regex is not None and form["type"] != "text":
            raise BadRequest(
                "`regex` and a `response_format` of another type than text are two forms of one "
                "answer: send one of them"
            )
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise BadRequest(f"the pattern {pattern!r:.60} cannot be read: {error}") from error
        tools, must_call = tools_of(self.tools, self.tool_choice)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return policy_call_of(
            [each.read() for each in self.messages],
            tools=tools,
            num_choices=1 if self.n is None else self.n,
            max_tokens=self.limit(),
            stops=tuple(filter(None, stops)),
            pattern=pattern,
            schema=schema,
            must_call=must_call,
            is_parallel=self.parallel_tool_calls is not False,
        )


def text_of(content: str | Sequence[Part] | None) -> str:
    """Return the text of a message's content.

    Thoughts and refusals of earlier answers are left out: clients send back what they were sent,
    and a policy reads its own words from the tokens that it sampled.

    Raises:
        BadRequest: the content holds something other than text, such as an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.type in ("thinking", "refusal"):
            continue
        if part.type not in ("text", "input_text", "output_text") or part.text is None:
            raise BadRequest(
                "`messages`: only parts of type 'text', with a `text`, can be read, got one of "
                f"type {part.type!r:.60}"
            )
        texts.append(part.text)
    return "\n".join(texts)


def tools_of(
    tools: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None
) -> tuple[list[Json], tuple[str, ...]]:
    """Return the tools that may be called, and the names of the tools of which the answer must call
    one. There are no names if the answer need not call a tool.

    Args:
        choice: OpenAI's `tool_choice`.

    Raises:
        BadRequest: a tool is not a function, the chosen tool is not among the tools, or a call is
            required and there are no tools.
    """
    known: list[Json] = []
    for each in tools or ():
        function = each.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"`tools` must be functions with a name, got {str(each)!r:.80}")
        if not isinstance(function.get("parameters") or {}, dict):
            raise BadRequest(f"`tools`: parameters must be a JSON schema, got {str(each)!r:.80}")
        known.append({"type": "function", "function": function})
    names = tuple(each["function"]["name"] for each in known)
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise BadRequest(
            '`tool_choice` must be "none", "auto", "required" or name a function, '
            f"got {choice!r:.60}"
        )
    if choice == "none":
        return [], ()
    if isinstance(choice, dict):
        # OpenAI's chat completions wrap the name into `function`; the other protocols do not.
        chosen = choice.get("function", choice)
        name: Any = chosen.get("name") if isinstance(chosen, dict) else chosen
        if name not in names:
            raise BadRequest(f"`tool_choice`: {name!r:.60} is none of {', '.join(names)}")
        return known, (name,)
    if choice == "required" and not known:
        raise BadRequest('`tool_choice` is "required", and `tools` has none: send a tool')
    return known, names if choice == "required" else ()


def schema_in(form: Json, described: Any, key: str, *more: str) -> Json | None:
    """Return the JSON schema that the answer must follow; None if the form has no schema.

    Args:
        form: Form of the answer that a request asks for, with its `type`.
        described: For the type "json_schema", a table with the schema under `schema`; if it has no
            such key, any JSON object is an answer.
        key: Key of the request that holds the form.
        more: Types that this protocol has in addition to those of every protocol.

    Raises:
        BadRequest: the type of the form is not known, or the schema is no object.
    """
    kind, *kinds = form.get("type"), "text", "json_object", "json_schema", *more
    if kind not in kinds:
        known = f"{', '.join(kinds[:-1])} or {kinds[-1]}"
        raise BadRequest(f"`{key}` has type {known}, got {kind!r:.60}")
    if kind not in ("json_object", "json_schema"):
        return None
    table = described if kind == "json_schema" else {}
    schema = table.get("schema", {"type": "object"}) if isinstance(table, dict) else table
    if not isinstance(schema, dict):
        raise BadRequest(f"a JSON schema must be an object, got {schema!r:.60}")
    return schema


def policy_call_of(messages: Iterable[agent_run.Message], **given: Any) -> PolicyCall:
    """Return a call of the policy, after the checks that all protocols share.

    Args:
        given: Other fields of the `PolicyCall`.

    Raises:
        BadRequest: there is no message to answer, or a number is out of its range.
    """
    policy_call = PolicyCall(tuple(messages), **given)
    if not policy_call.messages or policy_call.messages[-1].role == "assistant":
        raise BadRequest("`messages` must end with one that the assistant is to answer")
    if not 1 <= policy_call.num_choices <= 16:
        raise BadRequest(f"`n` must be 1 to 16, got {policy_call.num_choices}")
    if policy_call.max_tokens is not None and policy_call.max_tokens < 1:
        raise BadRequest(f"`max_tokens` must be at least 1, got {policy_call.max_tokens}")
    return policy_call


def in_order_of_calls(
    messages: Iterable[agent_run.Message], *, are_all_sent: bool = True
) -> tuple[agent_run.Message, ...]:
    """Return the messages of a conversation, with the results of parallel calls in the order of the
    calls.

    Clients may send results as they become ready, and chat templates write them without the ids of
    their calls, so the policy tells them apart by their order. Results without ids stay as sent.

    Args:
        are_all_sent: Whether the messages have every call. If not, results of calls that the
            messages do not have stay as sent.

    Raises:
        BadRequest: a result names a call that no message before it has made.
    """
    places, numbers = dict[str, int](), count()
    ordered = list[agent_run.Message]()
    for is_result, part in groupby(messages, lambda each: each.role == "tool"):
        some = list(part)
        ids = [each for message in some for each in message.ids if each]
        if not is_result:
            places.update(zip(ids, numbers, strict=False))
        elif unknown := [each for each in ids if each not in places]:
            if not are_all_sent:
                ordered += some
                continue
            raise BadRequest(
                f"the result of a tool names the call {unknown[0]!r:.60}, which no message before "
                f"it has made; the calls before it: {', '.join(places) or 'none with an id':.200}. "
                "Send each result with the id of its call, after the call"
            )
        elif len(ids) == len(some):
            some.sort(key=lambda result: places[result.ids[0]])
        ordered += some
    return tuple(ordered)


def decode(body: bytes, kind: type[Any]) -> Any:
    """Decode a request of the type `kind`.

    Raises:
        BadRequest: the body is not JSON of that type.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadRequest(f"the request cannot be read: {error}") from error


def read_request(body: bytes) -> ChatRequest:
    """Decode a request for one answer in words.

    Raises:
        BadRequest: the body is no request, or it asks for tools, several choices, stops or
            log-probs, which the server of a policy does not have.
    """
    request: ChatRequest = decode(body, ChatRequest)
    if request.tools:
        raise BadRequest(
            "`tools` are not passed on to the policy: serve the folder that `mage push RUN_DIR "
            "--to DIR` writes with a server that offers tools, or describe them in a message"
        )
    if request.n not in (1, None):
        raise BadRequest(f"`n` must be 1, got {request.n}: send the request again instead")
    if request.stop:
        raise BadRequest("`stop` does not end an answer: cut the answer at the stop text yourself")
    if request.logprobs:
        raise BadRequest("`logprobs` are not sent: leave the key out")
    return request


def error_response(status: int, message: str, code: str | None = None) -> web.Response:
    """Return an error as OpenAI's clients read it."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)


def events_response(lines: Iterable[str]) -> web.Response:
    """Return server-sent events, which are sent all at once."""
    text = "".join(f"{line}\n\n" for line in lines)
    return web.Response(text=text, content_type="text/event-stream")


def completion_response(
    answers: Sequence[Choice], model: str, request: ChatRequest
) -> web.Response:
    """Return the choices of a completion, whole or as server-sent events, as the request says."""
    num_prompt = answers[0].num_prompt_tokens
    num_sampled = sum(len(each.tokens) for each in answers)
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
    head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": model}
    choices: list[Json] = []
    for number, answer in enumerate(answers):
        message: Json = {"role": "assistant", "content": answer.text}
        if answer.calls:
            message |= {"content": answer.text or None, "tool_calls": _calls(answer)}
        logprobs = {"content": _logprobs(answer)} if request.logprobs else None
        choices.append(
            {
                "index": number,
                "finish_reason": answer.finish,
                "message": message,
                "logprobs": logprobs,
            }
        )
    if not request.stream:
        return web.json_response(
            {"object": "chat.completion", **head, "choices": choices, "usage": usage}
        )
    # A stream has two chunks for each choice, its whole message and its end.
    chunks: list[Json] = []
    for choice in choices:
        delta = choice["message"]
        if calls := delta.get("tool_calls"):
            delta = delta | {"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]}
        begun = {"index": choice["index"], "delta": delta, "finish_reason": None}
        ended = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        chunks += [{"choices": [begun | {"logprobs": choice["logprobs"]}]}, {"choices": [ended]}]
    # Only a client that asks for this chunk expects one without choices.
    if request.stream_options is not None and request.stream_options.include_usage:
        chunks.append({"choices": [], "usage": usage})
    lines = [json.dumps({"object": "chat.completion.chunk", **head, **each}) for each in chunks]
    return events_response(f"data: {line}" for line in [*lines, "[DONE]"])


def _calls(answer: Choice) -> list[Json]:
    return [
        {
            "id": f"call_{secrets.token_hex(8)}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for name, arguments in answer.calls
    ]


def _logprobs(answer: Choice) -> list[Json]:
    return [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(answer.tokens, answer.logprobs, strict=True)
    ]
