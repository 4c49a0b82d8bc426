"""A policy served over OpenAI's chat completions, and a model pushed to a stand-in of the hub."""

import asyncio
import base64
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from mage_async.assembly import trial_config_of
from mage_async.completion import Prompt, Sampling
from mage_async.config import config_file
from mage_async.environments.user_class import ResetStep
from mage_async.errors import ContextFull, RunError, TurnLost
from mage_async.inference.chat_files import load_chat
from mage_async.trajectory import Task
from mage_async.trials.trial_run import TrialStart
from mage_services.cli.chat import COMMANDS
from mage_services.cli.main import main
from mage_services.engines.chat_endpoint import ChatEndpoint, Endpoint, text_chat
from mage_services.environments.call_runner import CallRunner
from mage_services.gateway.chat_completions import (
    BadRequest,
    CalledFunction,
    ChatRequest,
    Message,
    MessageCall,
    read_request,
)
from mage_services.serving.chat_server import (
    ChatServer,
    Conversations,
    ProgramServer,
    conversation_texts,
)
from mage_services.serving.session import serve
from tests.helpers.agent_site import config_of, scripted, small_chat, tasks_of
from tests.helpers.random_models import save_text_model
from tests.helpers.recorded_runs import unpack

ROLES = ("user", "assistant", "user", "assistant", "user")
MAGE = [sys.executable, "-m", "mage_async.launch"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return unpack("finished", tmp_path_factory.mktemp("runs")).root


@pytest.fixture(scope="module")
def address(run_dir):
    command = [*MAGE, "serve", str(run_dir), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        line = server.stdout.readline()
        assert line.startswith("serving version 4 of finished at http://")
        yield line.split()[-1]
        server.terminate()
        assert server.wait(30) == 0


def post(address, body, session=""):
    headers = {"Content-Type": "application/json"} | ({"X-Session-Id": session} if session else {})
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/chat/completions", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
            return answer.status, text if body.get("stream") else json.loads(text)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def user(text):
    return {"role": "user", "content": text}


def said(reply):
    return reply["choices"][0]["message"]


def test_a_session_and_a_caller_that_keeps_all_messages_get_the_same_answers(address):
    greedy = {"temperature": 0}
    _, first = post(address, {"messages": [user("episode 1")], **greedy}, "a")
    _, second = post(address, {"messages": [user("opp rock")], **greedy}, "a")
    whole = [user("episode 1"), said(first), user("opp rock")]
    _, kept = post(address, {"messages": whole, **greedy})
    _, anew = post(address, {"messages": whole, **greedy}, "b")
    assert said(kept) == said(anew) == said(second)
    assert kept["usage"] == anew["usage"] == second["usage"]
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
    _, other = post(address, {"messages": [user("episode 1")], **greedy}, "c")
    assert other["usage"] == first["usage"]


def test_an_answer_is_streamed_as_events(address):
    status, text = post(address, {"messages": [user("episode 1")], "stream": True})
    assert status == 200
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["choices"][0]["delta"]["role"] == "assistant"
    assert all(json.loads(event)["choices"] for event in events[:-1])
    counted = {"messages": [user("episode 1")], "stream": True}
    _, text = post(address, counted | {"stream_options": {"include_usage": True}})
    last = json.loads(text.splitlines()[-4].removeprefix("data: "))
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "missing required field `messages`"),
        ({"messages": [user("a")], "n": 2}, "`n` must be 1"),
        ({"messages": [user("a")], "tools": [{}]}, "`mage push RUN_DIR --to DIR`"),
        ({"messages": [user("a")], "n": 0}, "`n` must be 1"),
        ({"messages": [user("a")], "stop": ["."]}, "`stop` does not end an answer"),
        ({"messages": [user("a")], "logprobs": True}, "`logprobs` are not sent"),
        ({"messages": [user("a")], "regex": "("}, "the pattern '(' cannot be read"),
        (
            {"messages": [user("a")], "regex": "a+"},
            "the form of the answer: the legal_pattern 'a+' ",
        ),
        (
            {"messages": [user("a")], "response_format": {"type": "json_object"}},
            "because it is one action: send a `regex` that the action matches",
        ),
        ({"messages": [user("a")], "temperature": -1}, "`temperature` must be a number from 0"),
        ({"messages": [user("a")], "max_completion_tokens": 0}, "`max_tokens` at least 1"),
        ({"messages": []}, "must end with one of the user's"),
        ({"messages": [user("rock " * 200)]}, "does not fit"),
    ],
)
def test_a_bad_request_is_answered_with_the_reason(address, body, reason):
    status, reply = post(address, body)
    assert status == 400
    assert reason in reply["error"]["message"]


def test_a_conversation_that_is_too_long_ends_one_trial_of_a_measurement_of_the_server(address):
    async def measure():
        endpoint = Endpoint(url=address, model="finished")
        async with ChatEndpoint(endpoint, print) as engine:
            tokens = np.array(text_chat().opening("rock " * 200), np.int32)
            await engine.complete(Prompt("trial", tokens, Sampling(max_tokens=1), seed=0))

    with pytest.raises(ContextFull, match="does not fit"):
        asyncio.run(measure())


def test_a_regex_restricts_an_answer_to_the_legal_actions_of_a_turn(address):
    for action in ("rock", "paper"):
        _, reply = post(address, {"messages": [user("episode 1")], "regex": action})
        assert said(reply)["content"] == f"<action> {action}</action>"
        assert reply["choices"][0]["finish_reason"] == "stop"


def test_a_regex_restricts_an_answer_to_a_whole_action_where_the_policy_writes_the_tags(tmp_path):
    chat = small_chat(tmp_path)
    engine = scripted(chat, "<action> rock</action>")
    keys = ["transcript.forced_tags=none", "transcript.max_action_tokens=32"]
    config = config_file.load(config_file.find(None), keys)
    conversations = Conversations(config, chat, engine)
    request = ChatRequest([Message("user", "a")], regex="rock|paper|scissors rock")
    reply = asyncio.run(conversations.answer(request))
    allowed = engine.completions[-1][0].restriction
    for action in ("rock", "scissors rock"):
        node, tokens = 0, chat.encode(f"<action> {action}</action>")
        for token in tokens:
            assert token in allowed.allowed(node)
            node = allowed.after(node, token)
        assert allowed.is_end(node)
        assert len(tokens) <= allowed.max_length
    assert reply.text == "<action> rock</action>"


def test_an_answer_that_the_clients_own_limit_cuts_says_so(address):
    _, reply = post(address, {"messages": [user("episode 1")], "max_tokens": 1, "temperature": 0})
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ({"regex": "rock"}, "rock"),
        ({"response_format": {"type": "regex", "pattern": "(rock|paper) rock"}}, "paper rock"),
    ],
)
def test_the_policy_of_an_agent_program_answers_without_tags(form, answer, tmp_path):
    chat = small_chat(tmp_path)
    engine = scripted(chat, answer)
    config = config_file.load(config_file.find(None), ["transcript.max_action_tokens=8"])
    conversations = Conversations(config, chat, engine, without_tags=True)
    reply = asyncio.run(conversations.answer(ChatRequest([Message("user", "a")], **form)))
    assert reply.text == answer
    allowed, node = engine.completions[-1][0].restriction, 0
    for token in chat.encode(answer):
        assert token in allowed.allowed(node)
        node = allowed.after(node, token)


QWEN3 = Path(__file__).parents[1] / "inference" / "chat_templates" / "qwen3.jinja"
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}


@pytest.mark.parametrize("session", ["", "mine"])
def test_answers_of_tools_reach_a_policy_with_tools_as_its_template_writes_them(session, tmp_path):
    save_text_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(QWEN3.read_text())
    chat = load_chat(tmp_path).offering([TOOL])
    engine = scripted(chat, "twice")
    config = config_file.load(config_file.find(None), ["transcript.max_action_tokens=32"])
    conversations = Conversations(config, chat, engine, without_tags=True)
    messages = [Message("user", "Which?")]

    async def talk():
        first = await conversations.answer(ChatRequest(messages), session)
        assert first.text == "twice"
        results = [Message("tool", "red"), Message("tool", "blue")]
        whole = [*messages, Message("assistant", first.text), *results]
        await conversations.answer(ChatRequest(results if session else whole), session)
        read = chat.decode(engine.completions[-1][0].tokens.tolist())
        assert read.partition("twice")[2].startswith(
            "<|im_end|>\n<|im_start|>user\n<tool_response>\nred\n</tool_response>\n"
            "<tool_response>\nblue\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )

    asyncio.run(talk())


def test_a_program_is_served_with_its_tools_as_in_its_trials(tmp_path):
    save_text_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(QWEN3.read_text())
    chat = load_chat(tmp_path)
    engine = scripted(chat, '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', "red")
    environment, task = tasks_of(lambda self, *given: 1.0), Task("own", "3", 7)
    trial = trial_config_of(config_of(), environment, chat, 1)
    server = ProgramServer(TrialStart(environment, task, 0, trial, chat, "serve"), engine, most=1)
    messages = [{"role": "system", "content": "Be short."}, user("Which?")]

    async def main():
        async with TestClient(TestServer(server.application)) as client:

            async def ask(messages, path="chat/completions", headers=None, **more):
                body = {"messages": messages, "max_tokens": 150, **more}
                async with client.post(f"/v1/{path}", json=body, headers=headers) as answer:
                    return answer.status, await answer.json()

            call = said((await ask(messages, tools=[TOOL], temperature=0.5))[1])
            assert call["tool_calls"][0]["function"]["name"] == "look"
            prompt, completion = engine.completions[-1]
            assert prompt.tokens.tolist() == [*chat.prompt(messages, [TOOL])]
            assert prompt.sampling.temperature == 0.5
            result = {"role": "tool", "content": "red", "tool_call_id": call["tool_calls"][0]["id"]}
            whole = [*messages, call, result]
            assert said((await ask(whole, tools=[TOOL]))[1])["content"] == "red"
            known = [*prompt.tokens, *completion.tokens]
            assert engine.completions[-1][0].tokens.tolist()[: len(known)] == known
            for number in range(5):
                assert (await ask([user(f"{number}")], "messages", model="any"))[0] == 200
                assert engine.statistics().num_contexts <= 2
            seeds = [prompt.seed for prompt, _ in engine.completions]
            assert len({*seeds}) == len(seeds), "no run repeats what an earlier one sampled"

            async def slow_body():
                yield b'{"model": "any", '
                await slow.wait()
                yield f'"max_tokens": 9, "messages": [{json.dumps(user("slow"))}]}}'.encode()

            slow = asyncio.Event()
            path, headers = "/v1/chat/completions", {"Content-Type": "application/json"}
            posts = [client.post(path, data=slow_body(), headers=headers) for _ in range(3)]
            late = asyncio.gather(*posts)
            for number in range(5, 10):
                await ask([user(f"{number}")])
            slow.set()
            assert {answer.status for answer in await late} == {200}
            for number in range(10, 14):
                await ask([user(f"{number}")])
            assert engine.statistics().num_contexts <= 2, (
                "their contexts are released as others are"
            )
            refused = [await ask(whole, headers={"X-Session-Id": "a"}), await ask(messages, seed=1)]
            assert [status for status, _ in refused] == [400, 400]

    asyncio.run(main())


def test_another_path_is_refused_in_the_form_that_clients_read(address):
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{address}/completions", b"{}", timeout=60)
    with caught.value as error:
        assert error.code == 404
        said = json.load(error)["error"]["message"]
    assert said.startswith("POST /v1/completions: this server answers POST /v1/chat/completions")


def test_the_models_are_listed(address):
    with urllib.request.urlopen(f"{address}/models", timeout=60) as answer:
        assert [each["id"] for each in json.load(answer)["data"]] == ["finished"]


def test_equal_requests_with_equal_answers_leave_one_context_open(tmp_path):
    chat = small_chat(tmp_path)
    engine = scripted(chat, " rock")
    conversations = Conversations(config_file.load(config_file.find(None), []), chat, engine)

    async def main():
        whole, say = ChatRequest([Message("user", "a")], temperature=0), conversations.answer
        answers = [await say(whole) for _ in range(10)]
        assert engine.statistics().num_contexts == 1
        together = [say(whole) for _ in range(10)]
        assert {*answers, *await asyncio.gather(*together)} == {answers[0]}
        assert engine.statistics().num_contexts == 1
        more = [Message("user", "a"), Message("assistant", answers[0].text), Message("user", "b")]
        await say(ChatRequest(more))
        assert engine.completions[-1][1].num_reused, "the context that is kept goes on"

    asyncio.run(main())


class Constant:
    """Say two words."""

    legal_pattern = "(rock|paper) (scissors|rock)"

    def reset(self, seed, task):
        return "go"

    def step(self, action):
        return "on", 0.0, False


class Listed(Constant):
    legal_pattern = None
    legal_actions = ("rock", "paper scissors")


class Changing(Constant):
    def step(self, action):
        self.legal_pattern = None
        return "on", 0.0, False


class ChangingByName(Listed):
    def step(self, action):
        setattr(self, "legal_actions", ("rock",))  # noqa: B010
        return "on", 0.0, False


class Property(Listed):
    legal_actions = property(lambda self: ["rock"])


@pytest.mark.parametrize(
    ("kind", "actions"),
    [
        (Constant, "(rock|paper) (scissors|rock)"),
        (Listed, ("rock", "paper scissors")),
        (Changing, None),
        (ChangingByName, None),
        (Property, None),
    ],
)
def test_an_answer_without_a_limit_is_a_legal_action_where_these_never_change(
    kind, actions, tmp_path
):
    assert ResetStep(kind, {}).actions_of_every_turn == actions
    chat = small_chat(tmp_path)
    engine = scripted(chat, " rock")
    # An action may have more tokens than the tiny model's default for an action, which is one.
    config = config_file.load(config_file.find(None), [])
    conversations = Conversations(config, chat, engine, actions=actions)

    async def asked(**limits):
        await conversations.answer(ChatRequest([Message("user", "a")], **limits))
        return engine.completions[-1][0].restriction

    if actions is None:
        assert asyncio.run(asked()) is None
        return
    allowed, node = asyncio.run(asked()), 0
    for token in chat.encode(" paper scissors</action>"):
        assert token in allowed.allowed(node)
        node = allowed.after(node, token)
    assert allowed.is_end(node)
    assert asyncio.run(asked(max_tokens=4)) is None


def test_a_session_whose_messages_were_edited_begins_anew(tmp_path):
    chat = small_chat(tmp_path)
    engine = scripted(chat, " rock")
    conversations = Conversations(config_file.load(config_file.find(None), []), chat, engine)

    async def main():
        async def say(*texts):
            messages = [Message(role, text) for role, text in zip(ROLES, texts, strict=False)]
            return await conversations.answer(ChatRequest(messages), "s")

        first = await say("a")
        second = await say("a", first.text, "b")
        edited = await say("c", first.text, "b")
        assert edited.num_prompt_tokens == second.num_prompt_tokens
        assert engine.statistics().num_contexts == 1
        longer = await say("c", first.text, "b", edited.text, "d")
        alone = await say("e")
        assert second.num_prompt_tokens < longer.num_prompt_tokens < alone.num_prompt_tokens

    asyncio.run(main())


def test_a_first_request_that_the_engine_loses_leaves_no_context_open(tmp_path):
    chat = small_chat(tmp_path)
    engine = scripted(chat, " rock")
    complete = engine.complete
    conversations = Conversations(config_file.load(config_file.find(None), []), chat, engine)

    async def lose(prompt):
        await complete(prompt)
        raise TurnLost("SGLang died while this turn was sampled")

    async def main():
        server = TestServer(ChatServer(conversations, "policy").application)
        async with TestClient(server) as client:
            for session in ("", "a"):
                answer = await client.post(
                    "/v1/chat/completions",
                    json={"messages": [user("a")]},
                    headers={"X-Session-Id": session},
                )
                assert answer.status == 503
                assert "SGLang died" in (await answer.json())["error"]["message"]
        assert engine.statistics().num_contexts == 0

    engine.complete = lose
    asyncio.run(main())


def test_a_session_may_have_any_name_but_answers_one_request_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("mage_services.serving.chat_server.MAX_REQUEST_BYTES", 1000)
    chat = small_chat(tmp_path)
    engine = scripted(chat, " rock")
    conversations = Conversations(config_file.load(config_file.find(None), []), chat, engine)

    async def main():
        request, say = ChatRequest([Message("user", "a")]), conversations.answer
        names = ("", "", "c0", "c1", "c2", "c2")
        *answers, refused = await asyncio.gather(
            *(say(request, name) for name in names), return_exceptions=True
        )
        assert [each.finish for each in answers] == ["stop"] * 5
        assert str(refused) == "session 'c2' still waits for an answer"
        async with TestClient(TestServer(ChatServer(conversations, "a").application)) as client:

            async def status(text):
                body, name = {"messages": [user(text)]}, {"X-Session-Id": "c2"}
                async with client.post("/v1/chat/completions", json=body, headers=name) as reply:
                    return reply.status, "error" in await reply.json()

            both = await asyncio.gather(status("b"), status("b"))
            assert sorted(both) == [(200, False), (409, True)]
            assert await status("a" * 1000) == (413, True)

    asyncio.run(main())


@pytest.mark.parametrize("temperature", [float("nan"), float("inf")])
def test_a_temperature_that_is_no_finite_number_does_not_reach_the_engine(tmp_path, temperature):
    chat = small_chat(tmp_path)
    engine = scripted(chat, " rock")
    conversations = Conversations(config_file.load(config_file.find(None), []), chat, engine)
    request = ChatRequest([Message("user", "a")], temperature=temperature)
    with pytest.raises(
        BadRequest, match=f"`temperature` must be a number from 0, .* {temperature}"
    ):
        asyncio.run(conversations.answer(request))
    assert not engine.completions


def test_messages_of_one_side_are_joined_and_the_system_speaks_first():
    messages = [Message("system", "s"), Message("user", "u"), Message("assistant", "a")]
    later = [Message("user", "v"), Message("user", "w")]
    assert conversation_texts([*messages, *later]) == ("s\n\nu", "a", "v\n\nw")
    with pytest.raises(BadRequest, match="begin"):
        conversation_texts(messages[2:])
    parts = b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}'
    with pytest.raises(BadRequest, match="type 'text'"):
        conversation_texts(read_request(parts).messages)


def test_results_of_parallel_calls_come_in_the_order_of_the_calls():
    calls = [MessageCall(CalledFunction("look"), f"call {n}") for n in range(3)]
    begin = [Message("user", "u"), Message("assistant", "a", calls)]
    results = [Message("tool", f"r{n}", tool_call_id=f"call {n}") for n in (2, 0, 1)]
    ordered = ("r0", "r1", "r2")
    assert conversation_texts([*begin, *results], has_tools=True) == ("u", "a", ordered)
    assert conversation_texts([*begin, *results]) == ("u", "a", "\n\n".join(ordered))
    alone = [begin[0], Message("assistant", None, calls[:1]), results[1]]
    written = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    assert conversation_texts(alone, has_tools=True) == ("u", written, ("r0",))
    # In a session the calls are in an earlier request; the server has written them without ids.
    assert conversation_texts(results, has_tools=True) == (("r2", "r0", "r1"),)


def test_the_terminal_talks_with_the_policy(run_dir, monkeypatch, capsys):
    lines = "episode 1\nopp rock\n/reset\n/hlep\n/help\nepisode 1\n/quit\nepisode 1\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["chat", str(run_dir), "--temperature", "0"]) == 0
    said = capsys.readouterr().out
    answers = [line for line in said.replace("> <", "<").splitlines() if "<action>" in line]
    assert len(answers) == 3
    assert answers[2].endswith(answers[0])
    assert f"there is no command '/hlep': {COMMANDS}\n> {COMMANDS}\n" in said


class Hub(BaseHTTPRequestHandler):
    """Answers what an upload of small files asks of the hub."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != "Bearer hf_right":
            return self._answer({"error": "Invalid credentials"}, 401)
        if self.path == "/api/repos/create":
            return self._answer({"url": f"http://{self.headers['Host']}/me/scout"})
        if self.path == "/api/validate-yaml":
            return self._answer({"warnings": [], "errors": []})
        if self.path.endswith("/preupload/main"):
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": each["path"], **modes} for each in json.loads(body)["files"]]
            return self._answer({"files": files})
        self.server.commit = [json.loads(line) for line in body.splitlines()]
        address = f"http://{self.headers['Host']}/me/scout/commit/1"
        return self._answer({"commitUrl": address, "commitOid": "1", "success": True})

    def do_GET(self):
        self._answer({"id": "me/scout", "sha": "0", "siblings": []})

    def _answer(self, document, status=200):
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def push(run_dir, hub, token, home):
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": token}
    environment |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [*MAGE, "push", str(run_dir), "me/scout", "--license", "mit"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_a_model_is_pushed_with_a_card_made_from_the_run(run_dir, hub, tmp_path):
    done = push(run_dir, hub, "hf_right", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("/me/scout/commit/1")
    files = {each["value"]["path"]: each["value"] for each in hub.commit if each["key"] == "file"}
    assert {"README.md", "config.toml", "summary.json", "config.json", "tokenizer.json"} <= {*files}
    assert not {"optimizer.pt", "counters.json"} & {*files}
    text = base64.b64decode(files["README.md"]["content"]).decode()
    assert "license: mit" in text
    assert "| held-out" in text
    assert "blind" in text
    assert "±" in text


def test_a_refused_push_says_why_in_one_line(run_dir, hub, tmp_path):
    done = push(run_dir, hub, "hf_wrong", tmp_path)
    assert done.returncode == 2
    assert "mage push: the hub refused 'me/scout': " in done.stderr.splitlines()[-1]


def test_a_port_in_use_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = f"127.0.0.1:{port} is in use; choose another with --port, or 0 for a free one"
        with pytest.raises(RunError, match=f"^{re.escape(sentence)}$"):
            asyncio.run(serve(web.Application(), "127.0.0.1", port, CallRunner(), pytest.fail))
