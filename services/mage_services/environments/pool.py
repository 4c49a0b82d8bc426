"""The pool of worker processes: which of them plays an episode."""

import asyncio
from collections import Counter

from mage_async.environments.hosted.user_object import Answered, Hosted, Request
from mage_services.environments.worker import Worker


class Pool:
    """So many worker processes; an episode goes to the one that plays the fewest.

    Processes are started when they are needed, and again after they have died.
    """

    def __init__(self, size: int) -> None:
        self._workers = [Worker() for _ in range(size)]
        self._homes: dict[Hosted, Worker] = {}
        self._num_plays: Counter[Worker] = Counter()

    async def admit(self, hosted: Hosted, request: Request) -> None:
        """See to it that a process serves an episode, before its first call.

        Raises:
            CallFault: none could be started.
        """
        if hosted in self._homes or request.method == "close":
            return
        worker = min(self._workers, key=self._num_plays.__getitem__)
        self._homes[hosted] = worker
        self._num_plays[worker] += 1
        await worker.begin(hosted, request.place)

    async def perform(self, hosted: Hosted, request: Request) -> Answered:
        """Make a call. Cancellation abandons the call.

        Raises:
            CallFault: the call failed, or its process has ended.
        """
        if hosted not in self._homes:
            return Answered()  # closed before its first call was made
        worker = self._homes[hosted]
        if request.method == "close":
            del self._homes[hosted]
            self._num_plays[worker] -= 1
        return await worker.perform(hosted, request)

    async def look_after(self, hosted: Hosted) -> None:
        """A call of this episode took too long: see whether its process still answers."""
        if hosted in self._homes:
            await self._homes[hosted].look_after(hosted)

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(worker.close() for worker in self._workers))
