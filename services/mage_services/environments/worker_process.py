"""The program of a worker process, which makes an actor's calls into users' classes.

task        waits for               then
serve       the actor's messages    makes a call, or abandons one
call N      a thread, a coroutine   answers

The process ends with its actor. What a class prints goes to the actor's log.
"""

import asyncio
import os
import traceback

import msgspec

from mage_async.environments.catalogue import load
from mage_async.environments.user_calls import Call
from mage_async.environments.user_class import ResetStep, UserObject
from mage_async.errors import CapacityFault, MageError
from mage_services.environments.worker import (
    Abandon,
    Abandoned,
    Failed,
    Made,
    Make,
    Message,
    Ready,
)
from mage_services.environments.workers import Workers
from mage_services.processes.child_process import Channel, die_with_parent, inherited_socket


class Server:
    """Makes the calls of the episodes that this process holds."""

    def __init__(self, channel: Channel[Message], workers: Workers) -> None:
        self._channel, self._workers = channel, workers
        self._classes: dict[bytes, ResetStep] = {}
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
        try:
            call = Call(self._object(message), message.request)
            self._channel.send(
                Made(number=message.number, answered=await self._workers.perform(call))
            )
        except MageError as fault:
            is_for_room = isinstance(fault, CapacityFault)
            failed = Failed(number=message.number, sentence=str(fault), is_for_room=is_for_room)
            self._channel.send(failed)
        finally:
            del self._tasks[message.number]

    def _object(self, message: Make) -> UserObject:
        """Return the object of an episode; the last call, `close`, removes it."""
        if message.play not in self._objects:
            self._objects[message.play] = UserObject(self._loaded(message))
        is_last = message.request.method == "close"
        return self._objects.pop(message.play) if is_last else self._objects[message.play]

    def _loaded(self, message: Make) -> ResetStep:
        """Return the class of an environment, which is loaded once: a loader may take long."""
        key = msgspec.msgpack.encode((message.name, message.options))
        if key not in self._classes:
            environment = load(message.name, **message.options)
            assert isinstance(environment, ResetStep)
            self._classes[key] = environment
        return self._classes[key]


async def _main() -> None:
    end = inherited_socket()
    assert end is not None, "an actor starts this process"
    channel: Channel[Message] = await Channel.over(end, Message)
    async with Workers() as workers:
        await Server(channel, workers).serve()


if __name__ == "__main__":
    die_with_parent()
    try:
        asyncio.run(_main())
    except ExceptionGroup:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # without waiting for a thread of the class that hangs
