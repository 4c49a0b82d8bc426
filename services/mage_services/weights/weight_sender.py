"""Send weights from the learner's memory to engines, over one process group for each engine
(`process_group.py`).
"""

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from mage_async.errors import UnreadableWeights, first_line
from mage_async.policy.full_disk import writing
from mage_async.policy.snapshot import Place, Snapshot, beside_training, on_host, read_snapshot
from mage_services.weights.process_group import (
    GROUP_TIMEOUT,
    HOST,
    SENDING,
    Manifest,
    connect,
    engine_of,
    join,
    leave,
)
from mage_services.weights.weight_store import AnySnapshot, WeightFiles
from mage_services.weights.weight_transport import BUCKET_BYTES

FOREVER = timedelta(days=365)
"""Time limit of the wait for the next request, which may come at any time."""
ABORT_FAILED_SENDS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
"""Environment variable and its value, with which NCCL's watchdog aborts a send if the engine dies.
By default the watchdog would end the learner's process.
"""


class WeightSender(WeightFiles):
    """Keep published versions in memory, the newest on the learner's GPU, and send them to engines
    on request.

    One thread receives the requests of all engines, and for each engine another thread sends
    weights to it. The threads are daemons, which end with the process.

    Args:
        folder: Folder of the manifests, which announce versions to engines.
        backend: "nccl", or "gloo" for a learner without a GPU.
        is_evaluated: Returns whether the evaluator plays with a version; such a version is also
            written as a file.
        device: Device of the learner; weights in host memory are copied there bucket by bucket.
        shards: Folder in shared memory in which several ranks write each version together; None for
            a learner of one process.
    """

    def __init__(
        self,
        folder: Path,
        backend: str,
        is_evaluated: Callable[[int], bool],
        device: str = "cpu",
        shards: Path | None = None,
    ) -> None:
        super().__init__(folder)
        self._backend, self._is_evaluated = backend, is_evaluated
        self._device = torch.device(device)
        self._shards = None if shards is None else WeightFiles(shards)
        os.environ.setdefault(*ABORT_FAILED_SENDS)
        # Engines post requests by `compare_set` (`process_group.py`), which ends a `wait` for the
        # key in the libuv store alone.
        self._store = TCPStore(
            HOST, 0, is_master=True, wait_for_workers=False, timeout=GROUP_TIMEOUT, use_libuv=True
        )
        self._snapshots: dict[int, AnySnapshot] = {}
        """Published versions that may still be requested."""
        self._queues: dict[str, queue.SimpleQueue[tuple[int, int, int] | None]] = {}
        """Requests by group: number of the request, version, number of the group's members; None
        ends the group's thread."""
        listening = connect(self._store.port)
        threading.Thread(
            target=self._listen, args=(listening,), name="weight requests", daemon=True
        ).start()

    def write(self, snapshot: AnySnapshot) -> Path:
        """Keep a version, write its manifest, and return the manifest's path."""
        file = self.announced_path(snapshot.version)
        if self._shards is not None:
            self._shards.write(snapshot)
        if self._is_evaluated(snapshot.version):
            super().write(snapshot)
        self._snapshots[snapshot.version] = snapshot
        buckets = tuple(
            tuple((one.name, str(one.dtype).removeprefix("torch."), one.shape) for one in bucket)
            for bucket in buckets_of(snapshot.places)
        )
        port, fingerprint = self._store.port, snapshot.fingerprint().text()
        manifest = Manifest(snapshot.version, port, self._backend, buckets, fingerprint)
        with writing(f"the manifest of version {snapshot.version} to {self._folder}"):
            manifest.write(file)
        return file

    def versions(self) -> list[int]:
        """Return the versions in memory.

        Manifests of an earlier process do not count, because they name a port that is closed.
        """
        return sorted(self._snapshots)

    def remove(self, versions: list[int]) -> None:
        """Forget versions that no peer may still read, and move all others but the newest from the
        GPU to host memory: an engine asks for one of them only if it is slow, or was restarted.
        """
        for version in versions:
            if self.weights_path(version).exists():
                self._remove_earlier(version)
            self.announced_path(version).unlink()
            self.weights_path(version).unlink(missing_ok=True)
            del self._snapshots[version]
        if self._shards is not None:
            self._shards.remove(versions)
        for version in self.versions()[:-1]:
            self._snapshots[version] = self._off_gpu(self._snapshots[version])

    def _remove_earlier(self, version: int) -> None:
        """Delete the files of earlier versions that earlier learner processes of the run left.

        This version was evaluated and has no lease, so the evaluator, which reads versions in
        order, has read those before it.
        """
        for file in self._folder.glob("v*.*"):
            number = int(file.stem[1:])
            if number < version and number not in self._snapshots:
                file.unlink()

    def describe(self) -> str:
        """Return where weights go, in a few words."""
        return f"weights are sent by {self._backend}, to each engine in a group of its own"

    def announced_path(self, version: int) -> Path:
        """Return the path of a version's manifest."""
        return self.weights_path(version).with_suffix(".json")

    def _off_gpu(self, snapshot: AnySnapshot) -> AnySnapshot:
        """Return a version whose data is in host memory, or in its file if it is evaluated."""
        if snapshot.ready is None:  # it is in host memory, or several ranks wrote it to a file
            return snapshot
        assert isinstance(snapshot, Snapshot)
        file = self.weights_path(snapshot.version)
        is_on_disk = file.exists()  # mapped, so that a slow evaluator fills no memory
        data = read_snapshot(file)[1] if is_on_disk else on_host(snapshot.data, snapshot.ready)
        return replace(snapshot, data=data, ready=None)

    def _listen(self, store: TCPStore) -> None:
        """Pass each request to the thread of its group, until the process ends.

        The store's keys are described in `process_group.py`.
        """
        number = 0
        while True:
            number += 1
            store.wait([f"question/{number}"], FOREVER)
            question = json.loads(store.get(f"question/{number}"))
            store.add("taken", 1)
            group = question["group"]
            if (requests := self._queues.get(group)) is None:
                self._end_others_of(engine_of(group))
                requests = self._queues[group] = queue.SimpleQueue()
                thread = threading.Thread(target=self._serve, args=(group,), daemon=True)
                thread.start()
            # `_serve` may have deleted the group's queue meanwhile, because the engine died.
            requests.put((number, question["version"], question["members"]))

    def _end_others_of(self, engine: str) -> None:
        """End the threads of the groups that an engine had before: its process has died, or a send
        to it failed.
        """
        for group, requests in list(self._queues.items()):
            if engine_of(group) == engine:
                requests.put(None)

    def _serve(self, group: str) -> None:
        """Join an engine's group, and send the versions that the engine requests. Leave the group
        when a send fails, most often because the engine has died, or when the engine has a new
        group.
        """
        requests = self._queues[group]
        store = process_group = None
        while (request := requests.get()) is not None:
            number, version, members = request
            try:
                if store is None:
                    store = connect(self._store.port)
                    process_group = join(
                        store, group, rank=0, backend=self._backend, members=members
                    )
                self._answer(store, number, version, process_group)
            # An engine makes a new group when it asks again.
            except (RuntimeError, UnreadableWeights) as error:
                # Printed, because the fault may be the learner's own, such as a lack of memory.
                print(
                    f"weights of version {version} were not sent to an engine, which may have "
                    f"ended: {first_line(error)}",
                    file=sys.stderr,
                    flush=True,
                )
                break
        del self._queues[group]
        if process_group is not None:
            leave(process_group)

    # Separate from `_serve`, so that no local variable keeps a version in memory while `_serve`
    # waits for the next request, which may never come.
    def _answer(self, store: TCPStore, number: int, version: int, process_group: Any) -> None:
        """Answer a request, and send the version if it is still published."""
        snapshot = self._snapshots.get(version)
        store.set(f"answer/{number}", SENDING if snapshot else "no longer published")
        if snapshot is not None:
            self._send(snapshot, process_group)

    def _send(self, snapshot: AnySnapshot, process_group: Any) -> None:
        """Broadcast a version bucket by bucket, on another CUDA stream than that of training."""
        data, ready = snapshot.data, snapshot.ready
        if ready is None and self._device.type == "cuda":
            # `beside_training` uses a stream of its own only if it has an event to wait for. These
            # weights are in host memory and complete already; CUDA does not wait for an event that
            # was never recorded, such as this one.
            ready = torch.cuda.Event()
        on_device = torch.empty(0, device=self._device)  # `beside_training` reads only its device
        with beside_training(on_device, ready):
            for bucket in buckets_of(snapshot.places):
                flat = data[bucket[0].start : bucket[-1].end].to(self._device)
                torch.distributed.broadcast(flat, src=0, group=process_group)


def buckets_of(places: Sequence[Place], most_bytes: int = BUCKET_BYTES) -> list[list[Place]]:
    """Group tensors that are neighbours in a snapshot's buffer, up to `most_bytes`.

    A larger tensor is a bucket of its own.
    """
    buckets: list[list[Place]] = []
    for place in places:
        if buckets and place.end - buckets[-1][0].start <= most_bytes:
            buckets[-1].append(place)
        else:
            buckets.append([place])
    return buckets
