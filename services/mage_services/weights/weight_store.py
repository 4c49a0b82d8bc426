"""Published weights: which versions there are, their leases, and which one a peer draws with.

A version stays until no lease holds it (`mage_async/admission/weight_leases.py` decides), no peer
will be told of it, and no group has it as an opponent. The publisher writes and removes versions,
the coordinator tells peers of them; both ask here. One thread reads and writes, beside the loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mage_async.admission.weight_leases import WeightLeases
from mage_async.protocol.messages import Publication
from mage_async.results.durable_files import sync

if TYPE_CHECKING:
    from mage_async.policy.snapshot import Snapshot
    from mage_services.weights.weight_transport import WeightTransport

EARLIER = "peers of an earlier life"
"""Holds the versions published before this learner began."""


def is_measured(version: int, *, every: int, last: int) -> bool:
    """Whether the evaluator is to play with a version: every so many (0: none), and the last."""
    return version == last or (every > 0 and version % every == 0)


class WeightStore:
    """See the module. A peer is told of one version at a time.

    Args:
        lag: actors draw with the weights of so many versions ago.
        digests: of the versions that earlier lives of the run committed.
    """

    def __init__(
        self,
        transport: "WeightTransport",
        *,
        lag: int = 0,
        digests: Mapping[int, str] | None = None,
    ) -> None:
        self.lag = lag
        self._transport, self._digests = transport, digests or {}
        self._earlier = transport.versions()
        self._leases = WeightLeases()
        self._published: deque[Publication] = deque()
        """The newest `lag + 1`, oldest first; actors draw with the first."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")

    @property
    def is_open(self) -> bool:
        """Whether the first weights are there."""
        return bool(self._published)

    def publication(self, version: int, digest: str) -> Publication:
        """What peers are told of a version."""
        return Publication(version=version, path=str(self.path(version)), digest=digest)

    def path(self, version: int) -> Path:
        """Where a version lies, or would lie."""
        return self._transport.file(version).resolve()

    def lagging(self, newest: int) -> list[Publication]:
        """The versions that a restarted learner's actors have to draw with first, oldest first.

        Without those that the journal no longer knows, actors begin with newer weights.
        """
        return [
            self.publication(version, self._digests[version])
            for version in self._lag_behind(newest)
            if version in self._digests and version in self._earlier
        ]

    def is_lag_complete(self, newest: int) -> bool:
        """Whether actors can begin with weights as old as `lag` says."""
        return len(self.lagging(newest)) == len(self._lag_behind(newest))

    def open(self, *publications: Publication) -> None:
        """The first weights are there; several, oldest first, where actors lag."""
        for version in self._earlier:
            self._leases.tell(EARLIER, version)
        for publication in publications:
            self.add(publication)

    def add(self, publication: Publication) -> None:
        """A version was published."""
        self._published.append(publication)
        while len(self._published) > self.lag + 1:
            self._published.popleft()

    def for_role(self, role: str) -> Publication:
        """What a peer draws with that is taken in now."""
        return self._published[0 if role == "actor" else -1]

    def next_for(self, actor: str) -> Publication | None:
        """What an actor has to load; None while it is loading, or where it draws with that."""
        if not self.is_open or self._leases.is_loading(actor):
            return None
        target, has = self.for_role("actor"), self._leases.version_of(actor)
        return target if has is None or has < target.version else None

    def lease(self, peer: str, version: int) -> None:
        """A peer is told of a version, which stays until the peer has loaded a newer one."""
        self._leases.tell(peer, version)

    def loaded(self, peer: str, version: int) -> None:
        """A peer draws with a version."""
        self._leases.loaded(peer, version)

    def release(self, peer: str) -> None:
        """A peer reads nothing any more."""
        self._leases.gone(peer)

    def unused(self, versions: Collection[int], opponents: Collection[int]) -> list[int]:
        """The versions among these without a lease that are no opponent and not to be announced."""
        kept = {publication.version for publication in self._published} | set(opponents)
        newest = max((publication.version for publication in self._published), default=0)
        return [each for each in self._leases.unused(versions, newest) if each not in kept]

    async def write(self, snapshot: "Snapshot", *, is_durable: bool) -> None:
        """Put a version where engines find it. Cancellation lets a write that has begun finish.

        Raises:
            RunError: it cannot be written.
        """
        path = await self._call(self._transport.write, snapshot)
        if is_durable:
            for each in (path, path.parent):  # the file, and its name
                await self._call(sync, each)

    async def versions(self) -> list[int]:
        """The versions that are there, oldest first. Cancellation leaves nothing."""
        return await self._call(self._transport.versions)

    async def remove(self, versions: list[int]) -> None:
        """Remove versions. Cancellation lets a removal that has begun finish."""
        await self._call(self._transport.remove, versions)

    def describe(self) -> str:
        """Where weights go, in a few words."""
        return self._transport.describe()

    def close(self) -> None:
        """Drop what has not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _call(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _lag_behind(self, newest: int) -> range:
        return range(max(0, newest - self.lag), newest)
