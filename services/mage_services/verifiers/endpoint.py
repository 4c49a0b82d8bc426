"""An OpenAI-compatible endpoint whose completions are drawn by a trial, plain or streamed.

Every rollout has an address of its own.
"""

import json
import secrets
from typing import Any

from aiohttp import web

from mage_async.errors import EnvironmentFault
from mage_services.verifiers.rollout import Rollout

MODEL = "policy"
MAX_REQUEST_BYTES = 2**24


class Endpoint:
    """Answers requests on a free port of this machine."""

    def __init__(self) -> None:
        self.rollouts: dict[str, Rollout] = {}
        self._address = ""
        application = web.Application(client_max_size=MAX_REQUEST_BYTES)
        application.add_routes([web.post("/{key}/v1/chat/completions", self._asked)])
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)

    async def start(self) -> None:
        """Listen."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0]
        self._address = f"http://{host}:{port}"

    async def close(self) -> None:
        """Listen no longer."""
        await self._runner.cleanup()

    def open(self) -> tuple[str, Rollout]:
        """A new rollout, and its key."""
        key, rollout = secrets.token_hex(8), Rollout()
        self.rollouts[key] = rollout
        return key, rollout

    def base_url(self, key: str) -> str:
        """Where a rollout finds its policy."""
        return f"{self._address}/{key}/v1"

    async def _asked(self, request: web.Request) -> web.Response:
        rollout = self.rollouts.get(request.match_info["key"])
        if rollout is None:
            return _error(410, "this rollout is over")
        body = await request.json()
        try:
            if body.get("tools"):
                raise EnvironmentFault("the rollout offers tools, which are not passed on")
            text = await rollout.completion(body["messages"])
        except EnvironmentFault as fault:
            rollout.end(fault)
            return _error(400, str(fault))
        return _streamed(text) if body.get("stream") else web.json_response(_whole(text))


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
"""Tokens are counted where they are drawn: in the trial."""


def _whole(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return {"object": "chat.completion", **_HEAD, "choices": [choice], "usage": _USAGE}


_HEAD = {"id": "mage", "created": 0, "model": MODEL}


def _streamed(text: str) -> web.Response:
    """The same as server-sent events, all at once."""
    delta = {"role": "assistant", "content": text}
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": _USAGE},
    ]
    lines = [json.dumps({"object": "chat.completion.chunk", **_HEAD, **each}) for each in chunks]
    body = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
    return web.Response(text=body, content_type="text/event-stream")
