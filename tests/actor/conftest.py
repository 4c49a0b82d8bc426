"""A tiny chat, and an actor beside which a test runs."""

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest

from mage_async.environments.catalogue import load
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.trials.chat_format import ChatFormat
from tests.helpers.actor_site import PATIENCE_S, Run, Site
from tests.helpers.scripted_engine import Answers, Pace, at_once


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    directory = tmp_path_factory.mktemp("policy")
    save_tokenizer(build_tokenizer(load("rps").facts.words), directory)
    return load_chat(directory)


@pytest.fixture
def run(chat: ChatFormat) -> Run:
    """Run a test beside an actor, and end the actor."""

    def begin(
        main: Callable[[Site], Awaitable[None]],
        *,
        environment: str = "rps",
        pace: Pace = at_once,
        answers: Answers | None = None,
        step_deadline_s: float = math.inf,
        num_processes: int = 0,
        retries: int = 0,
    ) -> None:
        async def whole() -> None:
            site = Site(
                load(environment), chat, pace, answers, step_deadline_s, num_processes, retries
            )
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await main(site)
            finally:
                site.actor.cancel()
                await asyncio.wait([site.actor])
                await site.workers.close()

        asyncio.run(whole())

    return begin
