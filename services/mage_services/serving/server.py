"""A server of one environment over OpenEnv's WebSocket: a connection is a session.

ended by                     what becomes of the session
the client, `close`          closed, and its place is free before the connection is
the network                  the same; a connection that answers no ping is closed
no request for `idle_s`      the client is told `SESSION_ERROR`, and the connection is closed
no room                      the client is told `CAPACITY_REACHED`, and there is no session
"""

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from aiohttp import WSCloseCode, WSMsgType, web

from mage_async.environments.environment import Environment
from mage_async.environments.loaders.openenv_messages import error_answer
from mage_async.errors import RunError
from mage_services.environments.workers import Workers
from mage_services.serving.session import ACTION, OBSERVATION, STATE, Json, Session

PING_S = 20.0
"""A connection without a word for so long is pinged, and closed where no answer comes."""
MAX_REQUEST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server holds at most."""

    sessions: int
    idle_s: float
    """A session without a request for so long is closed."""


class Server:
    """Answers requests; run by `serve`."""

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
        if request.headers.get("Origin", "").rpartition("//")[2] not in ("", request.host):
            raise web.HTTPForbidden(text="pages of other sites may not open a session here")
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
                if (answer := await session.answer(message.data)) is None:
                    return
                await socket.send_json(answer)

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


async def serve(
    environment: Environment,
    limits: Limits,
    host: str,
    port: int,
    workers: Workers,
    say: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        port: 0 takes one that is free.
        workers: make the calls of a slow environment; closed at the end.
        say: is given the address, once it is served.

    Raises:
        RunError: the address cannot be listened on.
    """
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with workers:
        runner = web.AppRunner(Server(environment, limits, workers).application)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise RunError(f"{host}:{port} cannot be listened on: {error.strerror}") from error
        try:
            say(f"http://{host}:{runner.addresses[0][1]}")
            await ended.wait()
        finally:
            await runner.cleanup()
