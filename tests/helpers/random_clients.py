"""Clients of all three protocols that hold random conversations, and the check of their trials.

A client keeps its conversation as OpenAI's chat messages. It writes each request in the protocol of
the step, and reads the answer, whole or streamed, back into that form.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from mage_async.completion import Completion, Prompt
from mage_async.environments.agent import AgentTasks
from mage_async.environments.loaders.loader import NumberedTasks
from mage_async.learning.packing import TrainingSequence
from mage_async.trajectory import Kind, Trial
from mage_async.trials.chat_format import ChatFormat
from tests.helpers.agent_site import tasks_of

SETTINGS = (
    "policy.kind=tiny",
    "environment.name=rps",
    "warm_start=none",
    "transcript.rules=false",
    "transcript.max_action_tokens=130",
    "transcript.max_reflection_tokens=12",
    "engine.max_tokens=2048",
)
"""The configuration of the trials; a call of a tool, in bytes, has 62 tokens."""
Message = dict[str, Any]
PROTOCOLS = ("chat/completions", "messages", "responses")
KINDS = (
    *("go on", "go on", "go on", "tools", "tools", "again", "branch", "other"),
    *("forge", "two", "regex", "json", "gone"),
)
"""Kinds of steps, each as often as it is drawn."""
WORDS = ("rock", "paper", "<|user|>", "<|assistant|> rock", "episode 2", "{memory}", "é\n", "")
STOPS = (" rock", "e")
REGEX = " (rock|paper){1,2}"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 23]}}, "required": ["a"]}
TOOL = {"name": "f", "description": "of a", "parameters": SCHEMA}
GONE_S = 0.002
"""Seconds after which a client that does not wait closes its connection."""


class Step(NamedTuple):
    """One step of a client."""

    kind: str
    protocol: str
    words: str
    is_streamed: bool
    max_tokens: int | None


def steps_of(source: Random, most: int = 6) -> list[Step]:
    """Draw the steps of a client; each step of a quarter of the clients has another protocol."""
    # A program that leaves before every answer has called nothing, and its trial fails.
    protocol, mixes = source.choice(PROTOCOLS), source.random() < 0.25
    return [
        Step(
            source.choice(KINDS) if number else "go on",
            source.choice(PROTOCOLS) if mixes else protocol,
            source.choice(WORDS),
            source.random() < 0.5,
            source.choice([None, *range(1, 8)]),
        )
        for number in range(source.randint(1, most))
    ]


@dataclass
class Seen:
    """What clients have sent and received; adds up over the clients of a trial."""

    calls: Counter[str] = field(default_factory=Counter)
    """By protocol, and whether it was streamed."""
    refused: Counter[str] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)
    """Texts of answers without calls of tools."""
    num_answers: int = 0
    num_behind: int = 0
    """Answers to conversations that end behind one of the policy's own answers."""
    num_gone: int = 0
    """Calls whose client went away; nobody has read their answers."""


def clients(
    steps: Callable[[int, int], Sequence[Step]], seen: dict[int, Seen], num_tasks: int = 8
) -> AgentTasks:
    """The tasks of a program that makes the calls of some steps.

    Args:
        steps: of a task and an episode.
        seen: by task.
    """

    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        async with aiohttp.ClientSession() as http:
            client = Client(http, url, seen[task])
            await client.converse(steps(task, episode))
        return 1.0

    numbered = {"num_tasks": num_tasks, "members": NumberedTasks.members}
    return tasks_of(run, max_turns=200, **numbered)


class Client:
    """A program's client in one episode."""

    def __init__(self, http: aiohttp.ClientSession, url: str, seen: Seen) -> None:
        self._http, self._url, self._seen = http, url, seen

    async def converse(self, steps: Sequence[Step]) -> None:
        """Make the calls of the steps; most answers become part of the conversation."""
        has_tools = any(step.kind == "tools" for step in steps)
        talk = [_user("first")]
        for step in steps:
            match step.kind:
                case "other":
                    asking = [self._ask(step, [_system("sub"), _user(step.words)], False)]
                case "forge" if (last := _last_answer(talk)) is not None:
                    own = {"role": "assistant", "content": f"{step.words} paper"}
                    asking = [self._ask(step, [*talk[:last], own, _user("go on")], has_tools)]
                case "gone":
                    asking = [self._leave(step, talk)]
                case "branch":
                    other = [*talk[:-1], {**talk[-1], "content": "b"}]
                    asking = [self._ask(step, each, has_tools) for each in (talk, other)]
                case _:
                    asking = [self._ask(step, talk, has_tools)]
            answer, *_ = await asyncio.gather(*asking)
            if answer is None:
                talk = [_user("anew")]
            elif step.kind not in ("again", "other", "forge", "gone"):
                talk = [*talk, answer, *_replies(answer, step.words)]

    async def _leave(self, step: Step, talk: list[Message]) -> Message:
        """Send a request, and close the connection before most answers."""
        self._seen.num_gone += 1
        with suppress(TimeoutError):
            async with asyncio.timeout(GONE_S):
                await self._post(step.protocol, _body(step, talk, False))
        return {}

    async def _ask(self, step: Step, talk: list[Message], has_tools: bool) -> Message | None:
        """Send a conversation; return the first answer, None if the call was refused."""
        body = _body(step, talk, has_tools)
        way = "streamed" if step.is_streamed else "whole"
        self._seen.calls[f"{step.protocol} {way}"] += 1
        status, content = await self._post(step.protocol, body)
        if status != 200:
            message = json.loads(content)["error"]["message"]
            self._seen.refused[re.sub(r"\d+", "N", message)] += 1
            return None
        answers = _READERS[step.protocol](content, step.is_streamed)
        self._seen.num_answers += len(answers)
        is_behind = (last := _last_answer(talk)) is not None and "is_own" in talk[last]
        self._seen.num_behind += is_behind * len(answers)
        self._seen.texts.update(each["content"] for each in answers if "tool_calls" not in each)
        return answers[0]

    async def _post(self, protocol: str, body: dict[str, Any]) -> tuple[int, str]:
        async with self._http.post(f"{self._url}/{protocol}", json=body) as response:
            return response.status, await response.text()


# Requests.


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _last_answer(talk: Sequence[Message]) -> int | None:
    """Return the number of the last message of the assistant."""
    numbers = [number for number, each in enumerate(talk) if each["role"] == "assistant"]
    return numbers[-1] if numbers else None


def _replies(answer: Message, words: str) -> list[Message]:
    """Return what follows an answer: the results of its calls, or a message of the user."""
    calls = answer.get("tool_calls", ())
    results = [{"role": "tool", "tool_call_id": c["id"], "content": words} for c in calls]
    return results or [_user(words)]


def _body(step: Step, talk: list[Message], has_tools: bool) -> dict[str, Any]:
    """Return the request for the next answer, in the protocol of the step."""
    body: dict[str, Any] = {"model": "any", "stream": step.is_streamed}
    match step.protocol:
        case "chat/completions":
            body |= {"messages": talk, "max_tokens": step.max_tokens}
            if has_tools:
                body["tools"] = [{"type": "function", "function": TOOL}]
            body |= {
                "two": {"n": 2, "stop": list(STOPS)},
                "regex": {"regex": REGEX, "max_tokens": None},
                "json": _long(
                    response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}
                ),
                "tools": _long(tool_choice="required") if has_tools else {},
            }.get(step.kind, {})
        case "messages":
            body |= {"messages": _anthropic(talk), "max_tokens": step.max_tokens}
            body["system"] = "".join(each["content"] for each in talk if each["role"] == "system")
            if has_tools:
                named = {"name": "f", "description": "of a", "input_schema": SCHEMA}
                body["tools"] = [named]
            body |= {
                "two": {"stop_sequences": list(STOPS)},
                "tools": _long(tool_choice={"type": "any"}) if has_tools else {},
            }.get(step.kind, {})
        case _:
            last = _last_answer(talk)
            if last is not None and "response_id" in talk[last]:
                body["previous_response_id"] = talk[last]["response_id"]
                talk = talk[last + 1 :]
            body |= {"input": _items(talk), "max_output_tokens": step.max_tokens}
            if has_tools:
                body["tools"] = [{"type": "function", **TOOL}]
            form = {"type": "json_schema", "name": "form", "schema": SCHEMA}
            body |= {
                "json": _long(text={"format": form}),
                "tools": _long(tool_choice="required") if has_tools else {},
            }.get(step.kind, {})
    return body


def _long(**more: Any) -> dict[str, Any]:
    """Ask for an answer that is not cut off before its form is whole."""
    return {"max_tokens": None, "max_output_tokens": None, **more}


def _anthropic(talk: Sequence[Message]) -> list[Message]:
    """Return a conversation in Anthropic's blocks."""
    written: list[Message] = []
    for each in talk:
        if each["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": each["tool_call_id"]}
            written.append({"role": "user", "content": [{**result, "content": each["content"]}]})
        elif each["role"] == "assistant":
            blocks = [{"type": "text", "text": each["content"]}] if each["content"] else []
            for call in each.get("tool_calls", ()):
                function = call["function"]
                made = {"name": function["name"], "input": json.loads(function["arguments"])}
                blocks.append({"type": "tool_use", "id": call["id"], **made})
            written.append({"role": "assistant", "content": blocks})
        elif each["role"] == "user":
            written.append({"role": "user", "content": each["content"]})
    return written


def _items(talk: Sequence[Message]) -> list[Message]:
    """Return a conversation as the items of a response's input."""
    items: list[Message] = []
    for each in talk:
        if each["role"] == "tool":
            of = {"type": "function_call_output", "call_id": each["tool_call_id"]}
            items.append({**of, "output": each["content"]})
            continue
        calls = each.get("tool_calls", ())
        if each["content"] or not calls:
            items.append({"role": each["role"], "content": each["content"]})
        for call in calls:
            # As a client may write them anew.
            arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
            named = {"type": "function_call", "call_id": call["id"], "name": "f"}
            items.append({**named, "arguments": arguments})
    return items


# Answers.


def _answer(text: str, calls: Sequence[tuple[str, str, str]]) -> Message:
    """Return an answer of the policy as a chat message; a call is its id, name and arguments."""
    message = {"role": "assistant", "content": text, "is_own": True}
    if calls:
        message["tool_calls"] = [
            {"id": each, "type": "function", "function": {"name": name, "arguments": arguments}}
            for each, name, arguments in calls
        ]
    return message


def _events(content: str) -> list[dict[str, Any]]:
    """Return the data of server-sent events."""
    lines = [line.removeprefix("data: ") for line in content.splitlines() if line[:6] == "data: "]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _read_chat(content: str, is_streamed: bool) -> list[Message]:
    if not is_streamed:
        parts = [(each["index"], each["message"]) for each in json.loads(content)["choices"]]
    else:
        chosen = (choice for event in _events(content) for choice in event["choices"])
        parts = [(each["index"], each["delta"]) for each in chosen]
    found: dict[int, tuple[list[str], list[tuple[str, str, str]]]] = {}
    for number, part in parts:
        texts, calls = found.setdefault(number, ([], []))
        texts.append(part.get("content") or "")
        for call in part.get("tool_calls", ()):
            calls.append((call["id"], call["function"]["name"], call["function"]["arguments"]))
    return [_answer("".join(texts), calls) for texts, calls in found.values()]


def _read_messages(content: str, is_streamed: bool) -> list[Message]:
    if not is_streamed:
        blocks = json.loads(content)["content"]
    else:
        blocks, texts = [], list[str]()
        for event in _events(content):
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
                texts.append("")
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                texts[-1] += delta["text"] if "text" in delta else delta["partial_json"]
        for block, text in zip(blocks, texts, strict=True):
            block |= {"text": text} if block["type"] == "text" else {"input": json.loads(text)}
    text = "".join(each["text"] for each in blocks if each["type"] == "text")
    used = [each for each in blocks if each["type"] == "tool_use"]
    return [_answer(text, [(each["id"], each["name"], json.dumps(each["input"])) for each in used])]


def _read_responses(content: str, is_streamed: bool) -> list[Message]:
    if not is_streamed:
        whole = json.loads(content)
        items = whole["output"]
    else:
        events = _events(content)
        items = [event["item"] for event in events if event["type"].endswith("item.added")]
        for event in events:
            if event["type"].endswith("output_text.delta"):
                items[event["output_index"]]["content"] = [{"text": event["delta"]}]
            elif event["type"].endswith("arguments.delta"):
                items[event["output_index"]]["arguments"] = event["delta"]
        whole = events[-1]["response"]
    text = "".join(part["text"] for each in items for part in each.get("content", ()))
    called = [each for each in items if each["type"] == "function_call"]
    calls = [(each["call_id"], each["name"], each["arguments"]) for each in called]
    return [{**_answer(text, calls), "response_id": whole["id"]}]


_READERS = dict(zip(PROTOCOLS, (_read_chat, _read_messages, _read_responses), strict=True))


# The check.

_Drawn = tuple[int, int, bytes]
"""A drawn token: the hash of all tokens before it, the token, and the bytes of its log-prob."""


@dataclass
class Found:
    """Counts of a check; adds up over trials."""

    num_trials: int = 0
    num_turns: int = 0
    num_notes: int = 0
    """Turns of notes and of reflections; no client has asked for them."""
    num_segments: int = 0
    num_tokens: int = 0
    """Tokens of the turns, each compared with the engine's in id, log-prob and restriction."""
    num_forced: int = 0
    """Tokens of these that had no alternative, and are not trained on."""
    num_unread: int = 0
    """Tokens that the engine drew behind a stop text, or for a client that went away."""
    num_unequal: int = 0
    num_forged: int = 0
    """Turns that the engine did not draw, or not behind their prompt."""
    num_lost: int = 0
    """Completions that were answered and are no turn."""
    num_untrained: int = 0
    num_trained_twice: int = 0
    """Trained tokens beyond those that the engine drew, as often as it drew them."""
    num_misread: int = 0
    """Answers whose text, as the client read it, is not that of a turn."""
    num_begun_again: int = 0
    """Calls behind an answer of the policy that do not continue its tokens; not counted in trials
    with notes, which replace a conversation that is full.
    """

    def faults(self) -> dict[str, int]:
        """Return the counts that must be 0."""
        names = ("unequal", "forged", "lost", "untrained", "trained_twice", "misread")
        return {name: getattr(self, f"num_{name}") for name in (*names, "begun_again")}

    def check(
        self,
        trial: Trial,
        completions: Sequence[tuple[Prompt, Completion]],
        sequences: Sequence[TrainingSequence],
        seen: Seen,
        chat: ChatFormat,
    ) -> None:
        """Compare a trial, and what the learner trains on, with what the engine drew for it."""
        self.num_trials += 1
        self.num_turns += len(trial.turns)
        self.num_segments += len(trial.segments)
        left = list(completions)
        drawn: Counter[_Drawn] = Counter()
        ends, num_continued = set[int](), 0
        for turn in trial.turns:
            segment, own = trial.segments[turn.segment], slice(turn.start, turn.stop)
            tokens, prompt = segment.tokens[own], segment.tokens[: turn.start]
            self.num_tokens += len(tokens)
            place = _place(left, prompt, tokens)
            if place is None:
                self.num_forged += 1
                continue
            _, completion = left.pop(place)
            length = len(tokens)
            is_sampled = completion.is_sampled()[:length]
            unequal = completion.tokens[:length] != tokens
            unequal |= completion.logprobs[:length] != segment.logprobs[own]
            unequal |= is_sampled != segment.is_sampled[own]
            self.num_unequal += int(unequal.sum())
            self.num_forced += int((~is_sampled).sum())
            self.num_unread += len(completion.tokens) - length
            if length < len(completion.tokens) and not _is_stopped(chat, tokens):
                self.num_unequal += len(completion.tokens) - length
            path = _hashes([*prompt.tolist(), *completion.tokens[:length].tolist()])
            num_continued += turn.kind is Kind.ACT and not ends.isdisjoint(path[: turn.start + 1])
            ends.add(path[-1])
            drawn.update(_marks(path, turn.start, completion, is_sampled))
        self._count_trained(drawn, sequences)
        self.num_lost += max(0, len(left) - seen.num_gone)
        self.num_unread += sum(len(completion.tokens) for _, completion in left)
        acts = [turn for turn in trial.turns if turn.kind is Kind.ACT]
        self.num_notes += len(trial.turns) - len(acts)
        self.num_lost += max(0, seen.num_answers - len(acts))
        self.num_forged += max(0, len(acts) - seen.num_answers - seen.num_gone)
        self.num_misread += (seen.texts - Counter(turn.action for turn in acts)).total()
        if not any(turn.kind is Kind.NOTES for turn in trial.turns):
            self.num_begun_again += max(0, seen.num_behind - num_continued)
        self.num_forged += trial.num_extension_faults

    def _count_trained(self, drawn: Counter[_Drawn], sequences: Sequence[TrainingSequence]) -> None:
        """Compare the trained tokens with those that the engine drew."""
        trained: Counter[_Drawn] = Counter()
        for each in sequences:
            path, logprobs = _hashes(each.tokens.tolist()), each.sampled.logprobs
            for at, logprob in zip(each.places.tolist(), logprobs, strict=True):
                trained[path[at], int(each.tokens[at]), logprob.tobytes()] += 1
        self.num_untrained += (drawn - trained).total()
        self.num_trained_twice += (trained - drawn).total()


def _place(
    left: Sequence[tuple[Prompt, Completion]], prompt: np.ndarray, tokens: np.ndarray
) -> int | None:
    """Find the completion of a turn; one of the same prompt if none has the turn's tokens."""
    behind = [n for n, (asked, _) in enumerate(left) if np.array_equal(asked.tokens, prompt)]
    behind = [n for n in behind if len(left[n][1].tokens) >= len(tokens)]
    equal = (n for n in behind if np.array_equal(left[n][1].tokens[: len(tokens)], tokens))
    return next(equal, behind[0] if behind else None)


def _is_stopped(chat: ChatFormat, tokens: np.ndarray) -> bool:
    """Return whether the last token of a completion is the one that completes a stop text."""
    whole, before = chat.decode(tokens.tolist()), chat.decode(tokens[:-1].tolist())
    return any(each in whole for each in STOPS) and not any(each in before for each in STOPS)


def _hashes(tokens: Sequence[int]) -> list[int]:
    """Return a hash of each beginning of a sequence, by its length."""
    path = [0]
    for token in tokens:
        path.append(hash((path[-1], token)))
    return path


def _marks(
    path: Sequence[int], start: int, completion: Completion, is_sampled: np.ndarray
) -> list[_Drawn]:
    """Return the sampled tokens of a completion that begins at `start` of its sequence."""
    return [
        (path[start + n], int(completion.tokens[n]), completion.logprobs[n].tobytes())
        for n in np.flatnonzero(is_sampled).tolist()
    ]
