"""A server of one environment over AgentGym's HTTP: `create` opens a session, `close` ends it.

Fields are those of AgentGym's BabyAI and SciWorld servers, so programs written for those play here.
A data item is a member: first those to train on, then the held-out ones, and so on around. HTTP has
no connection that could break, so a session without a request for `idle_s` is closed.
"""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

from mage_async.environments.environment import Environment
from mage_async.environments.loaders.agentgym_messages import answer_of
from mage_async.errors import EnvironmentFault
from mage_services.environments.workers import Workers
from mage_services.serving.serve import Limits, refuse_other_sites
from mage_services.serving.session import BadRequest, Json, Session, whole

MAX_REQUEST_BYTES = 2**20


@dataclass(slots=True)
class _Open:
    """An open session."""

    session: Session
    closes: asyncio.TimerHandle
    """Closes the session, where no request comes before."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Requests are answered one after the other."""
    observation: str = ""


class AgentGymServer:
    """Answers requests; its `application` is run by `serve`."""

    def __init__(self, environment: Environment, limits: Limits, workers: Workers) -> None:
        self._environment, self._limits, self._workers = environment, limits, workers
        self._members = (*environment.members("train"), *environment.members("heldout"))
        self._numbers = itertools.count()
        self._open: dict[int, _Open] = {}
        self.application = web.Application(
            middlewares=[_guarded], client_max_size=MAX_REQUEST_BYTES
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
        self.application.on_shutdown.append(self._close_all)

    async def _hello(self, _: web.Request) -> web.Response:
        return web.json_response(f"This is environment {self._environment.facts.name}.")

    async def _create(self, _: web.Request) -> web.Response:
        if len(self._open) >= self._limits.sessions:
            said = f"all {self._limits.sessions} sessions are open"
            return web.json_response({"error": said}, status=503)
        number = next(self._numbers)
        session = Session(self._environment, self._workers)
        self._open[number] = _Open(session, self._alarm(number))
        return web.json_response({"id": number})

    async def _reset(self, request: web.Request) -> web.Response:
        asked = await _fields(request)
        item, found = whole(asked, "data_idx"), self._found(asked)
        member = self._members[item % len(self._members)]
        async with found.turn:
            seen = await found.session.reset({"seed": item, "task": member})
            found.observation = seen.said
        rules = self._environment.rules()
        return web.json_response(answer_of(seen, 0.0, task_description=rules))

    async def _step(self, request: web.Request) -> web.Response:
        asked = await _fields(request)
        found = self._found(asked)
        async with found.turn:
            seen = await found.session.step(asked)
            found.observation = seen.said
        return web.json_response(answer_of(seen, found.session.score))

    async def _close(self, request: web.Request) -> web.Response:
        asked = await _fields(request)
        number = asked.get("id")
        if is_open := number in self._open:
            self._end(number)
        return web.json_response(is_open)

    async def _observation(self, request: web.Request) -> web.Response:
        number = request.query.get("id", "")
        found = self._found({"id": int(number) if number.isdigit() else number})
        return web.json_response(found.observation)

    def _found(self, asked: Json) -> _Open:
        """The session that is asked; it is kept from being idle."""
        number = asked.get("id")
        if not isinstance(number, int) or number not in self._open:
            raise BadRequest(f"there is no environment {number!r:.60}: it was closed, or was idle")
        found = self._open[number]
        found.closes.cancel()
        found.closes = self._alarm(number)
        return found

    def _alarm(self, number: int) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_later(self._limits.idle_s, self._end_idle, number)

    def _end_idle(self, number: int) -> None:
        """Close a session that is idle; one that is answering a request is not."""
        if self._open[number].turn.locked():
            self._open[number].closes = self._alarm(number)
        else:
            self._end(number)

    def _end(self, number: int) -> None:
        ended = self._open.pop(number)
        ended.closes.cancel()
        ended.session.end()

    async def _close_all(self, _: web.Application) -> None:
        for number in tuple(self._open):
            self._end(number)


@web.middleware
async def _guarded(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse pages of other sites; what is wrong is answered as AgentGym's servers do."""
    refuse_other_sites(request)
    try:
        return await handler(request)
    except (BadRequest, EnvironmentFault) as error:
        return web.json_response({"error": str(error)})


async def _fields(request: web.Request) -> Json:
    """The fields of a request.

    Raises:
        BadRequest: it is no object.
    """
    try:
        fields = json.loads(await request.read())
    except ValueError as error:
        raise BadRequest(f"the request is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadRequest("a request must be an object")
    return fields
