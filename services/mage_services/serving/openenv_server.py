"""Serve one environment over OpenEnv's WebSocket; each connection is a session.

A session ends as follows:

ended by                  effect
the client, `close`       the session is closed first, so that another client may take its place,
                          then the connection
the network               the same; a connection that does not answer a ping is closed
a binary message, or one  session and connection are closed, without an answer
above `MAX_REQUEST_BYTES`
no request for `idle_s`   the client receives `SESSION_ERROR`, and the connection is closed

If all sessions that the server may have are open, a new client receives `CAPACITY_REACHED` instead
of a session.
"""

import asyncio
import json
from contextlib import suppress

from aiohttp import WSCloseCode, WSMsgType, web

from mage_async.environments.environment import Environment
from mage_async.environments.loaders.openenv import error_answer, observation_answer
from mage_async.errors import EnvironmentFault
from mage_services.environments.call_runner import CallRunner
from mage_services.gateway.chat_completions import BadRequest, Json
from mage_services.serving.session import Limits, Session, refuse_other_sites

PING_S = 20.0
"""Seconds of silence after which a connection is pinged; it is closed if no answer comes."""
MAX_REQUEST_BYTES = 2**20
"""Largest number of bytes of a request."""

_TEXT, _TEXTS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
"""JSON schemas of a text and of a list of texts."""
_STATE = {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}}
"""JSON schemas of the fields of an episode's state."""
_SCHEMA = {
    "action": {"type": "object", "properties": {"action": _TEXT}, "required": ["action"]},
    "observation": {"type": "object", "properties": {"text": _TEXT, "legal_actions": _TEXTS}},
    "state": {"type": "object", "properties": _STATE},
}
"""JSON schemas of the messages that the server reads and writes."""


class OpenEnvServer:
    """Serve one environment to many clients; `serve` runs the `application`."""

    def __init__(self, environment: Environment, limits: Limits, calls: CallRunner) -> None:
        self._environment, self._limits, self._calls = environment, limits, calls
        self._open: set[web.WebSocketResponse] = set()
        metadata = {"name": environment.facts.name, "description": environment.rules()}
        self.application = web.Application()
        self.application.add_routes(
            [
                web.get("/ws", self._connected),
                web.get("/health", lambda _: _json({"status": "healthy"})),
                web.get("/schema", lambda _: _json(_SCHEMA)),
                web.get("/metadata", lambda _: _json(metadata)),
            ]
        )
        self.application.on_shutdown.append(self._close_all)

    async def _connected(self, request: web.Request) -> web.WebSocketResponse:
        """Serve one connection from its handshake to its end."""
        refuse_other_sites(request)
        socket = web.WebSocketResponse(heartbeat=PING_S, max_msg_size=MAX_REQUEST_BYTES)
        await socket.prepare(request)
        if len(self._open) >= self._limits.sessions:
            room, active = self._limits.sessions, len(self._open)
            message = f"Server at capacity: {active}/{room} sessions active"
            counts = {"active_sessions": active, "max_sessions": room}
            await socket.send_json(error_answer("CAPACITY_REACHED", message, **counts))
            await socket.close(code=WSCloseCode.TRY_AGAIN_LATER)
            return socket
        self._open.add(socket)
        session = Session(self._environment, self._calls)
        try:
            with suppress(ConnectionResetError):  # the client did not close the connection
                await self._converse(socket, session)
        finally:
            self._open.discard(socket)
            session.end()
        await socket.close()
        return socket

    async def _converse(self, socket: web.WebSocketResponse, session: Session) -> None:
        """Answer until the client or the network ends the session, or it is idle for too long."""
        clock = asyncio.get_running_loop().time
        try:
            # The timeout is set only while the server waits for a request, so it never cancels the
            # work on one.
            async with asyncio.timeout(None) as idle:
                while True:
                    idle.reschedule(clock() + self._limits.idle_s)
                    message = await socket.receive()
                    idle.reschedule(None)
                    if message.type is not WSMsgType.TEXT:
                        return
                    if (reply := await answer(session, message.data)) is None:
                        return
                    await socket.send_json(reply)
        except TimeoutError:
            text = f"closed after {self._limits.idle_s:g} s without a request"
            await socket.send_json(error_answer("SESSION_ERROR", text))

    async def _close_all(self, _: web.Application) -> None:
        """Close all connections concurrently, because each close waits a while for its client."""
        closing = (socket.close(code=WSCloseCode.GOING_AWAY) for socket in self._open)
        await asyncio.gather(*closing)


async def _json(document: Json) -> web.Response:
    return web.json_response(document)


async def answer(session: Session, text: str) -> Json | None:
    """Return the answer to a request; `None` if the client closes the session."""
    try:
        request = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        return error_answer("INVALID_JSON", f"Invalid JSON: {error}")
    if not isinstance(request, dict):
        return error_answer("VALIDATION_ERROR", "a request must be an object")
    kind, data = request.get("type"), request.get("data", {})
    if kind == "close":
        return None
    if kind == "state":
        state = {"episode_id": session.episode_id, "step_count": session.num_steps}
        return {"type": "state", "data": state}
    if not isinstance(data, dict):
        return error_answer("VALIDATION_ERROR", f"`data` must be an object, got {data!r:.60}")
    try:
        if kind == "reset":
            return observation_answer(await session.reset(data))
        if kind == "step":
            return observation_answer(await session.step(data))
    except BadRequest as error:
        return error_answer("VALIDATION_ERROR", str(error))
    except EnvironmentFault as fault:
        return error_answer("EXECUTION_ERROR", str(fault))
    return error_answer("UNKNOWN_TYPE", f"Unknown message type: {kind!r:.60}")
