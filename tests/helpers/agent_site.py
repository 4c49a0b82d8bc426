"""Programs that are the agent, played on an engine as an actor plays them."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from mage_async.assembly import trial_config_of
from mage_async.completion import Completion, Prompt
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.config.schema import Environment as EnvironmentConfig
from mage_async.environments.agent import AgentProgram, AgentTasks
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.trajectory import Task, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_services.actor.rollout import Retries, Stage, play_retried
from mage_services.environments.call_runner import CallRunner
from tests.helpers.scripted_engine import Answer, ScriptedEngine, at_once

OPTIONS = [
    "policy.kind=pretrained",
    "policy.source=none",
    "transcript.max_action_tokens=200",
    "engine.max_tokens=8192",
]
Run = Callable[..., Any]
"""Method `run` of a program."""


def small_chat(folder: Path) -> ChatFormat:
    """The tiny model's chat, with a few words."""
    save_tokenizer(build_tokenizer(["rock", "paper", "scissors"]), folder)
    return load_chat(folder)


def tasks_of(run: Run, **parts: Any) -> AgentTasks:
    """The tasks of a program."""
    return AgentTasks(type("own", (AgentProgram,), {"run": run, "max_turns": 64, **parts}), {})


def said(*texts: str) -> list[dict[str, Any]]:
    """A conversation that a user begins."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


async def post(base_url: str, path: str, body: dict[str, Any], key: str = "") -> Any:
    """The answer to a request, or its status if it is an error."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{base_url}/{path}", json=body, headers=headers) as answer,
    ):
        if answer.status != 200:
            return answer.status, await answer.json()
        is_json = answer.content_type == "application/json"
        return await answer.json() if is_json else await answer.text()


async def asked(base_url: str, messages: list[dict[str, Any]], **more: Any) -> Any:
    """The message that answers a conversation."""
    answer = await post(base_url, "chat/completions", {"messages": messages, **more})
    return answer if isinstance(answer, tuple) else answer["choices"][0]["message"]


class Drawn:
    """An engine whose completions are kept, by context."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.completions: list[tuple[Prompt, Completion]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def complete(self, prompt: Prompt) -> Completion:
        completion = await self._engine.complete(prompt)
        self.completions.append((prompt, completion))
        return completion


def scripted(chat: ChatFormat, *texts: str, by_context: bool = False) -> Drawn:
    """An engine that says texts in turns, counted over all contexts or in each; each text ends its
    turn.
    """
    numbers = iter(range(10**9))

    def answers(prompt: Prompt, turn: int) -> Answer:
        number = turn if by_context else next(numbers)
        text = texts[number % len(texts)]
        return Answer((*chat.encode(text), chat.stop_tokens[0]), -0.5)

    return Drawn(ScriptedEngine(answers, at_once))


def config_of(*changes: str) -> Config:
    """The configuration of a run."""
    return config_file.load(config_file.find(None), [*OPTIONS, *changes])


def stage_of(environment: AgentTasks, chat: ChatFormat, engine: Any, *changes: str) -> Stage:
    """A stage of two episodes."""
    config = config_of(*changes)
    return Stage(environment, trial_config_of(config, environment, chat, 2), chat, engine)


def played(
    environment: AgentTasks,
    chat: ChatFormat,
    engine: Any,
    *changes: str,
    tasks: Sequence[str] = ("3",),
    deadline_s: float = 60.0,
    retries: int = 0,
) -> list[Trial | BaseException]:
    """The trials of some tasks, played at once, or the fault of each."""
    stage = stage_of(environment, chat, engine, *changes)

    async def one(member: str, workers: CallRunner) -> Trial:
        def begin() -> Any:
            return stage.begin(Task("own", member, 7), 0, f"{member}.0")

        made = await play_retried(begin, engine, workers, Retries(retries))
        return made.run.trial(made.duration_s)

    async def main() -> list[Trial | BaseException]:
        async with CallRunner(EnvironmentConfig(step_deadline_s=deadline_s)) as workers:
            playing = (one(member, workers) for member in tasks)
            return await asyncio.gather(*playing, return_exceptions=True)

    return asyncio.run(main())
