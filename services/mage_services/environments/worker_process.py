"""Run a worker process, which makes an actor's calls of objects of users' classes.

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
from mage_async.errors import CallFault, MageError, NoRoom
from mage_services.environments import worker_pool
from mage_services.environments.call_runner import CallRunner
from mage_services.processes.child_process import Channel, die_with_parent, inherited_socket


class Server:
    """Makes the calls of the episodes that this process holds."""

    def __init__(self, channel: Channel[worker_pool.Message], calls: CallRunner) -> None:
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
        self._channel.send(worker_pool.Ready())
        async with asyncio.TaskGroup() as group:
            async for message in self._channel.messages():
                if isinstance(message, worker_pool.Abandon):
                    if task := self._tasks.get(message.number):
                        task.cancel()
                    self._channel.send(worker_pool.Abandoned(number=message.number))
                elif isinstance(message, worker_pool.Make):
                    task = group.create_task(self._make(message))
                    self._tasks[message.number] = task
            for task in self._tasks.values():
                task.cancel()

    async def _make(self, message: worker_pool.Make) -> None:
        """Answer one call. Cancellation abandons it."""
        number = message.number
        try:
            call = Call(self._object(message), message.request)
            answered = await self._calls.perform(call)
            answer: worker_pool.Answer = worker_pool.Made(number=number, answered=answered)
        except MageError as fault:
            answer = worker_pool.Failed(
                number=number,
                sentence=str(fault),
                kind=fault.kind if isinstance(fault, CallFault) else "",
                is_for_room=isinstance(fault, NoRoom),
            )
        finally:
            del self._tasks[number]
        self._channel.send(answer)

    def _object(self, message: worker_pool.Make) -> UserObject:
        """Return the object of an episode; the last call, `close`, removes it."""
        user_object = self._objects.pop(message.episode, None) or UserObject(self._loaded(message))
        if message.request.method != "close":
            self._objects[message.episode] = user_object
        return user_object

    def _loaded(self, message: worker_pool.Make) -> ResetStep:
        """Return an environment, which is loaded once: a loader may take long."""
        key = msgspec.msgpack.encode((message.name, message.options))
        if key not in self._environments:
            environment = load(message.name, **message.options)
            assert isinstance(environment, ResetStep)
            self._environments[key] = environment
        return self._environments[key]


async def _main() -> None:
    end = inherited_socket()
    assert end is not None, "an actor starts this process"
    channel: Channel[worker_pool.Message] = await Channel.over(end, worker_pool.Message)
    async with CallRunner() as calls:
        await Server(channel, calls).serve()


if __name__ == "__main__":
    die_with_parent()
    try:
        asyncio.run(_main())
    except ExceptionGroup:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # without waiting for a thread of the class that hangs
