"""Weights on their way to the engines: written and announced beside the training.

    task       waits for      then
    publish    a snapshot     writes it, announces it
               the journal    removes versions without a lease

A restarted learner looks for the weights of every rival that its journal names, so none are removed
before the journal holds durably that they are not needed.

The trainer makes a snapshot and goes on; it waits here only while the one before is still being
written, never for an actor. A version is offered when its commit is durable, so every announced
version can be computed again.
"""

import asyncio

from mage_async.policy.snapshot import Snapshot
from mage_services.learner.coordinator import Coordinator
from mage_services.weights.weight_store import WeightStore


class Publisher:
    """See the module; `run` is its task."""

    def __init__(self, weights: WeightStore, coordinator: Coordinator) -> None:
        self._weights, self._coordinator = weights, coordinator
        self._offered: tuple[Snapshot, str] | None = None
        self._changed = asyncio.Condition()

    async def wait_until_announced(self) -> None:
        """Wait until every version offered so far is announced. Cancellation leaves nothing."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._offered is None)

    async def offer(self, snapshot: Snapshot, digest: str) -> None:
        """Have a version published; the one before must be announced."""
        async with self._changed:
            assert self._offered is None, "two versions are being published at once"
            self._offered = snapshot, digest
            self._changed.notify_all()

    async def run(self) -> None:
        """Publish what is offered. Cancellation lets a write that has begun finish, unheard.

        Raises:
            RunError: weights could not be written.
        """
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._offered is not None)
            assert self._offered is not None
            await self._publish(*self._offered)
            async with self._changed:
                self._offered = None
                self._changed.notify_all()

    async def _publish(self, snapshot: Snapshot, digest: str) -> None:
        weights, coordinator = self._weights, self._coordinator
        is_rival = coordinator.league.takes(snapshot.version)
        await weights.write(snapshot, is_durable=is_rival)
        coordinator.announce(weights.publication(snapshot.version, digest))
        if unused := coordinator.unused(await weights.versions()):
            await coordinator.journal.settled()
            await weights.remove(unused)
