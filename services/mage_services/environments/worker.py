"""One worker process as its actor sees it: started when it is needed, and again when it has died.

An episode's object lives in one process from its first call to its last. A process that dies takes
its episodes with it: the calls under way fail, and so do later calls of those episodes.
"""

import asyncio
from dataclasses import dataclass, field
from itertools import count

from mage_async.environments.hosted.user_object import Answered, Hosted, Origin, Request
from mage_async.errors import CallFault, CapacityFault
from mage_services.environments.messages import (
    Abandon,
    Abandoned,
    Failed,
    Made,
    Make,
    Ready,
    packed,
    unpacked,
)
from mage_services.processes.paired_process import PairedProcess

MODULE = "mage_services.environments.worker_process"
START_S = 120.0
"""A process that has not begun to serve by then is killed."""
STUCK_S = 1.0
"""A process that does not answer for so long is held up by code that lets nothing else run."""


@dataclass(slots=True, eq=False)
class _Life:
    """One process, from its start to its end."""

    process: PairedProcess
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: "dict[int, asyncio.Future[Made | Failed | Abandoned]]" = field(default_factory=dict)
    is_stuck: bool = False
    end: str = ""
    """How the process ended; empty while it lives."""


class Worker:
    """A process, and the episodes that it holds.

    Cancellation of any method leaves the process running; `close` ends it.
    """

    def __init__(self) -> None:
        self._life: _Life | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._numbers = count()
        self._plays: dict[Hosted, tuple[_Life, int]] = {}

    async def begin(self, hosted: Hosted, place: str) -> None:
        """Take an episode on, and see to it that a process serves.

        Raises:
            CallFault: none could be started; it begins with the place of the first call.
        """
        async with self._starting:
            if self._life is None or self._life.end:
                await self._start(place)
        assert self._life is not None
        self._plays[hosted] = self._life, next(self._numbers)

    async def perform(self, hosted: Hosted, request: Request) -> Answered:
        """Make a call. Cancellation abandons the call.

        Raises:
            CallFault: the call failed, or its process has ended.
        """
        if hosted not in self._plays:  # no process was started for the episode
            return Answered()
        life, play = self._plays[hosted]
        if request.method == "close":
            del self._plays[hosted]
        if life.end:
            return self._mourned(request, life)
        assert hosted.rules.origin is not None, "a class made here alone is played here alone"
        origin: Origin = hosted.rules.origin
        number = next(self._numbers)
        make = Make(
            number=number,
            play=play,
            name=origin.name,
            options=dict(origin.options),
            request=request,
        )
        try:
            answer = await self._asked(life, number, make)
        except asyncio.CancelledError:
            life.process.say(packed(Abandon(number=number)))
            raise
        if answer is None:
            return self._mourned(request, life)
        if isinstance(answer, Failed):
            raise (CapacityFault if answer.is_for_room else CallFault)(answer.sentence)
        assert isinstance(answer, Made)
        return answer.answered

    async def look_after(self, hosted: Hosted) -> None:
        """A call of this episode took too long: a process that is stuck is killed."""
        if hosted not in self._plays:
            return
        life, _ = self._plays[hosted]
        if life.end:
            return
        number = next(self._numbers)
        try:
            async with asyncio.timeout(STUCK_S):
                await self._asked(life, number, Abandon(number=number))
        except TimeoutError:
            life.is_stuck = True
            life.process.kill()

    async def close(self) -> None:
        """End the process, with whatever it started."""
        if self._keeping is not None and self._life is not None:
            self._life.process.kill()
            await self._keeping

    async def _asked(
        self, life: _Life, number: int, message: Make | Abandon
    ) -> Made | Failed | Abandoned | None:
        """The answer to a message; None where the process ended first."""
        answer = life.waiting[number] = asyncio.get_running_loop().create_future()
        life.process.say(packed(message))
        try:
            return await answer
        finally:
            life.waiting.pop(number, None)

    def _mourned(self, request: Request, life: _Life) -> Answered:
        """What died with a process needs no closing; all else is a fault."""
        if request.method == "close":
            return Answered()
        raise CallFault(f"{request.place}: the worker process of the episode {life.end}")

    async def _start(self, place: str) -> None:
        process = await PairedProcess.begin(MODULE, {})
        life = self._life = _Life(process)
        self._keeping = asyncio.ensure_future(self._keep(life))
        try:
            async with asyncio.timeout(START_S):
                await life.is_ready.wait()
        except TimeoutError:
            process.kill()
            raise CallFault(
                f"{place}: a worker process did not start within {START_S:g} s"
            ) from None
        if life.end:
            raise CallFault(f"{place}: a worker process {life.end} as it started")

    async def _keep(self, life: _Life) -> None:
        """Hear a process until its end, then tell all that wait for it."""
        hearing = asyncio.ensure_future(self._hear(life))
        end = await life.process.wait()
        life.process.kill()  # what it had started, and what may hold its socket open
        await hearing
        life.end = f"did not answer for {STUCK_S:g} s and was killed" if life.is_stuck else end
        life.is_ready.set()
        for answer in life.waiting.values():
            if not answer.done():
                answer.set_result(None)

    async def _hear(self, life: _Life) -> None:
        while (body := await life.process.hear()) is not None:
            message = unpacked(body)
            if isinstance(message, Ready):
                life.is_ready.set()
            elif isinstance(message, Made | Failed | Abandoned):
                answer = life.waiting.get(message.number)
                if answer is not None and not answer.done():
                    answer.set_result(message)
