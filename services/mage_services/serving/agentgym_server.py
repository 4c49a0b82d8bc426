"""Serve one environment over AgentGym's HTTP protocol: `create` opens a session, `close` ends it.

Fields are those of AgentGym's BabyAI and SciWorld servers, so that programs written for those work
here. A client names a task by the number of a data item (`data_idx`), which is the task's seed too.
Numbers go through the task variants of training, then the held-out ones; then the variants start
again. A session does not depend on one connection, so a client that has died is not noticed: a
session without a request for `idle_s` seconds is closed.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from mage_async.environments.environment import Environment
from mage_async.environments.loaders.agentgym import answer_of
from mage_async.errors import EnvironmentFault
from mage_services.environments.call_runner import CallRunner
from mage_services.gateway.chat_completions import BadRequest
from mage_services.serving.session import Limits, Session, refuse_other_sites, whole_number

MAX_REQUEST_BYTES = 2**20
"""Largest number of bytes of a request."""


@dataclass(slots=True)
class _OpenSession:
    """Hold a session, and the timer that closes it."""

    session: Session
    closes: asyncio.TimerHandle
    """Timer that closes the session, unless a request restarts it first."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that is held while a request is answered: requests of a session are answered one after
    the other.
    """
    observation: str = ""
    """The last observation, which a client may request again."""


class AgentGymServer:
    """Answer the requests of clients; `serve` runs the `application`."""

    def __init__(self, environment: Environment, limits: Limits, calls: CallRunner) -> None:
        self._environment, self._limits, self._calls = environment, limits, calls
        self._members = (*environment.members("train"), *environment.members("heldout"))
        self._numbers = itertools.count()
        self._open: dict[int, _OpenSession] = {}
        self.application = web.Application(
            middlewares=[_errors_as_agentgym], client_max_size=MAX_REQUEST_BYTES
        )
        self.application.add_routes(
            [
                web.get("/", self._hello),
                web.post("/create", self._create),
                web.post("/reset", self._reset),
                web.post("/step", self._step),
                web.post("/close", self._close),
                web.get("/observation", self._observation),
            ]
        )
        self.application.on_shutdown.append(self._end_all)

    async def _hello(self, _: web.Request) -> web.Response:
        """Answer with a sentence that names the environment."""
        return web.json_response(f"This is environment {self._environment.facts.name}.")

    async def _create(self, _: web.Request) -> web.Response:
        """Open a session, and answer with its number; status 503 if all sessions are open."""
        if len(self._open) >= self._limits.sessions:
            message = f"all {self._limits.sessions} sessions are open"
            return web.json_response({"error": message}, status=503)
        number = next(self._numbers)
        session = Session(self._environment, self._calls)
        self._open[number] = _OpenSession(session, self._start_idle_timer(number))
        return web.json_response({"id": number})

    async def _reset(self, request: web.Request) -> web.Response:
        """Begin an episode of a session, and answer with its first observation and the rules."""
        fields = await _fields(request)
        item = whole_number(fields, "data_idx")
        member = self._members[item % len(self._members)]
        async with self._locked_session(fields) as opened:
            seen = await opened.session.reset({"seed": item, "task": member})
            opened.observation = seen.text
        rules = self._environment.rules()
        return web.json_response(answer_of(seen, 0.0, task_description=rules))

    async def _step(self, request: web.Request) -> web.Response:
        """Take an action in a session, and answer with the observation and the sum of the episode's
        rewards so far.
        """
        fields = await _fields(request)
        async with self._locked_session(fields) as opened:
            seen = await opened.session.step(fields)
            opened.observation = seen.text
        return web.json_response(answer_of(seen, opened.session.score))

    async def _close(self, request: web.Request) -> web.Response:
        """Close a session, and answer whether it was open."""
        fields = await _fields(request)
        number = self._number(fields)
        if number is not None:
            self._end(number)
        return web.json_response(number is not None)

    async def _observation(self, request: web.Request) -> web.Response:
        """Answer with the last observation of a session."""
        text = request.query.get("id", "")
        # A query has text. `int` would also read " 1" and "1_0" as numbers, so the text is looked
        # up among those of the open sessions, and `_find` refuses any other.
        numbers = {str(number): number for number in self._open}
        opened = self._find({"id": numbers.get(text, text)})
        return web.json_response(opened.observation)

    def _find(self, fields: dict[str, Any]) -> _OpenSession:
        """Return the session of a request, and restart its idle timer.

        Raises:
            BadRequest: there is no such session, or it was closed.
        """
        number = self._number(fields)
        if number is None:
            given = fields.get("id")
            raise BadRequest(f"there is no environment {given!r:.60}: it was closed, or was idle")
        opened = self._open[number]
        opened.closes.cancel()
        opened.closes = self._start_idle_timer(number)
        return opened

    def _number(self, fields: dict[str, Any]) -> int | None:
        """Return the number of the open session that a request names; None if there is none."""
        number = fields.get("id")
        # JSON's `true` is an `int` that is equal to 1.
        if isinstance(number, int) and not isinstance(number, bool) and number in self._open:
            return number
        return None

    @asynccontextmanager
    async def _locked_session(self, fields: dict[str, Any]) -> AsyncIterator[_OpenSession]:
        """Wait until earlier requests of the session are answered, and lock the session for the
        `with` block.

        Raises:
            BadRequest: there is no such session, or it was closed, perhaps during the wait.
        """
        async with self._find(fields).turn:
            # Look the session up again: it may have been closed during the wait, and nothing would
            # close an episode that begins after that.
            yield self._find(fields)

    def _start_idle_timer(self, number: int) -> asyncio.TimerHandle:
        """Start the idle timer of a session."""
        loop = asyncio.get_running_loop()
        return loop.call_later(self._limits.idle_s, self._end_idle, number)

    def _end_idle(self, number: int) -> None:
        """Close a session that is idle, unless it is answering a request."""
        if self._open[number].turn.locked():
            self._open[number].closes = self._start_idle_timer(number)
        else:
            self._end(number)

    def _end(self, number: int) -> None:
        """Close a session."""
        ended = self._open.pop(number)
        ended.closes.cancel()
        ended.session.end()

    async def _end_all(self, _: web.Application) -> None:
        """Close all sessions."""
        for number in tuple(self._open):
            self._end(number)


@web.middleware
async def _errors_as_agentgym(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse pages of other sites; answer errors as AgentGym's servers do, with status 200 and the
    field `error`.
    """
    refuse_other_sites(request)
    try:
        return await handler(request)
    except (BadRequest, EnvironmentFault) as error:
        return web.json_response({"error": str(error)})


async def _fields(request: web.Request) -> dict[str, Any]:
    """Return the fields of a request.

    Raises:
        BadRequest: the request is no object.
    """
    try:
        fields = json.loads(await request.read())
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise BadRequest(f"the request is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadRequest("a request must be an object")
    return fields
