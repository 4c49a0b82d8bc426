"""Store the published versions of the weights, and decide which of them may be deleted.

A peer that may still read a version has a *lease* of it. A version stays as long as it has a lease,
may be announced to another peer, or is a group's opponent. The publisher writes and removes
versions and the coordinator announces them; both use this store. One thread reads and writes files
while the event loop goes on.
"""

import asyncio
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch

from mage_async.errors import DiskFull, RunError
from mage_async.inference.weight_fingerprint import WeightFingerprint
from mage_async.plan.does_it_fit import check_space
from mage_async.policy.full_disk import writing
from mage_async.policy.snapshot import Place
from mage_async.protocol.messages import Publication
from mage_async.results.run_files import sync


@dataclass(slots=True)
class WeightLeases:
    """Record which published versions each peer, a process by its name, may still read.

    A peer holds leases of the version it has loaded, from which a crashed engine is restored, and
    of every version announced to it since. Weights without a lease may be removed. The owner
    calls `release` when a peer has gone.
    """

    _announced: dict[str, list[int]] = field(default_factory=dict)
    """For each peer: versions announced and not loaded yet, oldest first."""
    _last_loaded: dict[str, int] = field(default_factory=dict)
    """For each peer: the version that it last reported as loaded."""

    def announce(self, peer: str, version: int) -> None:
        """Give a peer a lease of a version that was announced to it."""
        self._announced.setdefault(peer, []).append(version)

    def inherit(self, peer: str, newest: int) -> None:
        """Give a peer the leases that `UNKNOWN_PEERS` holds of versions up to `newest`. Each of
        them ends, as usual, once the peer has loaded a version that is at least as new.
        """
        for version in self._announced.get(UNKNOWN_PEERS, ()):
            if version <= newest:
                self.announce(peer, version)

    def loaded(self, peer: str, version: int) -> None:
        """Record that a peer has loaded a version: it keeps the lease of this one, and those of
        newer announcements. Its other leases end.
        """
        announced = self._announced.get(peer, [])
        self._announced[peer] = [other for other in announced if other > version]
        self._last_loaded[peer] = version

    def release(self, peer: str) -> None:
        """End all leases of a peer."""
        self._announced.pop(peer, None)
        self._last_loaded.pop(peer, None)

    def version_of(self, peer: str) -> int | None:
        """Return the version that a peer last reported as loaded."""
        return self._last_loaded.get(peer)

    def is_loading(self, peer: str) -> bool:
        """Return whether a peer has announcements that it has not loaded."""
        return bool(self._announced.get(peer))

    def unread(self) -> str:
        """Return in words how many announced versions each peer has not loaded yet; "" for none."""
        waiting = ((name.partition("/")[0], len(each)) for name, each in self._announced.items())
        return ", ".join(f"{count} by {name}" for name, count in waiting if count)

    def unused(self, versions: Iterable[int]) -> list[int]:
        """Return the versions without a lease."""
        used = {*self._last_loaded.values(), *chain(*self._announced.values())}
        return [version for version in versions if version not in used]


UNKNOWN_PEERS = "peers of an earlier learner process"
"""Name that holds leases of the versions which an earlier learner process of the run published.
After a restart the learner does not know which of them were announced to its peers, so each is kept
until these peers have reported or count as gone.
"""


class WeightStore:
    """Hold the published versions of a run. One version at a time is announced to a peer.

    Args:
        transport: Writes, lists and removes the versions.
        lag: Number of versions by which the weights of actors are older than the newest.
        digests: Digest of each version that earlier learner processes of the run committed.
    """

    def __init__(
        self,
        transport: "WeightFiles",
        *,
        lag: int = 0,
        digests: Mapping[int, str] | None = None,
    ) -> None:
        self.lag = lag
        self._transport, self._digests = transport, digests or {}
        self._earlier = transport.versions()
        """Versions that earlier learner processes of the run have published."""
        self.leases = WeightLeases()
        self._published = deque[Publication](maxlen=lag + 1)
        """The newest `lag + 1` versions, oldest first; actors sample with the first."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")

    @property
    def is_open(self) -> bool:
        """Whether the first weights are published."""
        return bool(self._published)

    def publication(self, version: int, digest: str) -> Publication:
        """Return the announcement of a version."""
        return Publication(version=version, path=str(self.path(version)), digest=digest)

    def path(self, version: int) -> Path:
        """Return the path of a version, whether or not it is there."""
        return self._transport.announced_path(version).resolve()

    def publications_before(self, newest: int) -> list[Publication]:
        """Return the announcements of the `lag` versions before `newest`, oldest first.

        With these versions, actors can begin with weights `lag` versions old even after a restart
        of the learner. A version is left out if its file is gone or the journal no longer knows it.
        """
        return [
            self.publication(version, self._digests[version])
            for version in self._versions_before(newest)
            if version in self._digests and version in self._earlier
        ]

    def is_lag_complete(self, newest: int) -> bool:
        """Return whether actors can begin with weights `lag` versions old."""
        return len(self.publications_before(newest)) == len(self._versions_before(newest))

    def open(self, *publications: Publication) -> None:
        """Record the first published weights of this process; with `lag` several versions, oldest
        first.
        """
        for version in self._earlier:
            self.leases.announce(UNKNOWN_PEERS, version)
        for publication in publications:
            self.add(publication)

    def add(self, publication: Publication) -> None:
        """Record a published version."""
        self._published.append(publication)

    def for_role(self, role: str) -> Publication:
        """Return the version that a peer of this role begins with."""
        return self._published[0 if role == "actor" else -1]

    def welcome(self, peer: str, role: str) -> Publication:
        """Return the version that a peer begins with, and give the peer a lease of it.

        An earlier learner process may have announced versions that the peer has not read yet: an
        actor is loading one, or the evaluator has queued some. The peer gets leases of them too.
        """
        newest = self.for_role(role)
        self.leases.inherit(peer, newest.version)
        self.leases.announce(peer, newest.version)
        return newest

    def next_for(self, actor: str) -> Publication | None:
        """Return the version that an actor has to load; None if nothing is published yet, if the
        actor is loading a version, or if it has loaded that version.
        """
        if not self.is_open or self.leases.is_loading(actor):
            return None
        target, has = self.for_role("actor"), self.leases.version_of(actor)
        return target if has is None or has < target.version else None

    def unused(self, versions: Collection[int], opponents: Collection[int]) -> list[int]:
        """Return those of `versions` that may be deleted: no peer has a lease of them, no group
        plays against them, and they will not be announced again.
        """
        kept = {publication.version for publication in self._published} | set(opponents)
        return [each for each in self.leases.unused(versions) if each not in kept]

    async def write(self, snapshot: "AnySnapshot", *, is_durable: bool) -> None:
        """Write a version where engines find it. Cancellation lets a write that has begun finish.

        Raises:
            RunError: the version cannot be written.
        """
        path = await self._call(self._transport.write, snapshot)
        if is_durable:
            for each in (path, path.parent):  # the file, and its name
                await self._call(sync, each)

    async def versions(self) -> list[int]:
        """Return the stored versions, oldest first."""
        versions: list[int] = await self._call(self._transport.versions)
        return versions

    async def remove(self, versions: list[int]) -> None:
        """Remove versions; called after each announcement, also if there are none to remove.
        Cancellation lets a removal that has begun finish.

        Raises:
            RunError: a version cannot be removed.
        """
        try:
            await self._call(self._transport.remove, versions)
        except OSError as error:
            raise RunError(
                f"cannot remove weights that nobody needs: {error}; let only the run change its "
                "folder of weights, then --resume"
            ) from error

    def describe(self) -> str:
        """Return where weights go, in a few words."""
        return self._transport.describe()

    def close(self) -> None:
        """Drop the work that has not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _call(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do work in the thread, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _versions_before(self, newest: int) -> range:
        """Return the `lag` versions before `newest`; all of them if there are fewer."""
        return range(max(0, newest - self.lag), newest)


class AnySnapshot(Protocol):
    """Describe a copy of a version's weights: a `Snapshot`, or several ranks' `SharedSnapshot`."""

    @property
    def version(self) -> int:
        """The policy version."""

    @property
    def places(self) -> tuple[Place, ...]:
        """Places of all tensors in `data`, in their order."""

    @property
    def data(self) -> torch.Tensor:
        """All tensors, one after the other: uint8 [bytes]."""

    @property
    def ready(self) -> torch.cuda.Event | None:
        """Event that is set once `data` holds the weights; None if `data` is complete already."""

    def write(self, file: Path) -> None:
        """Write a safetensors file."""

    def fingerprint(self) -> WeightFingerprint:
        """Return the fingerprint of the learner's weights."""


def weights_file(folder: Path, version: int) -> Path:
    """Return the file of a version."""
    return folder / f"v{version:06d}.safetensors"


class WeightFiles:
    """Write and remove published versions: one safetensors file for each, in a folder on disk or in
    shared memory.

    Args:
        num_versions: Number of versions for which the file system of the folder needs space
            (`versions_at_once`); at least the one that is played and the next.
    """

    def __init__(self, folder: Path, num_versions: int = 2) -> None:
        self._folder, self._num_versions = folder, num_versions
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, snapshot: AnySnapshot) -> Path:
        """Write a version. `snapshot.write` writes under a temporary name, and renames the file
        once it is complete.

        Returns:
            The path that is announced.

        Raises:
            DiskFull: there is no space now.
            ConfigError: the file system, such as /dev/shm in a container, is too small for the
                versions that are kept at once.
        """
        try:
            with writing(f"weights of version {snapshot.version} to {self._folder}"):
                snapshot.write(self.weights_path(snapshot.version))
        except DiskFull:
            total = shutil.disk_usage(self._folder).total
            check_space(self._folder, total, snapshot.places[-1].end, self._num_versions)
            raise
        return self.announced_path(snapshot.version)

    def versions(self) -> list[int]:
        """Return the stored versions, oldest first."""
        return sorted(int(file.stem[1:]) for file in self._folder.glob("v*.safetensors"))

    def remove(self, versions: list[int]) -> None:
        """Delete versions, which have no lease."""
        for version in versions:
            self.weights_path(version).unlink()

    def describe(self) -> str:
        """Return where weights go, in a few words."""
        return f"weights are published in {self._folder}"

    def announced_path(self, version: int) -> Path:
        """Return the path that is announced to engines: here the file of weights, and in a
        `WeightSender` the manifest.
        """
        return self.weights_path(version)

    def weights_path(self, version: int) -> Path:
        """Return the path of a version's safetensors file."""
        return weights_file(self._folder, version)
