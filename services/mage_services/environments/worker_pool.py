"""Call objects of users' classes in worker processes of an actor.

An episode's object lives in one process from its first call to its last. If the process dies, the
current and all later calls of its episodes fail; another process is started for other episodes.

    actor                 worker process
                     <-   Ready
    Make             ->                      requests one call of an episode's object
                     <-   Made, or Failed
    Abandon          ->                      says that the answer to a Make is no longer needed
                     <-   Abandoned

A message holds text, numbers and lists only: `UserObject` converts what a class returns.

`WorkerPool` runs in the actor. `Server` and all below it run in the worker process, which ends with
its actor. Text that a class prints goes to the actor's log.
"""

import asyncio
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Self

import msgspec

from mage_async.environments.catalogue import load
from mage_async.environments.user_calls import Call, MethodResult, Request
from mage_async.environments.user_class import ResetStep, UserObject
from mage_async.errors import CallFault, MageError, NoRoom, WireError, error_text
from mage_async.protocol.messages import Fields
from mage_services.processes.child_process import (
    Channel,
    ChildProcess,
    die_with_parent,
    end_in_words,
    inherited_socket,
    module_command,
    settle,
    waiting_notice,
)
from mage_services.processes.process import go_on_without_log

if TYPE_CHECKING:
    from mage_services.environments.call_runner import CallRunner

MODULE = "mage_services.environments.worker_pool"
"""This module, which the process runs."""
START_S = 120.0
"""Seconds for which one call waits until a process is ready; then the process is killed."""
REPORTED_FAULT = f"reported a fault of its infrastructure, by exit code {os.EX_TEMPFAIL}"
"""Text for the end of a process whose class called `os._exit(os.EX_TEMPFAIL)`. `sysexits.h` defines
this code for temporary failures; like `Fault`, it says that the infrastructure is to blame."""
STUCK_S = 1.0
"""Seconds without an answer after which a process is killed: a user's code blocks it."""


class Ready(Fields):
    """Report that the process accepts calls."""


class Make(Fields):
    """Make one call (`reset`, `step` or `close`) of an episode's object; `reset` creates it."""

    number: int
    """Number of the call, unique in the process."""
    episode: int
    """Number of the episode whose object is called."""
    name: str
    """Name of the environment, as in the configuration."""
    options: dict[str, Any]
    request: Request


class Made(Fields):
    """Return the result of a call, by the number of its `Make`."""

    number: int
    answered: MethodResult


class Failed(Fields):
    """Report that a call raised, or returned a wrong value."""

    number: int
    sentence: str
    kind: str = ""
    """See `EnvironmentFault.kind`."""
    mistake: str = ""
    """See `EnvironmentFault.mistake`."""
    found_no_room: bool = False
    """Whether a `reset` found no room for another object of the class (`NoRoom`)."""


class Abandon(Fields):
    """Abandon a call: a coroutine is cancelled, a thread goes on until its function returns."""

    number: int


class Abandoned(Fields):
    """Answer an `Abandon`, which shows that the process is not stuck."""

    number: int


Message = Ready | Make | Made | Failed | Abandon | Abandoned
Answer = Made | Failed | Abandoned


class WorkerProcess:
    """Send calls to a worker process and receive its answers, from its start to its end.

    Attributes:
        is_ready: set once the process accepts calls, or has ended.
        end: how the process ended, such as "ended with exit code 1"; empty while it runs.
    """

    def __init__(self, process: ChildProcess[Message]) -> None:
        self._process = process
        self._waiting: dict[int, asyncio.Future[Answer | None]] = {}
        self._why_killed = ""
        self.is_ready, self.end = asyncio.Event(), ""
        self._receiving = asyncio.create_task(self._receive_until_end())

    @classmethod
    async def start(cls) -> Self:
        """Start a process, which is not ready yet."""
        return cls(await ChildProcess[Message].start(module_command(MODULE), Message))

    async def answer_to(self, message: Make | Abandon) -> Answer | None:
        """Send a message, and return the answer to its number; `None` if the process has ended."""
        if self.end:
            return None
        answer: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._waiting[message.number] = answer
        self._process.send(message)
        try:
            return await answer
        finally:
            self._waiting.pop(message.number, None)

    def abandon(self, number: int) -> None:
        """Abandon a call without waiting for the answer."""
        self._process.send(Abandon(number=number))

    async def kill_if_stuck(self, number: int) -> None:
        """Kill the process if it does not answer a message within `STUCK_S`.

        Args:
            number: number for the message, which no call has.
        """
        try:
            async with asyncio.timeout(STUCK_S):
                await self.answer_to(Abandon(number=number))
        except TimeoutError:
            self._why_killed = f"did not answer for {STUCK_S:g} s and was killed"
            await self.close()

    async def close(self) -> None:
        """Kill the process and its descendants."""
        self._process.kill()
        await self._receiving

    async def _receive_until_end(self) -> None:
        """Receive from the process until its end, then fail all calls that wait for it."""
        receiving = asyncio.create_task(self._receive())
        code = await self._process.wait()
        end = REPORTED_FAULT if code == os.EX_TEMPFAIL else end_in_words(code)
        self._process.kill()  # what the process started may hold its socket open
        await receiving
        self.end = self._why_killed or end
        self.is_ready.set()
        for answer in self._waiting.values():
            settle(answer, None)

    async def _receive(self) -> None:
        """Hand each answer to the call that waits for it, until the process ends. A process that
        sends something else, as a child that the class forked may, is killed.
        """
        try:
            async for message in self._process.channel.messages():
                if isinstance(message, Ready):
                    self.is_ready.set()
                elif isinstance(message, Answer) and message.number in self._waiting:
                    settle(self._waiting[message.number], None, message)
        except WireError as fault:
            self._why_killed = f"sent a message that cannot be read, and was killed: {fault}"
            self._process.kill()


@dataclass(slots=True, eq=False)
class _Slot:
    """Keep one process of the pool running: start it when needed, and again after its death."""

    process: WorkerProcess | None = None
    num_episodes: int = 0
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def running(self, where: str) -> WorkerProcess:
        """Return the process once it is ready; start one if none runs. If the call is cancelled, a
        process that is still starting serves the next call.

        Args:
            where: place of the first call of an episode, with which an error message begins.

        Raises:
            CallFault: no process could be started.
        """
        async with self.starting:
            if self.process is None or self.process.end:
                try:
                    self.process = await WorkerProcess.start()
                except OSError as error:  # no room for a process or its socket
                    why = f"a worker process could not be started: {error}"
                    raise CallFault(f"{where}: {why}") from error
            process = self.process
            try:
                with waiting_notice("a worker process of the environment"):
                    async with asyncio.timeout(START_S):
                        await process.is_ready.wait()
            except TimeoutError:
                await process.close()
                why = f"did not start within {START_S:g} s"
                raise CallFault(f"{where}: a worker process {why}") from None
            if process.end:
                raise CallFault(f"{where}: a worker process {process.end} as it started")
        return process


@dataclass(slots=True)
class _Episode:
    """Hold the slot and the process of an episode that has begun."""

    number: int
    slot: _Slot
    process: WorkerProcess | None = None
    """`None` if no process could be started."""


class WorkerPool:
    """Call users' objects in a fixed number of worker processes; an episode goes to the process
    that holds the fewest.

    Cancellation of any method leaves the processes running; `close` ends them.

    Args:
        say: called with a note on each class that was edited before a process was started again.
    """

    def __init__(self, size: int, say: Callable[[str], None]) -> None:
        self._say, self._sources = say, dict[str, str]()
        self._slots = [_Slot() for _ in range(size)]
        self._episodes: dict[UserObject, _Episode] = {}
        self._numbers = count()

    async def admit(self, user_object: UserObject, request: Request) -> None:
        """Give an episode a process before its first call.

        This is no part of `perform`, so that the start of a process does not count against the
        deadline of the call.

        Raises:
            CallFault: no process could be started.
        """
        if user_object in self._episodes or request.method == "close":
            return
        slot = min(self._slots, key=lambda slot: slot.num_episodes)
        slot.num_episodes += 1
        episode = self._episodes[user_object] = _Episode(next(self._numbers), slot)
        before = slot.process
        episode.process = await slot.running(request.place)
        if episode.process is not before:
            self._note_edits(user_object.environment)

    def _note_edits(self, environment: ResetStep) -> None:
        """Note a class that was edited since a process was started for it before."""
        # A worker process imports this module, and needs no configuration.
        from mage_async.assembly import edit_notes, source_digests

        now = source_digests([environment.origin.name] if environment.origin else [])
        for text in edit_notes(self._sources, now):
            self._say(text)
        self._sources |= now

    async def perform(self, user_object: UserObject, request: Request) -> MethodResult:
        """Make a call. Cancellation abandons the call.

        Raises:
            CallFault: the call failed, or its process has ended.
        """
        episode = self._episodes.get(user_object)
        if episode is None:
            return MethodResult()  # closed before its first call, or never begun
        if request.method == "close":
            del self._episodes[user_object]
        try:
            return await self._perform(episode, user_object, request)
        finally:
            # Counted until `close` has returned, so that no new episode goes to a process in which
            # `close` blocks.
            if request.method == "close":
                episode.slot.num_episodes -= 1

    async def _perform(
        self, episode: _Episode, user_object: UserObject, request: Request
    ) -> MethodResult:
        """Make a call in the process of its episode; see `perform`."""
        if (process := episode.process) is None:
            return MethodResult()
        origin = user_object.environment.origin
        assert origin is not None, (
            "an environment without an origin cannot be loaded by a worker process"
        )
        make = Make(
            number=next(self._numbers),
            episode=episode.number,
            name=origin.name,
            options=dict(origin.options),
            request=request,
        )
        try:
            answer = await process.answer_to(make)
        except asyncio.CancelledError:
            process.abandon(make.number)
            raise
        if isinstance(answer, Made):
            return answer.answered
        if isinstance(answer, Failed):
            kind = NoRoom if answer.found_no_room else CallFault
            raise kind(answer.sentence, answer.kind, answer.mistake)
        if request.method == "close":  # the process has ended, and the object with it
            return MethodResult()
        raise CallFault(
            f"{request.place}: the worker process of the episode {process.end}",
            kind=f"worker process {process.end}",
        )

    def process_of(self, user_object: UserObject) -> WorkerProcess | None:
        """Return the process of an episode; `None` for an episode that has none."""
        episode = self._episodes.get(user_object)
        return None if episode is None else episode.process

    async def kill_if_stuck(self, process: WorkerProcess) -> None:
        """Kill a process in which a call took too long, if the process is stuck."""
        await process.kill_if_stuck(next(self._numbers))

    async def close(self) -> None:
        """Kill all processes."""
        processes = [slot.process for slot in self._slots if slot.process is not None]
        await asyncio.gather(*(process.close() for process in processes))


class Server:
    """Make the calls of the episodes that this process holds.

    task        waits for               then
    serve       the actor's messages    makes a call, or abandons one
    call N      a thread, a coroutine   answers
    """

    def __init__(self, channel: Channel[Message], calls: "CallRunner") -> None:
        self._channel, self._calls = channel, calls
        self._environments: dict[bytes, ResetStep] = {}
        self._objects: dict[int, UserObject] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Serve messages until the actor ends. Cancellation abandons the current calls.

        Raises:
            ExceptionGroup: an error that no call may raise. The process ends with it, and its
                episodes too, so that the actor need not wait for its deadline.
        """
        self._channel.send(Ready())
        async with asyncio.TaskGroup() as group:
            async for message in self._channel.messages():
                if isinstance(message, Abandon):
                    if task := self._tasks.get(message.number):
                        task.cancel()
                    self._channel.send(Abandoned(number=message.number))
                elif isinstance(message, Make):
                    task = group.create_task(self._make(message))
                    self._tasks[message.number] = task
            for task in self._tasks.values():
                task.cancel()

    async def _make(self, message: Make) -> None:
        """Answer one call. Cancellation abandons it."""
        number = message.number
        try:
            call = Call(self._object(message), message.request)
            answered = await self._calls.perform(call)
            answer: Answer = Made(number=number, answered=answered)
        except MageError as fault:
            answer = Failed(
                number=number,
                sentence=error_text(fault),
                kind=fault.kind if isinstance(fault, CallFault) else "",
                mistake=fault.mistake if isinstance(fault, CallFault) else "",
                found_no_room=isinstance(fault, NoRoom),
            )
        finally:
            del self._tasks[number]
        self._channel.send(answer)

    def _object(self, message: Make) -> UserObject:
        """Return the object of an episode, created at its first call and forgotten at its last one,
        `close`.
        """
        user_object = self._objects.pop(message.episode, None) or UserObject(self._loaded(message))
        if message.request.method != "close":
            self._objects[message.episode] = user_object
        return user_object

    def _loaded(self, message: Make) -> ResetStep:
        """Return the environment that a message names. Each is loaded once, because a loader may
        take long.
        """
        key = msgspec.msgpack.encode((message.name, message.options))
        if key not in self._environments:
            environment = load(message.name, **message.options)
            assert isinstance(environment, ResetStep)
            self._environments[key] = environment
        return self._environments[key]


async def _main() -> None:
    from mage_services.environments.call_runner import CallRunner  # which imports this module

    end = inherited_socket()
    assert end is not None, "an actor starts this process"
    channel: Channel[Message] = await Channel.over(end, Message)
    async with CallRunner() as calls:
        await Server(channel, calls).serve()


if __name__ == "__main__":
    die_with_parent()
    # This process cannot send a note about a full disk. The processes that write the run's files
    # do it.
    go_on_without_log()
    try:
        asyncio.run(_main())
    except ExceptionGroup:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # without waiting for a thread of the class that hangs
