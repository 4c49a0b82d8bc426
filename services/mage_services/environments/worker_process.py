"""A worker process: makes an actor's calls into users' classes. `python -m … FD`, under an actor.

task        waits for               then
serve       the actor's messages    makes a call, abandons one
call N      a thread, a coroutine   answers

The process ends with its actor, by the socket and by the kernel's help. What a class prints goes
where the actor's own words go.
"""

import asyncio
import os
import socket
import sys
import traceback

import msgspec

from mage_async.environments.calls import Call
from mage_async.environments.catalogue import load
from mage_async.environments.hosted.user_object import Hosted, HostedClass
from mage_async.environments.reset_step import ResetStep
from mage_async.errors import CapacityFault, MageError
from mage_services.environments.messages import (
    Abandon,
    Abandoned,
    Failed,
    Made,
    Make,
    Message,
    Ready,
    packed,
    unpacked,
)
from mage_services.environments.workers import Workers
from mage_services.processes import paired_process
from mage_services.processes.parent_death_signal import PARENT, die_with_parent


class Server:
    """Makes the calls of the episodes that were given to this process."""

    def __init__(self, writer: asyncio.StreamWriter, workers: Workers) -> None:
        self._writer, self._workers = writer, workers
        self._classes: dict[bytes, HostedClass] = {}
        self._plays: dict[int, Hosted] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Take messages until the actor's end closes. Cancellation abandons calls under way.

        Raises:
            ExceptionGroup: what no call may raise, so that the process ends and its episodes with
                it, instead of leaving the actor to its deadline.
        """
        self._say(Ready())
        async with asyncio.TaskGroup() as group:
            while (body := await paired_process.read(reader)) is not None:
                message = unpacked(body)
                if isinstance(message, Abandon):
                    if task := self._tasks.get(message.number):
                        task.cancel()
                    self._say(Abandoned(number=message.number))
                elif isinstance(message, Make):
                    task = group.create_task(self._make(message))
                    self._tasks[message.number] = task
            for task in self._tasks.values():
                task.cancel()

    async def _make(self, message: Make) -> None:
        """Answer one call. Cancellation abandons it."""
        try:
            call = Call(self._hosted(message), message.request, lambda answered: None)
            self._say(Made(number=message.number, answered=await self._workers.perform(call)))
        except MageError as fault:
            is_for_room = isinstance(fault, CapacityFault)
            failed = Failed(number=message.number, sentence=str(fault), is_for_room=is_for_room)
            self._say(failed)
        finally:
            del self._tasks[message.number]

    def _hosted(self, message: Make) -> Hosted:
        """The object of an episode, until it is closed."""
        if message.play not in self._plays:
            self._plays[message.play] = Hosted(self._loaded(message))
        is_last = message.request.method == "close"
        return self._plays.pop(message.play) if is_last else self._plays[message.play]

    def _loaded(self, message: Make) -> HostedClass:
        """An environment's class; a loader may take long, so each is loaded once."""
        key = msgspec.msgpack.encode((message.name, message.options))
        if key not in self._classes:
            environment = load(message.name, **message.options)
            assert isinstance(environment, ResetStep)
            self._classes[key] = environment.hosted
        return self._classes[key]

    def _say(self, message: Message) -> None:
        paired_process.write(self._writer, packed(message))


async def _main(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    async with Workers() as workers:
        await Server(writer, workers).serve(reader)


if __name__ == "__main__":
    die_with_parent(int(os.environ[PARENT]))
    own = socket.socket(fileno=int(sys.argv[1]))
    own.set_inheritable(False)  # what a class starts must not keep the socket open
    try:
        asyncio.run(_main(own))
    except ExceptionGroup:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # a thread of the class that hangs keeps nothing alive
