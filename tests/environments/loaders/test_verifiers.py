"""The endpoint that rollouts of verifiers ask, without the package itself."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mage_async.errors import ConfigError, EnvironmentFault
from mage_services.verifiers.process import CompletionRequest, Ended, Endpoint, Rollout
from tests.environments.loaders.playing import rehearsed

aiohttp = pytest.importorskip("aiohttp")


Post = Callable[..., Awaitable[tuple[int, str]]]


def said(*texts: str) -> list[dict[str, Any]]:
    """A conversation that a user begins."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def asking(act: Callable[[Rollout, Post], Awaitable[Any]]) -> Any:
    """Let a test post to the address of a rollout."""

    async def run() -> Any:
        endpoint = Endpoint()
        await endpoint.start()
        key, rollout = endpoint.open()
        async with aiohttp.ClientSession() as http:

            async def post(messages: list[dict], **more: Any) -> tuple[int, str]:
                url = f"{endpoint.base_url(key)}/chat/completions"
                body = {"model": "policy", "messages": messages, **more}
                async with http.post(url, json=body) as answer:
                    return answer.status, await answer.text()

            try:
                return await act(rollout, post)
            finally:
                await endpoint.close()

    return asyncio.run(run())


def test_a_conversation_goes_on_turn_by_turn() -> None:
    async def act(rollout: Rollout, post: Post) -> None:
        first = asyncio.create_task(post([{"role": "system", "content": "Be brief."}, *said("a")]))
        assert await rollout.next() == CompletionRequest("Be brief.\n\na")
        rollout.reply("b")
        assert '"content": "b"' in (await first)[1]
        whole = [{"role": "system", "content": "Be brief."}, *said("a", "b", "c")]
        second = asyncio.create_task(post(whole, stream=True))
        assert await rollout.next() == CompletionRequest("c")
        rollout.reply("d")
        lines = (await second)[1].split("\n\n")
        assert '"content": "d"' in lines[0]
        assert lines[-2] == "data: [DONE]"
        rollout.end(Ended(0.5))
        assert await rollout.next() == Ended(0.5)

    asking(act)


def test_a_request_that_is_sent_again_is_asked_once() -> None:
    async def act(rollout: Rollout, post: Post) -> list[tuple[int, str]]:
        both = [asyncio.create_task(post(said("a"))) for _ in range(2)]
        await rollout.next()
        rollout.reply("b")
        return [*(await asyncio.gather(*both)), await post(said("a"))]

    assert len(set(asking(act))) == 1


@pytest.mark.parametrize(
    ("messages", "more", "why"),
    [
        (said("x", "b", "c"), {}, "has rewritten its conversation"),
        (said("a", "other", "c"), {}, "has rewritten its conversation"),
        (said("a", "b", "c"), {"tools": [{"type": "function"}]}, "offers tools"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "have more than text in them"),
    ],
)
def test_what_our_context_cannot_follow_is_a_fault(
    messages: list[dict], more: dict[str, Any], why: str
) -> None:
    async def act(rollout: Rollout, post: Post) -> None:
        first = asyncio.create_task(post(said("a")))
        await rollout.next()
        rollout.reply("b")
        await first
        status, text = await post(messages, **more)
        assert status == 400
        assert why in text
        with pytest.raises(EnvironmentFault, match=why):
            await rollout.next()

    asking(act)


def test_a_python_that_is_none_is_refused() -> None:
    given = ("environment.options.python=/no/python", "environment.options.size=20")
    with pytest.raises(ConfigError, match="/no/python cannot be run: No such file"):
        rehearsed("verifiers:gsm8k", *given)
    with pytest.raises(ConfigError, match="needs the option `python`"):
        rehearsed("verifiers:gsm8k")
