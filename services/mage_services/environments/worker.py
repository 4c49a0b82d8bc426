"""Worker processes of an environment, as their actor sees them: `EnvironmentWorker`, and a pool.

An episode's object lives in one process from its first call to its last. Where the process dies,
the current and all later calls of its episodes fail; it is started again for other episodes.

    actor                 worker process
                     <-   Ready
    Make             ->
                     <-   Made, or Failed
    Abandon          ->                      its Make is not answered any more
                     <-   Abandoned

Results of a user's class were made plain before, so messages hold text, numbers and lists only.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from mage_async.environments.user_calls import Answered, Request
from mage_async.environments.user_class import UserObject
from mage_async.errors import CallFault, CapacityFault
from mage_async.protocol.messages import Fields
from mage_services.processes.child_process import (
    ChildProcess,
    end_in_words,
    module_command,
    waiting_notice,
)


class Ready(Fields):
    """The process accepts calls."""


class Make(Fields):
    """Make a call."""

    number: int
    """Number of the call, unique in the process."""
    play: int
    """Number of the episode whose object is called."""
    name: str
    """Name of the environment, as in the configuration."""
    options: dict[str, Any]
    request: Request


class Made(Fields):
    """The result of a call."""

    number: int
    answered: Answered


class Failed(Fields):
    """A call raised, or returned a wrong value."""

    number: int
    sentence: str
    is_for_room: bool = False
    """Whether a `reset` found no room for another object."""


class Abandon(Fields):
    """Ask to abandon a call: a coroutine is cancelled, a thread is left to itself."""

    number: int


class Abandoned(Fields):
    """The answer to an `Abandon`, which shows that the process is not stuck."""

    number: int


Message = Ready | Make | Made | Failed | Abandon | Abandoned


MODULE = "mage_services.environments.worker_process"
START_S = 120.0
"""A process that is not ready after so long is killed."""
STUCK_S = 1.0
"""A process that does not answer for so long is blocked by a user's code, and is killed."""


@dataclass(slots=True, eq=False)
class _Life:
    """A process from its start to its end."""

    process: ChildProcess[Message]
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: "dict[int, asyncio.Future[Made | Failed | Abandoned]]" = field(default_factory=dict)
    is_stuck: bool = False
    end: str = ""
    """How the process ended; "" while it lives."""


class EnvironmentWorker:
    """A worker process, restarted where it is needed after its death, and its episodes.

    Cancellation of any method leaves the process running; `close` ends it.
    """

    def __init__(self) -> None:
        self._life: _Life | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._numbers = count()
        self._plays: dict[UserObject, tuple[_Life, int]] = {}

    async def begin(self, user_object: UserObject, place: str) -> None:
        """Begin an episode, in a process that is started where none runs.

        Args:
            place: begins the sentence of an error: where the first call is made.

        Raises:
            CallFault: no process could be started.
        """
        async with self._starting:
            if self._life is None or self._life.end:
                await self._start(place)
        assert self._life is not None
        self._plays[user_object] = self._life, next(self._numbers)

    async def perform(self, user_object: UserObject, request: Request) -> Answered:
        """Make a call. Cancellation abandons the call.

        Raises:
            CallFault: the call failed, or its process has ended.
        """
        if user_object not in self._plays:  # no process could be started for the episode
            return Answered()
        life, play = self._plays[user_object]
        if request.method == "close":
            del self._plays[user_object]
        if life.end:
            return self._answer_of_dead(request, life)
        origin = user_object.environment.origin
        assert origin is not None, "a class made here alone is played here alone"
        number = next(self._numbers)
        make = Make(
            number=number,
            play=play,
            name=origin.name,
            options=dict(origin.options),
            request=request,
        )
        try:
            answer = await self._answer_to(life, number, make)
        except asyncio.CancelledError:
            life.process.send(Abandon(number=number))
            raise
        if answer is None:
            return self._answer_of_dead(request, life)
        if isinstance(answer, Failed):
            raise (CapacityFault if answer.is_for_room else CallFault)(answer.sentence)
        assert isinstance(answer, Made)
        return answer.answered

    async def kill_if_stuck(self, user_object: UserObject) -> None:
        """Kill the process of an episode whose call took too long, where the process is stuck."""
        if user_object not in self._plays:
            return
        life, _ = self._plays[user_object]
        if life.end:
            return
        number = next(self._numbers)
        try:
            async with asyncio.timeout(STUCK_S):
                await self._answer_to(life, number, Abandon(number=number))
        except TimeoutError:
            life.is_stuck = True
            life.process.kill()

    async def close(self) -> None:
        """Kill the process and what it started."""
        if self._keeping is not None and self._life is not None:
            self._life.process.kill()
            await self._keeping

    async def _answer_to(
        self, life: _Life, number: int, message: Make | Abandon
    ) -> Made | Failed | Abandoned | None:
        """Send a message, and return the answer; None where the process ended first."""
        answer = life.waiting[number] = asyncio.get_running_loop().create_future()
        life.process.send(message)
        try:
            return await answer
        finally:
            life.waiting.pop(number, None)

    def _answer_of_dead(self, request: Request, life: _Life) -> Answered:
        """Answer a call of an episode whose process has ended: `close` has nothing to do."""
        if request.method == "close":
            return Answered()
        raise CallFault(f"{request.place}: the worker process of the episode {life.end}")

    async def _start(self, place: str) -> None:
        process: ChildProcess[Message] = await ChildProcess.start(module_command(MODULE), Message)
        life = self._life = _Life(process)
        self._keeping = asyncio.ensure_future(self._keep(life))
        try:
            with waiting_notice("a worker process of the environment"):
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
        """Receive from a process until its end, then fail all calls that wait for it."""
        receiving = asyncio.ensure_future(self._receive(life))
        end = end_in_words(await life.process.wait())
        life.process.kill()  # what it started may hold its socket open
        await receiving
        life.end = f"did not answer for {STUCK_S:g} s and was killed" if life.is_stuck else end
        life.is_ready.set()
        for answer in life.waiting.values():
            if not answer.done():
                answer.set_result(None)

    async def _receive(self, life: _Life) -> None:
        async for message in life.process.channel.messages():
            if isinstance(message, Ready):
                life.is_ready.set()
            elif isinstance(message, Made | Failed | Abandoned):
                answer = life.waiting.get(message.number)
                if answer is not None and not answer.done():
                    answer.set_result(message)


class Pool:
    """A fixed number of workers; an episode goes to the one that holds the fewest."""

    def __init__(self, size: int) -> None:
        self._workers = [EnvironmentWorker() for _ in range(size)]
        self._worker_of: dict[UserObject, EnvironmentWorker] = {}
        self._num_plays: Counter[EnvironmentWorker] = Counter()

    async def admit(self, user_object: UserObject, request: Request) -> None:
        """Give an episode a worker before its first call.

        Raises:
            CallFault: no process could be started.
        """
        if user_object in self._worker_of or request.method == "close":
            return
        worker = min(self._workers, key=self._num_plays.__getitem__)
        self._worker_of[user_object] = worker
        self._num_plays[worker] += 1
        await worker.begin(user_object, request.place)

    async def perform(self, user_object: UserObject, request: Request) -> Answered:
        """Make a call. Cancellation abandons the call.

        Raises:
            CallFault: the call failed, or its process has ended.
        """
        if user_object not in self._worker_of:
            return Answered()  # closed before its first call
        worker = self._worker_of[user_object]
        if request.method == "close":
            del self._worker_of[user_object]
            self._num_plays[worker] -= 1
        return await worker.perform(user_object, request)

    async def kill_if_stuck(self, user_object: UserObject) -> None:
        """Check the process of an episode whose call took too long; see `EnvironmentWorker`."""
        if user_object in self._worker_of:
            await self._worker_of[user_object].kill_if_stuck(user_object)

    async def close(self) -> None:
        """Kill all processes."""
        await asyncio.gather(*(worker.close() for worker in self._workers))
