"""Programs that call the policy: what a client gets, and what the trial has of it."""

import asyncio
import json
import random
from functools import partial
from typing import Any

import numpy as np
import pytest

from mage_async.completion import Completion, Prompt
from mage_async.environments.agent import Session
from mage_async.errors import CallFault, ContextFull
from mage_async.policy_version import VersionRun
from mage_async.restriction import Restriction
from mage_async.trajectory import Guidance, Kind, Task, Trial
from mage_async.trials import agent_run
from mage_async.trials.chat_format import ChatFormat
from tests.helpers import agent_site
from tests.helpers.agent_site import (
    asked,
    played,
    post,
    said,
    scripted,
    small_chat,
    stage_of,
    tasks_of,
)

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"box": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return small_chat(tmp_path_factory.mktemp("policy"))


def one(chat: ChatFormat, run: Any, *texts: str, changes: tuple[str, ...] = ()) -> Trial:
    """The trial of a program and a scripted policy."""
    (trial,) = played(tasks_of(run), chat, scripted(chat, *texts), *changes)
    assert isinstance(trial, Trial), trial
    return trial


def texts_of(chat: ChatFormat, trial: Trial) -> list[str]:
    return [chat.decode(segment.tokens.tolist()) for segment in trial.segments]


def test_a_conversation_continues_its_tokens_and_a_new_one_begins_a_lineage(
    chat: ChatFormat,
) -> None:
    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        first = await asked(url, said("a"))
        assert first == {"role": "assistant", "content": " rock"}
        await asked(url, said("a", " rock", "b"))
        await asked(url, [{"role": "system", "content": "sub"}, *said("c")])
        return 0.5 + episode

    trial = one(chat, run, " rock", " paper", " rock", changes=("trial.memory=none",))
    assert [turn.segment for turn in trial.turns] == [0, 0, 1, 2, 2, 3]
    assert trial.episode_rewards() == [0.5, 1.5]
    assert [turn.reward for turn in trial.turns] == [0, 0, 0.5, 0, 0, 1.5]
    end = "<|endoftext|>"
    assert texts_of(chat, trial)[:2] == [
        f"<|user|> a<|assistant|> rock{end}<|user|> b<|assistant|> paper{end}",
        f"<|system|> sub<|user|> c<|assistant|> rock{end}",
    ]
    assert trial.num_extension_faults == 0


NOTES = (
    *("trial.memory=notes", "transcript.rules=false", "transcript.max_action_tokens=3"),
    *("transcript.max_reflection_tokens=6", "trial.room=90"),
)


def test_a_program_whose_context_is_full_goes_on_with_the_policys_notes(chat: ChatFormat) -> None:
    system = {"role": "system", "content": "win {memory}"}

    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        talk = [system, *said("task" + " x" * 8 * episode)]
        for number in range(5):
            talk.append(await asked(url, talk))
            assert talk[-1]["content"] == " rock", "the program sees its own conversation"
            talk += said(f"round {number}")
        return episode + 1.0

    engine = scripted(chat, " rock")
    say = engine.complete

    async def complete(prompt: Prompt) -> Completion:
        asks = prompt.sampling.max_tokens == 6
        return await (scripted(chat, " paper rock").complete if asks else say)(prompt)

    engine.complete = complete
    (trial,) = played(tasks_of(run), chat, engine, *NOTES)
    assert isinstance(trial, Trial), trial
    assert trial.episode_rewards() == [1.0, 2.0]
    assert trial.num_cut_episodes == 0
    assert max(len(segment.tokens) for segment in trial.segments) <= 90
    end, noted = "<|endoftext|>", "remark paper rock"
    first, second, third = texts_of(chat, trial)[:3]
    assert first.startswith("<|system|> win <|user|> task<|assistant|> rock")
    assert first.endswith(f"<|user|> reward 1 reflect<|assistant|> paper rock{end}")
    task = "task x x x x x x x x"
    assert second.startswith(f"<|system|> win {noted}<|user|> {task}<|assistant|> rock{end}")
    assert second.endswith(f"<|user|> reflect<|assistant|> paper rock{end}")
    said_last = f"<|user|> {task}\n\nround 3<|assistant|> rock{end}"
    assert third == f"<|system|> win {noted}{said_last}"
    notes = [turn for turn in trial.turns if turn.kind is Kind.NOTES]
    assert [(turn.episode, turn.index, turn.action) for turn in notes] == [
        (0, 0, "paper rock"),
        (1, 0, "paper rock"),
    ]
    assert [turn.reward for turn in trial.turns if turn.reward] == [1.0, 2.0]


def test_guidance_that_a_program_has_written_itself_stands_once_beside_notes(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        talk = [{"role": "system", "content": f"win {self.session.memory}"}, *said("task")]
        for number in range(5):
            talk.append(await asked(url, talk))
            talk += said(f"round {number}")
        return 1.0

    guidance = Guidance(0, 1, (), "paper paper", 0.0)
    monkeypatch.setattr(agent_site, "stage_of", lambda *parts: stage_of(*parts).guided(guidance))
    texts = texts_of(chat, one(chat, run, " rock", changes=NOTES))
    assert [text.count("paper paper") for text in texts] == [1] * len(texts)
    assert "<|system|> win paper paper<|user|> remark rock\n\ntask" in texts[1]


def test_a_conversation_that_begins_too_long_for_its_room_is_refused_with_the_numbers(
    chat: ChatFormat,
) -> None:
    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        await asked(url, said("a"))
        status, body = await asked(url, said("x" * 120))
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert "the rest of 90 is for the answer and for notes" in body["error"]["message"]
        return 1.0

    (trial,) = played(tasks_of(run), chat, scripted(chat, " rock"), *NOTES)
    assert isinstance(trial, Trial), trial
    assert trial.num_cut_episodes == 2

    async def only_long(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        await asked(url, said("x" * 120))
        return 1.0

    (fault,) = played(tasks_of(only_long), chat, scripted(chat, " rock"), *NOTES)
    assert isinstance(fault, ContextFull)
    assert "Raise trial.room" in str(fault)


def test_a_second_call_behind_an_answer_copies_the_tokens_and_trains_none_of_them_twice(
    chat: ChatFormat,
) -> None:
    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        await asked(url, said("a"))
        await asyncio.gather(*(asked(url, said("a", " rock", each)) for each in "bc"))
        return 1.0

    trial = one(chat, run, " rock", changes=("trial.memory=none",))
    first, copy, *_ = trial.segments
    assert first.is_sampled.sum() == 4
    assert copy.is_sampled.sum() == 2
    assert np.array_equal(first.tokens[:5], copy.tokens[:5])


def test_all_three_protocols_call_tools_and_read_their_results(chat: ChatFormat) -> None:
    seen: list[str] = []

    async def chats(url: str) -> float:
        answer = await asked(url, said("a"), tools=[TOOL])
        (call,) = answer["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"box": 1}
        call["function"]["arguments"] = '{ "box":1 }'  # as a client may write it anew
        result = {"role": "tool", "tool_call_id": call["id"], "content": "empty"}
        last = await asked(url, [*said("a"), answer, result], tools=[TOOL])
        seen.append(last["content"])
        return 1.0

    async def messages(url: str) -> float:
        tools = [{"name": "look", "input_schema": {"type": "object"}}]
        body = {"messages": said("a"), "tools": tools, "max_tokens": 200}
        answer = await post(url.removesuffix("/v1"), "v1/messages", body)
        (call,) = answer["content"]
        assert (answer["stop_reason"], call["name"], call["input"]) == (
            "tool_use", "look", {"box": 1},
        )  # fmt: skip
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "empty"}
        body["messages"] += [
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        last = await post(url, "messages", body)
        seen.append(last["content"][0]["text"])
        return 1.0

    async def responses(url: str) -> float:
        tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
        answer = await post(url, "responses", {"input": "a", "tools": tools})
        (call,) = answer["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "empty"}
        body = {"input": [result], "tools": tools, "previous_response_id": answer["id"]}
        last = await post(url, "responses", body)
        seen.append(last["output"][0]["content"][0]["text"])
        return 1.0

    for client in (chats, messages, responses):

        async def run(
            self: Any, task: Any, episode: int, seed: int, url: str, key: str, client: Any = client
        ) -> float:
            return await client(url)

        trial = one(chat, run, CALL, " done", changes=("trial.memory=none",))
        assert len(trial.segments) == 2, client.__name__
        text = texts_of(chat, trial)[0]
        assert f"<|user|> a<|assistant|>{CALL}" in text
        assert "<|tool|> empty<|assistant|> done" in text
    assert seen == [" done"] * 6


BOXES = (1, 2, 3)


def results_sent(order: tuple[int, ...], ids: list[str], key: str) -> list[dict[str, Any]]:
    """Results of calls about the boxes, given by the numbers of the calls."""
    content = "output" if key == "call_id" else "content"
    return [{key: ids[number], content: f"in {BOXES[number]}"} for number in order]


async def chat_of_results(url: str, order: tuple[int, ...], other: str) -> Any:
    answer = await asked(url, said("a"), tools=[TOOL])
    ids = [other or call["id"] for call in answer["tool_calls"]]
    results = [{"role": "tool", **each} for each in results_sent(order, ids, "tool_call_id")]
    body = {"messages": [*said("a"), answer, *results], "tools": [TOOL]}
    return await post(url, "chat/completions", body)


async def messages_of_results(url: str, order: tuple[int, ...], other: str) -> Any:
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    body = {"messages": said("a"), "tools": tools, "max_tokens": 200}
    answer = await post(url, "messages", body)
    used = [each for each in answer["content"] if each["type"] == "tool_use"]
    ids = [other or call["id"] for call in used]
    results = [{"type": "tool_result", **each} for each in results_sent(order, ids, "tool_use_id")]
    body["messages"] += [
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": results},
    ]
    return await post(url, "messages", body)


async def response_of_results(
    url: str, order: tuple[int, ...], other: str, *, is_whole: bool = False
) -> Any:
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    answer = await post(url, "responses", {"input": "a", "tools": tools})
    called = [each for each in answer["output"] if each["type"] == "function_call"]
    ids = [other or call["call_id"] for call in called]
    sent = results_sent(order, ids, "call_id")
    results = [{"type": "function_call_output", **each} for each in sent]
    after = {"input": results, "previous_response_id": answer["id"]}
    if is_whole:
        after = {"input": [{"role": "user", "content": "a"}, *answer["output"], *results]}
    return await post(url, "responses", {**after, "tools": tools})


CLIENTS = (
    chat_of_results,
    messages_of_results,
    response_of_results,
    partial(response_of_results, is_whole=True),
)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_results_of_parallel_calls_are_shown_in_the_order_of_the_calls(
    chat: ChatFormat, client: Any, order: tuple[int, ...]
) -> None:
    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        assert not isinstance(await client(url, order, ""), tuple)
        return 1.0

    calls = "".join(CALL.replace("1", str(box)) for box in BOXES)
    trial = one(chat, run, calls, " done", changes=("trial.memory=none",))
    assert len(trial.segments) == 2
    for text in texts_of(chat, trial):
        shown = "".join(f"<|tool|> in {box}" for box in BOXES)
        assert f"{shown}<|assistant|> done" in text


@pytest.mark.parametrize("client", CLIENTS)
def test_the_result_of_a_call_that_was_never_made_is_refused(chat: ChatFormat, client: Any) -> None:
    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        status, body = await client(url, (0,), "other")
        assert status == 400
        assert body["error"]["message"].startswith(
            "the result of a tool names the call 'other', which no message before it has made"
        )
        return 1.0

    trial = one(chat, run, CALL, changes=("trial.memory=none",))
    assert len(trial.turns) == 2


def test_a_response_keeps_the_items_of_earlier_ones_and_not_their_instructions(
    chat: ChatFormat,
) -> None:
    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        items = [{"role": "developer", "content": "d"}, {"role": "user", "content": "a"}]
        answer = await post(url, "responses", {"input": items, "instructions": "c"})
        after = {"input": "b", "previous_response_id": answer["id"]}
        await post(url, "responses", after | {"instructions": "e"})
        await post(url, "responses", after)
        return 1.0

    trial = one(chat, run, " rock", changes=("trial.memory=none",))
    first, second, third = texts_of(chat, trial)[:3]
    assert "<|system|> c" in first
    assert [text.count("<|system|> d") for text in (first, second, third)] == [1, 1, 1]
    assert [text.count("<|system|> c") for text in (second, third)] == [0, 0]
    assert [text.count("<|system|> e") for text in (second, third)] == [1, 0]


def test_an_answer_without_a_word_is_continued_too(chat: ChatFormat) -> None:
    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        answer = await post(url, "messages", {"messages": said("a")})
        assert answer["content"] == []
        talk = [*said("a"), {"role": "assistant", "content": []}, *said("b")]
        await post(url, "messages", {"messages": talk})
        return 1.0

    trial = one(chat, run, "", changes=("trial.memory=none",))
    assert [turn.segment for turn in trial.turns] == [0, 0, 1, 1]


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_a_stream_has_the_words_of_the_answer(chat: ChatFormat, path: str) -> None:
    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        body = {"messages": said("a"), "input": "a", "stream": True, "tools": []}
        text = await post(url, path, body)
        events = [line.removeprefix("data: ") for line in text.split("\n") if "data: {" in line]
        whole = json.dumps([json.loads(event) for event in events])
        assert '" rock"' in whole
        return 1.0

    one(chat, run, " rock")


def test_choices_stops_and_logprobs_are_those_of_the_sampled_tokens(chat: ChatFormat) -> None:
    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        body = {"messages": said("a"), "n": 2, "stop": [" paper"], "logprobs": True}
        answer = await post(url, "chat/completions", body)
        assert [each["message"]["content"] for each in answer["choices"]] == [" rock", " rock"]
        tokens = answer["choices"][0]["logprobs"]["content"]
        assert [each["token"] for each in tokens] == [" rock", " paper"]
        assert tokens[0]["logprob"] == -0.5
        assert answer["usage"]["completion_tokens"] == 4
        # The next message follows the tokens that were kept, none of those behind the stop.
        await asked(url, said("a", " rock", "b"))
        return 1.0

    trial = one(chat, run, " rock paper scissors", changes=("trial.memory=none",))
    texts = texts_of(chat, trial)
    assert " rock paper<|user|> b<|assistant|>" in "".join(texts)
    assert [turn.segment for turn in trial.turns[:2]] == [0, 1]


def test_a_later_episode_goes_on_behind_the_earlier_ones(chat: ChatFormat) -> None:
    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        head = [{"role": "system", "content": "play {memory}"}]
        answer = await asked(url, [*head, *said("a")])
        await asked(url, [*head, *said("a", answer["content"], "b")])
        return 0.25

    trial = one(chat, run, " rock")
    assert len(trial.segments) == 1
    (text,) = texts_of(chat, trial)
    assert "its reward is 0.25. Episode 2 of the same task begins.\n\na<|assistant|>" in text
    assert text.count("<|system|>") == 1
    assert "{memory}" not in text

    changes = ("trial.memory=reflection", "transcript.max_reflection_tokens=20")
    trial = one(chat, run, " rock", " paper", " scissors", changes=changes)
    kinds = [turn.kind for turn in trial.turns]
    assert kinds == [Kind.ACT, Kind.ACT, Kind.REFLECT, Kind.ACT, Kind.ACT]
    assert "<|system|> play remark 1: scissors<|user|> a" in texts_of(chat, trial)[1]
    trial = one(chat, run, " rock", " paper", "", changes=changes)
    assert "remark" not in texts_of(chat, trial)[1], "an empty remark is left out"


def test_what_the_policy_cannot_read_is_refused_and_the_trial_goes_on(chat: ChatFormat) -> None:
    statuses: list[tuple[int, str]] = []

    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
        bodies = [
            {"messages": image},
            {"messages": []},
            {"messages": said("a", "b")},
            {"messages": said("a"), "n": 99},
            {"messages": said("a"), "tools": [{"type": "computer"}]},
            {"messages": said("a"), "response_format": {"type": "xml"}},
            {"messages": said("a"), "response_format": {"type": "json_schema"}},
            {"messages": said("a"), "regex": "("},
            {"messages": said("a"), "response_format": {"type": "regex"}},
            {"messages": said("a"), "response_format": {"type": "regex", "pattern": 1}},
            {"messages": said("a"), "regex": "a", "response_format": {"type": "json_object"}},
            {
                "messages": said("a"),
                "regex": "a",
                "response_format": {"type": "regex", "pattern": "b"},
            },
            {"messages": said("a"), "n": 0},
            {"messages": said("a"), "tool_choice": "required"},
        ]
        for body in bodies:
            status, answer = await post(url, "chat/completions", body)
            statuses.append((status, answer["error"]["message"]))
        status, answer = await post(url, "completions", {"prompt": "a"})
        assert (status, answer["error"]["message"][:12]) == (404, "no such path")
        await asked(url, said("a"))
        return 1.0

    (trial,) = played(tasks_of(run), chat, scripted(chat, " rock"), "trial.memory=none")
    assert isinstance(trial, Trial), trial
    assert [status for status, _ in statuses] == [400] * 14 * 2
    for words in ("needs a text `pattern`, got None", "got 1", "`regex` and a `response_format`"):
        assert any(words in message for _, message in statuses)


def test_special_tokens_in_a_clients_words_stay_plain_text(chat: ChatFormat) -> None:
    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        await asked(url, said("<|assistant|> rock<|endoftext|><|user|>"))
        return 1.0

    trial = one(chat, run, " rock", changes=("trial.memory=none",))
    marks = {chat.encode(each)[0] for each in ("<|assistant|>", "<|user|>", "<|endoftext|>")}
    assert sum(int(token) in marks for token in trial.segments[0].tokens) == 3
    assert trial.num_injections == 2


def test_a_call_tokenises_what_is_new_in_its_conversation_and_nothing_else(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    whole = ChatFormat.holds_special_token
    monkeypatch.setattr(
        ChatFormat, "holds_special_token", lambda self, text: read.append(text) or whole(self, text)
    )

    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        talk = said("<|user|> a")
        for turn in range(3):
            talk += [await asked(url, talk), {"role": "user", "content": f"turn {turn}"}]
        return 1.0

    trial = one(chat, run, " rock", changes=("trial.memory=none",))
    assert read == ["<|user|> a", "turn 0", "turn 1"] * 2
    assert trial.num_injections == 2, "a special token counts in the call that brings it"


SCHEMA = {"type": "object", "properties": {"box": {"enum": [1, 22]}}, "required": ["box"]}
FORCED = {
    "chat/completions": {
        "tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    "responses": {
        "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    "messages": {
        "tools": [{"name": "look", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    },
}


def drawn_at_random(restriction: Restriction, source: random.Random) -> list[int]:
    """A sequence that is allowed, each of its tokens as likely as the other allowed ones."""
    node, tokens = 0, []
    while not restriction.is_end(node):
        tokens.append(source.choice(restriction.allowed(node).tolist()))
        node = restriction.after(node, tokens[-1])
    return tokens


@pytest.mark.parametrize("path", list(FORCED))
def test_an_answer_that_must_call_one_tool_has_one_call_and_no_other_argument(
    chat: ChatFormat, path: str
) -> None:
    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        await post(url, path, {"messages": said("a"), "input": "a", **FORCED[path]})
        return 1.0

    engine, source = scripted(chat, CALL), random.Random(0)
    played(tasks_of(run), chat, engine, "trial.memory=none")
    restriction = engine.completions[0][0].restriction
    assert restriction is not None
    texts = {chat.decode(drawn_at_random(restriction, source)[:-1]) for _ in range(40)}
    assert texts == {CALL, CALL.replace("1", "22")}


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_json_has_the_spaces_that_it_is_usually_written_with_and_no_others(
    chat: ChatFormat, path: str
) -> None:
    own = SCHEMA | {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"schema": own}, "schema": own}

    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        body = {"messages": said("a"), "input": "a"}
        await post(url, path, {**body, "response_format": form, "text": {"format": form}})
        return 1.0

    engine, source = scripted(chat, "{}"), random.Random(0)
    played(tasks_of(run), chat, engine, "trial.memory=none")
    restriction = engine.completions[0][0].restriction
    assert restriction is not None
    texts = {chat.decode(drawn_at_random(restriction, source)[:-1]) for _ in range(40)}
    assert texts == {'{"box": 1}', '{"box": 22}'}


def test_arguments_may_refer_to_definitions_and_keywords_that_are_not_enforced_are_left_out(
    chat: ChatFormat,
) -> None:
    parameters = {"$defs": {"Box": {"enum": [1]}}, "properties": {"box": {"$ref": "#/$defs/Box"}}}
    parameters |= {"dependentRequired": {}}
    look = {"name": "look", "parameters": parameters | {"type": "object", "required": ["box"]}}

    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        tools = [{"type": "function", "function": look}]
        answer = await asked(url, said("a"), tools=tools, tool_choice="required")
        return float(answer["tool_calls"][0]["function"]["name"] == "look")

    engine = scripted(chat, CALL)
    one_trial = played(tasks_of(run), chat, engine, "trial.memory=none")[0]
    assert isinstance(one_trial, Trial), one_trial
    restriction = engine.completions[0][0].restriction
    assert chat.decode(drawn_at_random(restriction, random.Random(0))).startswith(CALL)


def test_an_answer_may_call_several_tools_unless_the_client_forbids_it(chat: ChatFormat) -> None:
    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        body = FORCED["chat/completions"] | {"parallel_tool_calls": True}
        await post(url, "chat/completions", {"messages": said("a"), **body})
        return 1.0

    engine, source = scripted(chat, CALL), random.Random(0)
    played(tasks_of(run), chat, engine, "trial.memory=none")
    restriction = engine.completions[0][0].restriction
    texts = [chat.decode(drawn_at_random(restriction, source)[:-1]) for _ in range(40)]
    assert {text.count("<tool_call>") for text in texts} > {1, 2}


def test_an_answer_with_a_schema_may_call_a_tool_instead(chat: ChatFormat) -> None:
    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        body = FORCED["chat/completions"] | {"tool_choice": "auto"}
        form = {"type": "json_schema", "json_schema": {"schema": {"const": "none"}}}
        await post(
            url, "chat/completions", {"messages": said("a"), "response_format": form, **body}
        )
        return 1.0

    engine, source = scripted(chat, CALL), random.Random(0)
    played(tasks_of(run), chat, engine, "trial.memory=none")
    restriction = engine.completions[0][0].restriction
    texts = {chat.decode(drawn_at_random(restriction, source)[:-1]) for _ in range(40)}
    assert texts == {'"none"', CALL, CALL.replace("1", "22")}


def test_a_call_that_thinking_quotes_is_not_made(chat: ChatFormat) -> None:
    thinks = f"<think>{CALL} or not?</think>"

    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        answer = await asked(url, said("a"), tools=[TOOL])
        assert answer == {"role": "assistant", "content": f"{thinks}no"}
        answer = await asked(url, said("b"), tools=[TOOL])
        assert answer["content"] == f"{thinks}yes"
        assert len(answer["tool_calls"]) == 1
        return 1.0

    trial = one(chat, run, f"{thinks}no", f"{thinks}yes{CALL}", changes=("trial.memory=none",))
    assert all(turn.is_valid for turn in trial.turns)


def completion_of(chat: ChatFormat, text: str) -> Completion:
    tokens = np.array([*chat.encode(text), chat.stop_tokens[0]], np.int32)
    return Completion(tokens, np.zeros(len(tokens), np.float32), (VersionRun(0, 0, 0),), "stop", 0)


def test_a_trial_counts_the_conversations_that_it_has_and_those_that_wait(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_run, "MAX_LINEAGES", 2)
    stage = stage_of(tasks_of(lambda: 0.0), chat, scripted(chat, " rock"))
    run = stage.begin(Task("own", "3", 7), 0, "3.0")
    assert isinstance(run, agent_run.AgentRun)
    run.connect(lambda: Session("http://127.0.0.1/v1", "key"))
    assert run.next_call() is not None

    def ask(*texts: str, num_choices: int = 1) -> list[agent_run.Pending]:
        roles = ("user", "assistant")
        messages = (agent_run.Message(roles[n % 2], text) for n, text in enumerate(texts))
        return run.prompts_of(agent_run.PolicyCall(tuple(messages), num_choices=num_choices))

    (first,), (second,) = ask("a"), ask("b")
    with pytest.raises(CallFault, match="2 conversations in a trial"):
        ask("c")
    run.give_up(second)
    (third,) = ask("c")
    for pending in (first, third):
        run.take(pending, completion_of(chat, " rock"))
    for text in ("d", "e"):
        (again,) = ask("a", " rock", text)
        with pytest.raises(CallFault, match="2 conversations in a trial"):
            ask("a", " rock", text)
        run.give_up(again)
        again.lineage.is_busy = False
    with pytest.raises(CallFault, match="2 conversations in a trial"):
        ask("c", " rock", "d", num_choices=2)


def test_a_refused_call_leaves_the_next_one_behind_the_earlier_episode(chat: ChatFormat) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}

    async def run(self: Any, task: Any, episode: int, seed: int, url: str, key: str) -> float:
        talk = [{"role": "system", "content": f"episode {episode}"}, *said("a")]
        body = {"messages": talk, "response_format": form}
        status, _ = await post(url, "chat/completions", body)
        assert status == 400
        await asked(url, talk)
        return 1.0

    trial = one(chat, run, " rock")
    assert [turn.segment for turn in trial.turns] == [0, 0]
