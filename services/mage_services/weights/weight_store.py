"""Weights on their way to the engines: written and announced beside the training.

    task       waits for      then
    publish    a snapshot     writes it, announces it
               the journal    removes what nobody may read any more

A restarted learner looks for the weights of everyone who is a rival by its journal, so none are
removed before that is durable which says that they are not needed.

The trainer makes a snapshot and goes on; it waits here only while the one before is still being
written, never for an actor. A version is offered when its commit is durable, so whoever hears of it
hears of something that can be computed again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from mage_async.config.schema import Config
from mage_async.policy.checkpoint import writing
from mage_async.policy.snapshot import Snapshot
from mage_async.protocol.messages import Publication
from mage_async.results.durable_files import sync
from mage_async.results.run_directory import RunDirectory
from mage_services.weights.weight_sender import WeightSender


class WeightTransport(Protocol):
    """Where published versions lie until no lease is left."""

    def write(self, snapshot: Snapshot) -> Path:
        """Put a version there; returns the path that is announced."""
        ...

    def file(self, version: int) -> Path:
        """The path under which a version is announced."""
        ...

    def versions(self) -> list[int]:
        """The versions that are there, oldest first."""
        ...

    def remove(self, versions: list[int]) -> None:
        """Remove versions without a lease."""
        ...

    def describe(self) -> str:
        """Where weights go, in a few words."""
        ...


def weight_transport_of(run: RunDirectory, config: Config) -> WeightTransport:
    """What `transport.weights` asks for."""
    every, steps = config.evaluation.every, config.learner.steps
    match config.transport.weights:
        case "disk":
            return WeightFiles(run.weights)
        case "tensor":
            return WeightFiles(run.shared_weights)
        case "nccl":
            backend = "nccl" if config.learner.device.startswith("cuda") else "gloo"
            return WeightSender(
                run.weights, backend, lambda n: n == steps or (every > 0 and n % every == 0)
            )


class WeightFiles:
    """A safetensors file a version, in a folder of the disk or of shared memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, snapshot: Snapshot) -> Path:
        """Write a version under a temporary name, and rename it when it is whole."""
        file = self.file(snapshot.version)
        with writing(f"weights of version {snapshot.version} to {self._folder}"):
            snapshot.write(file)
        return file

    def versions(self) -> list[int]:
        """The versions that are there, oldest first."""
        return sorted(int(file.stem[1:]) for file in self._folder.glob("v*.safetensors"))

    def remove(self, versions: list[int]) -> None:
        """Delete versions without a lease."""
        for version in versions:
            self.file(version).unlink()

    def describe(self) -> str:
        """Where weights go, in a few words."""
        return f"weights are published in {self._folder}"

    def file(self, version: int) -> Path:
        """Where a version lies."""
        return self._folder / f"v{version:06d}.safetensors"


class WeightStore:
    """See the module.

    Args:
        announce: tells the peers; called in the event loop.
        unused: of some versions those that nobody may read, by the coordinator.
        settled: waits until the journal holds durably what that rests on.
        keeps: whether a version is to stay, for later lives of the run too.
    """

    def __init__(
        self,
        transport: WeightTransport,
        announce: Callable[[Publication], None],
        unused: Callable[[list[int]], list[int]],
        settled: Callable[[], Awaitable[None]],
        keeps: Callable[[int], bool] = lambda version: False,
    ) -> None:
        self._transport, self._announce, self._unused = transport, announce, unused
        self._settled, self._keeps = settled, keeps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publisher")
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

    def close(self) -> None:
        """Drop what has not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _publish(self, snapshot: Snapshot, digest: str) -> None:
        loop = asyncio.get_running_loop()
        path = await loop.run_in_executor(self._thread, self._transport.write, snapshot)
        if self._keeps(snapshot.version):
            for each in (path, path.parent):  # the file, and its name
                await loop.run_in_executor(self._thread, sync, each)
        self._announce(
            Publication(version=snapshot.version, path=str(path.resolve()), digest=digest)
        )
        there = await loop.run_in_executor(self._thread, self._transport.versions)
        if unused := self._unused(there):
            await self._settled()
            await loop.run_in_executor(self._thread, self._transport.remove, unused)
