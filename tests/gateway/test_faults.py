"""Programs that go wrong: each costs its own trial, with a reason, soon."""

import asyncio
import json
import math
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import pytest

from mage_async.errors import CallFault, ContextFull
from mage_async.results.progress import drop_kind
from mage_async.trajectory import Trial
from mage_async.trials.chat_format import ChatFormat
from mage_services.gateway import gateway
from tests.helpers.agent_site import asked, played, post, said, scripted, small_chat, tasks_of
from tests.helpers.faulty_programs import DEADLINE_S, FAULTS, KEYS

SOON_S = 10.0


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return small_chat(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize(("program", "why"), FAULTS.values(), ids=FAULTS)
def test_a_program_that_goes_wrong_costs_its_trial_alone(
    chat: ChatFormat, program: Any, why: str
) -> None:
    KEYS.clear()

    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        KEYS[task] = url, key
        if task == 3:
            return await program(task, url, key)
        await asked(url, said("a"))
        await asyncio.sleep(0.5)
        await asked(url, said("a", " rock", "b"), stop=[" paper"])
        return 1.0

    began = time.monotonic()
    engine = scripted(chat, " rock")
    bad, good = played(tasks_of(run), chat, engine, tasks=("3", "4"), deadline_s=DEADLINE_S)
    assert time.monotonic() - began < SOON_S
    assert isinstance(bad, CallFault)
    assert why in str(bad)
    assert "task 3" in str(bad)
    assert isinstance(good, Trial)
    assert good.episode_rewards() == [1.0, 1.0]
    assert len(good.turns) == 4
    assert engine.statistics().num_contexts == 0


ROUNDED = 1.0000001192092896
"""The sum of ten times 0.1 in float32."""


@pytest.mark.parametrize("reward", [-0.5, 1e15])
def test_a_reward_outside_the_bounds_that_a_program_declares_is_a_fault(
    chat: ChatFormat, reward: float
) -> None:
    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        await asked(url, said("a"))
        return reward if task == 3 else episode * ROUNDED

    environment = tasks_of(run, min_return=0.0, max_return=1.0)
    bad, good = played(environment, chat, scripted(chat, " rock"), tasks=("3", "4"))
    assert isinstance(bad, CallFault)
    wanted = "must return a reward from min_return = 0 to max_return = 1, got"
    assert f"{wanted} {reward:g}" in str(bad)
    assert isinstance(good, Trial)
    assert good.episode_rewards() == [0.0, ROUNDED]


def test_a_request_that_is_too_large_is_refused_as_clients_read_it(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "MAX_REQUEST_BYTES", 1000)
    refused: list[Any] = []

    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        refused.append(await post(url, "chat/completions", {"messages": said("a" * 1000)}))
        await asked(url, said("a"))
        return 1.0

    played(tasks_of(run), chat, scripted(chat, " rock"))
    status, answer = refused[0]
    assert (status, answer["error"]["type"]) == (413, "invalid_request_error")


def test_a_program_that_sends_what_is_refused_twice_is_not_tried_again(chat: ChatFormat) -> None:
    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        status, _ = await post(url, "chat/completions", {"messages": said("a"), "stop": 5})
        raise RuntimeError(status)  # as clients do, whose exceptions are classes of their own

    (fault,) = played(tasks_of(run), chat, scripted(chat, " rock"), retries=8)
    assert "after 2 tries: " in str(fault)
    assert "its latest call of the policy was refused with status 400" in str(fault)


def test_a_program_that_calls_nothing_twice_is_not_tried_again(chat: ChatFormat) -> None:
    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        return 1.0

    (fault,) = played(tasks_of(run), chat, scripted(chat, " rock"), retries=8)
    assert "after 2 tries: " in str(fault)
    assert "returned without a call of the policy" in str(fault)


def test_a_program_that_returns_an_object_twice_is_not_tried_again(chat: ChatFormat) -> None:
    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> Any:
        await asked(url, said("a"))
        return object()  # such as a trajectory: its text has another address at each try

    (fault,) = played(tasks_of(run), chat, scripted(chat, " rock"), retries=8)
    assert "after 2 tries: " in str(fault)
    assert "must return a finite reward, got a value of type object" in str(fault)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "; the policy's last answer was cut at transcript.max_action_tokens = 3"),
        (
            {"max_tokens": 2},
            "; the policy's last answer was cut at the call's own limit of 2 tokens",
        ),
    ],
)
def test_a_program_that_raises_after_a_cut_answer_is_told_the_limit(
    chat: ChatFormat, more: dict[str, Any], words: str
) -> None:
    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        _, choice = (await asked(url, said("a"), **more))["content"].split(":")
        return float(choice == " paper")

    engine = scripted(chat, " rock paper scissors rock : paper")
    (fault,) = played(tasks_of(run), chat, engine, "transcript.max_action_tokens=3")
    assert isinstance(fault, CallFault)
    assert "run() raised ValueError: not enough values to unpack" in str(fault)
    assert str(fault).endswith(words)
    assert drop_kind(str(fault)).name == "the program raised after a cut answer"


def test_a_program_that_raises_after_a_whole_answer_is_told_no_limit(chat: ChatFormat) -> None:
    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        for messages in (said("a"), said("b")):
            content = (await asked(url, messages))["content"]
        return float(content)

    engine = scripted(chat, " rock paper scissors rock paper", " rock")
    (fault,) = played(tasks_of(run), chat, engine, "transcript.max_action_tokens=3")
    assert "run() raised ValueError: could not convert" in str(fault)
    assert "was cut" not in str(fault)


@pytest.mark.parametrize(("choice", "is_valid"), [("required", False), ("auto", True)])
def test_an_answer_that_is_cut_before_its_demanded_call_is_complete_is_invalid(
    chat: ChatFormat, choice: str, is_valid: bool
) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]

    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        answer = await asked(url, said("a"), tools=tools, tool_choice=choice)
        assert answer == {"role": "assistant", "content": "<tool_cal"}
        return 0.0

    # The tiny tokenizer writes these letters one by one, and the engine ends nothing.
    engine = scripted(chat, "<tool_cal")
    (trial,) = played(tasks_of(run), chat, engine, "transcript.max_action_tokens=9")
    assert isinstance(trial, Trial), trial
    assert [turn.is_valid for turn in trial.turns] == [is_valid, is_valid]


def test_a_call_after_its_episode_is_refused_and_leaves_nothing(chat: ChatFormat) -> None:
    late: list[Any] = []
    old: list[str] = []

    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        if old:
            late.append(await post(old[0], "chat/completions", {"messages": said("late")}))
        old[:] = [url]
        await asked(url, said("a"))
        return 1.0

    (trial,) = played(tasks_of(run), chat, scripted(chat, " rock"))
    assert isinstance(trial, Trial)
    assert len(trial.turns) == 2
    ((status, answer),) = late
    assert (status, answer["error"]["message"]) == (410, "this episode is over")


def test_a_call_whose_body_comes_in_the_next_episode_is_refused_too(chat: ChatFormat) -> None:
    body = json.dumps({"messages": said("late")}).encode()
    opened: list[Any] = []
    answers: list[bytes] = []

    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        if opened:
            reader, writer = opened.pop()
            writer.write(body)
            answers.append(await reader.readline())
            writer.close()
        else:
            address = urlsplit(url)
            opened.append(await asyncio.open_connection(address.hostname, address.port))
            head = f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: "
            opened[0][1].write(f"{head}{len(body)}\r\n\r\n".encode())
            await opened[0][1].drain()
        await asked(url, said("a"))
        return 1.0

    (trial,) = played(tasks_of(run), chat, scripted(chat, " rock"))
    assert isinstance(trial, Trial)
    assert answers == [b"HTTP/1.1 410 Gone\r\n"]
    assert len(trial.turns) == 2


def test_an_unknown_key_is_refused(chat: ChatFormat) -> None:
    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        root = url.removesuffix(f"/{key}/v1")
        for given, status in (("", 401), ("sk-other", 401), ("mage-0", 410)):
            answer = await post(f"{root}/v1", "chat/completions", {"messages": said("a")}, given)
            assert answer[0] == status
        return 0.0 if isinstance(await by_key(root, key), tuple) else 1.0

    async def by_key(root: str, key: str) -> Any:
        return await post(f"{root}/v1", "chat/completions", {"messages": said("a")}, key)

    (trial,) = played(tasks_of(run), chat, scripted(chat, " rock"))
    assert isinstance(trial, Trial)
    assert trial.episode_rewards() == [1.0, 1.0]


def test_a_plain_function_that_blocks_does_not_block_the_others(chat: ChatFormat) -> None:
    def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        body = json.dumps({"messages": said("a")}).encode()
        header = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/chat/completions", body, header)
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["choices"]
        time.sleep(0.3)  # the agent's own work, in its thread
        return 1.0

    tasks = tuple(map(str, range(8)))
    began = time.monotonic()
    trials = played(tasks_of(run), chat, scripted(chat, " rock"), tasks=tasks)
    assert all(isinstance(trial, Trial) for trial in trials), trials
    assert time.monotonic() - began < 8 * 2 * 0.3


def test_a_conversation_that_outgrows_the_context_earns_nothing_and_is_kept(
    chat: ChatFormat,
) -> None:
    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        messages = said("a")
        while True:
            answer = await asked(url, messages)
            if isinstance(answer, tuple):
                raise ValueError(answer[1]["error"]["code"])
            messages += [answer, {"role": "user", "content": "more " * 20}]

    engine = scripted(chat, " rock")
    complete = engine.complete

    async def bounded(prompt: Any) -> Any:
        if len(prompt.tokens) > 500:
            raise ContextFull("full")
        return await complete(prompt)

    engine.complete = bounded  # type: ignore[method-assign]
    (trial,) = played(tasks_of(run), chat, engine, "trial.memory=none")
    assert isinstance(trial, Trial), trial
    assert trial.episode_rewards() == [0.0, 0.0]
    assert trial.num_cut_episodes == 2
    assert len(trial.turns) > 4

    bounds = {"min_return": -2.0, "max_return": -1.0}
    (trial,) = played(tasks_of(run, **bounds), chat, engine, "trial.memory=none")
    assert isinstance(trial, Trial), "0 for a full context may lie outside of the bounds"
    for reward, wanted in (
        (math.nan, "must return a finite reward, got nan"),
        (-0.5, "must return a reward from min_return = -2 to"),
    ):

        async def wrong(self: Any, *task: Any, reward: float = reward) -> float:
            with pytest.raises(ValueError, match="context_length_exceeded"):
                await run(self, *task)
            return reward

        (fault,) = played(tasks_of(wrong, **bounds), chat, engine, "trial.memory=none")
        assert wanted in str(fault), "a fault of the program"
