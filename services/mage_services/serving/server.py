"""A server of one environment over OpenEnv's WebSocket: a connection is a session.

ended by                     what becomes of the session
the client, `close`          closed, and its place is free before the connection is
the network                  the same; a connection that answers no ping is closed
no request for `idle_s`      the client is told `SESSION_ERROR`, and the connection is closed
no room                      the client is told `CAPACITY_REACHED`, and there is no session
"""

import asyncio
from contextlib import suppress

from aiohttp import WSCloseCode, WSMsgType, web

from mage_async.environments.environment import Environment
from mage_async.environments.loaders.openenv_messages import error_answer
from mage_services.environments.workers import Workers
from mage_services.serving.openenv_requests import ACTION, OBSERVATION, STATE, answer
from mage_services.serving.serve import Limits, refuse_other_sites
from mage_services.serving.session import Json, Session

PING_S = 20.0
"""A connection without a word for so long is pinged, and closed where no answer comes."""
MAX_REQUEST_BYTES = 2**20


class Server:
    """Answers requests; its `application` is run by `serve`."""

    def __init__(self, environment: Environment, limits: Limits, workers: Workers) -> None:
        self._environment, self._limits, self._workers = environment, limits, workers
        self._open: set[web.WebSocketResponse] = set()
        self.application = web.Application()
        self.application.add_routes(
            [
                web.get("/ws", self._connected),
                web.get("/health", lambda _: _json({"status": "healthy"})),
                web.get("/schema", lambda _: _json(_SCHEMA)),
                web.get("/metadata", lambda _: _json(self._metadata())),
            ]
        )
        self.application.on_shutdown.append(self._close_all)

    async def _connected(self, request: web.Request) -> web.WebSocketResponse:
        refuse_other_sites(request)
        socket = web.WebSocketResponse(heartbeat=PING_S, max_msg_size=MAX_REQUEST_BYTES)
        await socket.prepare(request)
        if len(self._open) >= self._limits.sessions:
            await socket.send_json(self._full())
            await socket.close(code=WSCloseCode.TRY_AGAIN_LATER)
            return socket
        self._open.add(socket)
        session = Session(self._environment, self._workers)
        try:
            with suppress(ConnectionResetError):  # the client has left without a word
                await self._converse(socket, session)
        finally:
            self._open.discard(socket)
            session.end()
        await socket.close()
        return socket

    async def _converse(self, socket: web.WebSocketResponse, session: Session) -> None:
        """Answer until the client or the network ends it, or the session is idle for too long."""
        try:
            await self._answer_all(socket, session)
        except TimeoutError:
            said = f"closed after {self._limits.idle_s:g} s without a request"
            await socket.send_json(error_answer("SESSION_ERROR", said))

    async def _answer_all(self, socket: web.WebSocketResponse, session: Session) -> None:
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(None) as idle:  # ends the session: no request is lost by it
            while True:
                idle.reschedule(clock() + self._limits.idle_s)
                message = await socket.receive()
                idle.reschedule(None)
                if message.type is not WSMsgType.TEXT:
                    return
                if (answered := await answer(session, message.data)) is None:
                    return
                await socket.send_json(answered)

    async def _close_all(self, _: web.Application) -> None:
        """Close all sessions at once; each waits a while for its client's word."""
        closing = (socket.close(code=WSCloseCode.GOING_AWAY) for socket in self._open)
        await asyncio.gather(*closing)

    def _full(self) -> Json:
        room, active = self._limits.sessions, len(self._open)
        said = f"Server at capacity: {active}/{room} sessions active"
        return error_answer("CAPACITY_REACHED", said, active_sessions=active, max_sessions=room)

    def _metadata(self) -> Json:
        return {"name": self._environment.facts.name, "description": self._environment.rules()}


_SCHEMA = {"action": ACTION, "observation": OBSERVATION, "state": STATE}


async def _json(document: Json) -> web.Response:
    return web.json_response(document)
