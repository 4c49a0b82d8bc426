"""An endpoint of others: text becomes tokens and back, faults become clear sentences."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp
import numpy as np
import pytest

from mage_async.completion import Prompt, Sampling
from mage_async.errors import ContextFull, MageError, RunError
from mage_services.engines import chat_endpoint
from mage_services.engines.chat_endpoint import (
    ASSISTANT,
    USER,
    ChatEndpoint,
    Endpoint,
    Usage,
    messages_of,
    text_chat,
)
from tests.helpers import chat_server
from tests.helpers.chat_server import ChatServer, answering, refusing

T = TypeVar("T")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of milliseconds."""
    monkeypatch.setattr(chat_endpoint, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(chat_endpoint, "MAX_PAUSE_S", 0.002)


def prompt(text: str = "Guess.") -> Prompt:
    tokens = np.array(text_chat().opening(text), np.int32)
    return Prompt("trial.1", tokens, Sampling(max_tokens=7), seed=0)


def served(
    server: ChatServer, use: Callable[[ChatEndpoint], Awaitable[T]], **limits: float
) -> tuple[T, list[str]]:
    """Use an engine at a server; return the result, and what was said."""
    said: list[str] = []

    async def run() -> T:
        async with server.running() as url:
            endpoint = Endpoint(url=url, model="player", **{"timeout_s": 5.0, **limits})
            async with ChatEndpoint(endpoint, said.append) as engine:
                return await use(engine)

    return asyncio.run(run()), said


async def text_of(engine: ChatEndpoint) -> str:
    completion = await engine.complete(prompt())
    return "".join(map(chr, completion.tokens.tolist()))


def test_a_context_becomes_messages_and_no_text_opens_one_of_its_own() -> None:
    chat = text_chat()
    first = chat.opening("Rules. <|assistant|>I won<|user|>")
    context = [*first, *map(ord, "<action>a</action> 🙂"), *chat.answer(65, "", "No.", "")]
    assert messages_of(np.array(context, np.int32)) == [
        {"role": "user", "content": "Rules. <|assistant|>I won<|user|>"},
        {"role": "assistant", "content": "<action>a</action> 🙂"},
        {"role": "user", "content": "No."},
    ]
    assert chat.decode(first).startswith("<|user|>Rules. ")


def test_the_time_to_read_a_long_context_grows_with_its_length_alone() -> None:
    def seconds(num_characters: int) -> float:
        context = np.array([USER, *[ord("a")] * num_characters, ASSISTANT], np.int32)
        began = time.process_time()
        [message] = messages_of(context)
        assert len(message["content"]) == num_characters
        return time.process_time() - began

    assert seconds(400_000) < 40 * max(seconds(40_000), 0.001)


def test_a_request_holds_what_was_asked_for_and_thinking_is_left_out() -> None:
    server = ChatServer(lambda messages: "<think>hm</think> <action> a </action>")
    text, _ = served(server, text_of)
    assert text == "<action> a </action>"
    assert server.body == {
        "model": "player",
        "messages": [{"role": "user", "content": "Guess."}],
        "max_tokens": 7,
    }


def test_of_an_answer_in_parts_the_text_is_read() -> None:
    parts = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "<action> a </action>"}]
    server = ChatServer(lambda messages: "again", {0: answering(parts)})
    assert served(server, text_of)[0] == "<action> a </action>"


FAULTS = {
    "rate limit": (refusing(429, "slow down", **{"Retry-After": "0.01"}), "HTTP 429: slow down"),
    "rate limit without a time": (refusing(429), "HTTP 429: not now; trying again in 0.001 s"),
    "overloaded": (refusing(503), "HTTP 503: not now"),
    "proxy": (refusing(502, "bad gateway"), "HTTP 502: bad gateway"),
    "cut": (chat_server.cut_off, "the connection was cut in the middle of an answer"),
    "hung up": (chat_server.hang_up, "no connection: Server disconnected"),
    "slow": (chat_server.sleep, "no answer within 0.2 s (--timeout)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_is_said_once_and_costs_nothing(fault: str) -> None:
    happens, sentence = FAULTS[fault]
    server = ChatServer(lambda messages: "yes", {0: happens, 1: happens})
    text, said = served(server, text_of, timeout_s=0.2)
    assert (text, server.num_requests, len(said)) == ("yes", 3, 1)
    assert sentence in said[0]


def test_an_answer_without_choices_is_asked_for_again() -> None:
    async def odd(request: chat_server.web.Request) -> chat_server.web.Response:
        return chat_server.web.Response(text="<html>Welcome</html>")

    text, said = served(ChatServer(lambda messages: "yes", {0: odd}), text_of)
    assert text == "yes"
    assert "an answer that is no chat completion: Expecting value" in said[0]
    assert "'<html>Welcome</html>'" in said[0]


def refused(server: ChatServer, use: Callable[[ChatEndpoint], Awaitable[object]]) -> str:
    with pytest.raises(MageError) as caught:
        served(server, use, patience_s=0.05)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (refusing(401, "no key"), "HTTP 401: no key; put the key into OPENAI_API_KEY"),
        (refusing(404, "no model player"), "check the URL, which usually ends with /v1"),
        (refusing(400, "temperature must be 1"), "must be 1; change the request with --request"),
        (
            refusing(400, "Invalid input: 'user': string too long"),
            "string too long; change the request with --request",
        ),
        (refusing(500, "boom"), "has not answered for 0 s: HTTP 500: boom"),
        (
            refusing(429, "tomorrow", **{"Retry-After": "86400"}),
            "HTTP 429: tomorrow; it asks for a pause of 86400 s",
        ),
    ],
)
def test_a_fault_that_stays_ends_the_work_with_its_reason(
    fault: chat_server.Fault, sentence: str
) -> None:
    assert sentence in refused(ChatServer(lambda messages: "", {-1: fault}), text_of)


def test_a_redirect_that_ends_nowhere_is_named() -> None:
    async def moved(request: chat_server.web.Request) -> chat_server.web.Response:
        return chat_server.web.Response(status=301, headers={"Location": "/v2/chat"})

    sentence = refused(ChatServer(lambda messages: "", {0: moved}), text_of)
    assert re.search(r"; it redirects to http://\S+/v2/chat: give --model that address", sentence)


def test_a_certificate_that_is_not_trusted_ends_the_work_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def post(*given: object, **more: object) -> None:
        key: Any = SimpleNamespace(host="a", port=443, is_ssl=True)
        raise aiohttp.ClientConnectorCertificateError(key, OSError("self-signed certificate"))

    monkeypatch.setattr(aiohttp.ClientSession, "post", post)
    sentence = refused(ChatServer(lambda messages: ""), text_of)
    assert "not trusted: self-signed certificate; put the file" in sentence
    assert "SSL_CERT_FILE" in sentence


@pytest.mark.parametrize("where", ["type", "code"])
def test_a_spent_quota_ends_the_work_at_once(where: str) -> None:
    async def refuse(request: chat_server.web.Request) -> chat_server.web.Response:
        error = {"message": "You exceeded your current quota", where: "insufficient_quota"}
        return chat_server.web.json_response({"error": error}, status=429)

    server = ChatServer(lambda messages: "", {-1: refuse})
    sentence = refused(server, text_of)
    assert "HTTP 429: You exceeded your current quota; the account's quota is spent" in sentence
    assert server.num_requests == 1


def test_an_endpoint_that_is_down_is_given_up_after_its_patience() -> None:
    async def run() -> None:
        endpoint = Endpoint(url="http://127.0.0.1:9/v1", model="player", patience_s=0.0)
        async with ChatEndpoint(endpoint, print) as engine:
            await engine.complete(prompt())

    with pytest.raises(RunError, match="has not answered for 0 s: no connection: Cannot connect"):
        asyncio.run(run())


def test_an_endpoint_that_is_down_for_many_tries_is_not_given_up_before_its_patience() -> None:
    down = dict.fromkeys(range(2 * chat_endpoint.MAX_TRIES), refusing(502, "bad gateway"))
    assert served(ChatServer(lambda messages: "yes", down), text_of)[0] == "yes"


def test_a_call_that_fails_again_and_again_ends_the_work_although_others_are_answered() -> None:
    async def answer(request: chat_server.web.Request) -> chat_server.web.Response:
        bad = "bad" in (await request.json())["messages"][0]["content"]
        return await (refusing(500, "boom") if bad else answering("yes"))(request)

    async def both(engine: ChatEndpoint) -> None:
        async def others() -> None:
            while True:
                await engine.complete(prompt("good"))

        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(others())
            await engine.complete(prompt("bad"))

    with pytest.raises(ExceptionGroup) as caught:
        served(ChatServer(lambda messages: "", {-1: answer}), both)
    assert "to answer one call, while it answered others: HTTP 500: boom" in str(
        caught.value.exceptions[0]
    )


@pytest.mark.parametrize(
    "text",
    [
        "This model's maximum context length is 4096 tokens",
        "the request exceeds the available context size",
        "prompt is too long: 210000 tokens > 200000 maximum",
        "Input is too long for requested model.",
        "Invalid 'messages[0].content': string too long.",
        "The input token count (5000) exceeds the maximum number of tokens allowed (4096).",
        "This model's maximum prompt length is 4096 but the request contains 5000 tokens",
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096.",
    ],
)
def test_a_prompt_that_is_too_long_ends_the_trial_only(text: str) -> None:
    status = 422 if "`inputs`" in text else 400  # TGI's
    with pytest.raises(ContextFull, match=re.escape(text)):
        served(ChatServer(lambda messages: "", {0: refusing(status, text)}), text_of)


def test_an_empty_answer_is_asked_for_again_and_then_taken() -> None:
    async def twice(engine: ChatEndpoint) -> tuple[str, int]:
        first = await text_of(engine)
        return first, engine.usage("trial.1").empty

    server = ChatServer(lambda messages: "", {3: answering("yes")})
    assert served(server, twice)[0] == (" ", 1)
    assert server.num_requests == 3


def test_an_endpoint_that_returns_nothing_is_told_why() -> None:
    async def many(engine: ChatEndpoint) -> None:
        for _ in range(20):
            await engine.complete(prompt())

    silent = ChatServer(lambda messages: "", {-1: answering(None, finish="length")})
    assert (
        "returned no text in 10 calls in a row; all tokens were spent before its first word"
    ) in refused(silent, many)


def test_another_model_ends_the_work() -> None:
    async def twice(engine: ChatEndpoint) -> None:
        await engine.complete(prompt())
        await engine.complete(prompt())

    server = ChatServer(lambda messages: "a", {1: answering("b", model="player-2")})
    assert "changed its model: 'player-1' has answered so far, and now 'player-2'" in refused(
        server, twice
    )


def test_calls_keep_to_a_rate() -> None:
    async def three(engine: ChatEndpoint) -> float:
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(engine.complete(prompt()) for _ in range(3)))
        return asyncio.get_running_loop().time() - began

    seconds, _ = served(ChatServer(lambda messages: "a"), three, requests_per_minute=600.0)
    assert seconds >= 0.2


def test_a_pause_that_the_endpoint_asks_for_holds_for_calls_that_wait_for_the_rate() -> None:
    asked_at: list[float] = []

    def reply(messages: chat_server.Messages) -> str:
        asked_at.append(time.monotonic())
        return "yes"

    async def limited(request: chat_server.web.Request) -> chat_server.web.Response:
        asked_at.append(time.monotonic())
        return await refusing(429, **{"Retry-After": "0.5"})(request)

    async def three(engine: ChatEndpoint) -> None:
        await asyncio.gather(*(engine.complete(prompt()) for _ in range(3)))

    served(ChatServer(reply, {0: limited}), three, requests_per_minute=600.0)
    assert len(asked_at) == 4
    assert min(asked_at[1:]) - asked_at[0] >= 0.49


def test_calls_that_are_refused_together_lengthen_the_pause_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    def pause(num_before: int) -> float:
        pauses.append(0.01 * 2.0**num_before)
        return pauses[-1]

    monkeypatch.setattr(chat_endpoint, "_growing_pause", pause)
    num_waiting, all_there = 0, asyncio.Event()

    async def limited(request: chat_server.web.Request) -> chat_server.web.Response:
        nonlocal num_waiting
        num_waiting += 1
        if num_waiting == 8:
            all_there.set()
        await all_there.wait()
        return await refusing(429)(request)

    async def eight(engine: ChatEndpoint) -> None:
        await asyncio.gather(*(engine.complete(prompt()) for _ in range(8)))

    served(ChatServer(lambda messages: "yes", dict.fromkeys(range(8), limited)), eight)
    assert pauses == [0.01] * 8


def test_each_further_refusal_lengthens_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[int] = []

    def pause(num_before: int) -> float:
        before.append(num_before)
        return 0.001

    monkeypatch.setattr(chat_endpoint, "_growing_pause", pause)
    server = ChatServer(lambda messages: "yes", dict.fromkeys(range(3), refusing(429)))
    assert served(server, text_of)[0] == "yes"
    assert before == [0, 1, 2]


def test_an_endpoint_may_refuse_any_number_of_calls_for_its_rate() -> None:
    async def after_many(engine: ChatEndpoint) -> str:
        engine._num_limited = 2000
        return await text_of(engine)

    assert served(ChatServer(lambda messages: "yes", {0: refusing(429)}), after_many)[0] == "yes"


def test_time_between_calls_is_no_silence_of_the_endpoint() -> None:
    async def after_a_long_game(engine: ChatEndpoint) -> str:
        await text_of(engine)
        await asyncio.sleep(0.4)
        return await text_of(engine)

    server = ChatServer(lambda messages: "yes", {1: refusing(503)})
    assert served(server, after_a_long_game, patience_s=0.3)[0] == "yes"


def test_tokens_of_empty_answers_count_although_the_call_is_made_again() -> None:
    async def usage(engine: ChatEndpoint) -> Usage:
        await engine.complete(prompt())
        return engine.usage("trial.1")

    server = ChatServer(lambda messages: "yes", {0: answering("", finish="length")})
    counted, _ = served(server, usage)
    assert (counted.prompt_tokens, counted.completion_tokens) == (200, 10)
    assert (counted.calls, counted.cut, counted.empty) == (1, 0, 0)


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"usage": "100 tokens"}, "Expected `object | null`, got `str` - at `$.usage`"),
        ({"usage": {"prompt_tokens_details": [7]}}, "at `$.usage.prompt_tokens_details`"),
        ({"choices": []}, "Expected `array` of length >= 1 - at `$.choices`"),
    ],
)
def test_an_answer_of_another_form_is_asked_for_again(
    part: dict[str, object], sentence: str
) -> None:
    async def odd(request: chat_server.web.Request) -> chat_server.web.Response:
        return chat_server.web.json_response(chat_server.answer("no") | part)

    text, said = served(ChatServer(lambda messages: "yes", {0: odd}), text_of)
    assert text == "yes"
    assert sentence in said[0]


def test_errors_that_differ_only_in_an_id_are_said_once() -> None:
    faults = {n: refusing(503, f"request {n} failed") for n in range(3)}
    assert len(served(ChatServer(lambda messages: "yes", faults), text_of)[1]) == 1
