"""A local chat endpoint with OpenAI's protocol: a function answers, or a fault."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from aiohttp import web

Messages = Sequence[dict[str, str]]
Reply = Callable[[Messages], str]
Fault = Callable[[web.Request], Any]
"""Answers a request in place of the player: a coroutine function that returns a response."""


@dataclass
class ChatServer:
    """Answers each request by a function of its messages.

    Args:
        reply: returns the assistant's message.
        faults: by number of the request, from 0, what happens in place of an answer.
    """

    reply: Reply
    faults: dict[int, Fault] = field(default_factory=dict)
    model: str = "player-1"
    num_requests: int = 0
    body: dict[str, Any] = field(default_factory=dict)
    """Of the last request."""

    @contextmanager
    def in_thread(self, port: int = 0) -> Iterator[str]:
        """Serve from a thread of its own; yield the URL."""
        ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, str]] = Future()

        async def serve() -> None:
            ended = asyncio.Event()
            async with self.running(port) as url:
                ready.set_result((asyncio.get_running_loop(), ended, url))
                await ended.wait()

        thread = Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        loop, ended, url = ready.result(timeout=10)
        try:
            yield url
        finally:
            loop.call_soon_threadsafe(ended.set)
            thread.join()

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[str]:
        """Serve on this machine; yield the URL."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        number, self.num_requests = self.num_requests, self.num_requests + 1
        body = await request.json()
        self.body = body
        fault = self.faults.get(number) or self.faults.get(-1)
        if fault is not None:
            return await fault(request)
        text = self.reply(body["messages"])
        return web.json_response(answer(text, self.model))


def answer(text: Any, model: str = "player-1", finish: str = "stop") -> dict[str, Any]:
    """Return the body of an answer."""
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 100, "completion_tokens": 5}
    return {
        "model": model,
        "choices": [{"message": message, "finish_reason": finish}],
        "usage": usage,
    }


def refusing(status: int, text: str = "not now", **headers: str) -> Fault:
    """Return a fault that answers with an error of this status."""

    async def refuse(request: web.Request) -> web.Response:
        error = {"error": {"message": text}}
        return web.json_response(error, status=status, headers=headers)

    return refuse


def answering(text: Any, **more: Any) -> Fault:
    """Return a fault that answers with this text, a model or a finish reason of its own."""

    async def say(request: web.Request) -> web.Response:
        return web.json_response(answer(text, **more))

    return say


async def cut_off(request: web.Request) -> web.StreamResponse:
    """Promise a longer body than is sent, and close the connection."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"model": "player-1", "choi')
    assert request.transport is not None
    request.transport.close()
    return response


async def hang_up(request: web.Request) -> web.StreamResponse:
    """Close the connection without a word."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def sleep(request: web.Request) -> web.Response:
    """Answer long after any patience."""
    await asyncio.sleep(30)
    return web.Response()
