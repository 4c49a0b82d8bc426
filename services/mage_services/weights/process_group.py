"""Form a process group of the learner and one engine, in which torch.distributed sends weights by
NCCL, or by Gloo without GPUs.

If an engine shares its model over several GPUs, each GPU is a member of the group. That case has
never run on a GPU.

Each engine has a group of its own, so an engine that dies harms no other. The engine joins its
group when it first needs weights. After a failure it joins a new group, and the learner leaves the
old one. The engine requests each version, and a thread of the learner answers, so training never
waits. Both sides meet in a key-value store, a small server in the learner:

    key            written by     meaning
    question/N     the engine     request N: the engine's group, the group's number of members, and
                                  the requested version
    taken          the learner    a counter: the number of requests that it has read
    answer/N       the learner    "sending" if the buckets follow in the group, else the reason

A version that is published in this way is announced by the path of its `Manifest`.
"""

import math
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import (
    Backend,
    _abort_process_group,
    _new_process_group_helper,
    _world,
)

from mage_async.errors import UnreadableWeights, first_line
from mage_async.results.run_files import write_whole

HOST = "127.0.0.1"
CONNECT_TIMEOUT = timedelta(seconds=5)
"""Longest wait for a connection to the learner's store."""
GROUP_TIMEOUT = timedelta(seconds=60)
"""Longest wait for the other side of a group. A side that has died is noticed at once."""
SENDING = "sending"
"""The learner's answer to a request if the weights follow."""

TensorSpec = tuple[str, str, tuple[int, ...]]
"""Name, type and shape of a tensor."""


class Manifest(msgspec.Struct, frozen=True):
    """Describe the tensors of a published version, and the port at which they are requested."""

    version: int
    port: int
    """Port of the learner's key-value store."""
    backend: str
    """Backend of torch.distributed that sends the weights: "nccl" or "gloo"."""
    buckets: tuple[tuple[TensorSpec, ...], ...]
    """Tensors by bucket. The tensors of a bucket are concatenated, and sent as one tensor of bytes.
    """
    fingerprint: str = ""
    """The learner's fingerprint of the weights, as JSON; empty if there is none."""

    def write(self, file: Path) -> None:
        """Write a file, which appears whole or not at all."""
        write_whole(file, msgspec.json.encode(self), is_durable=False)

    @staticmethod
    def read(file: Path) -> "Manifest":
        """Read a manifest from a file.

        Raises:
            UnreadableWeights: the file is gone, or is no manifest.
        """
        try:
            return msgspec.json.decode(file.read_bytes(), type=Manifest)
        except (OSError, msgspec.MsgspecError) as error:
            raise UnreadableWeights(f"{file}: no manifest of published weights: {error}") from error


def is_manifest(path: Path) -> bool:
    """Return whether `path` is a manifest, whose weights must be requested. Otherwise the path
    holds the weights.
    """
    return path.suffix == ".json"


def on_disk(path: Path) -> Path:
    """Return the file with the same weights if the learner wrote one, else `path`.

    The learner writes a file of every version that is evaluated, because the evaluator may load the
    version after the learner has ended.
    """
    file = path.with_suffix(".safetensors")
    return file if file.exists() else path


def connect(port: int) -> TCPStore:
    """Connect to the learner's store; a connection is for one thread.

    Raises:
        UnreadableWeights: no learner listens at the port.
    """
    try:
        store = TCPStore(HOST, port, is_master=False, timeout=CONNECT_TIMEOUT)
    except RuntimeError as error:
        raise UnreadableWeights(f"no weights from {HOST}:{port}: {first_line(error)}") from error
    store.set_timeout(GROUP_TIMEOUT)
    return store


def new_group(engine: str) -> str:
    """Return a new, unique name for a group of an engine."""
    return f"{engine}/{uuid4().hex}"


def engine_of(group: str) -> str:
    """Return the name of a group's engine."""
    return group.rpartition("/")[0]


def request_version(store: TCPStore, group: str, version: int, members: int = 2) -> int:
    """Request a version; return the request's number.

    The learner joins the group before it answers. A new engine must therefore call `join` before
    `wait_for_answer`.

    Args:
        group: Name of the group, which the engine has chosen by `new_group`.
        members: Number of members of the group: the learner, and each GPU of the engine.
    """
    question = {"group": group, "version": version, "members": members}
    text = msgspec.json.encode(question).decode()
    number = store.add("taken", 0) + 1
    # One operation takes the number and writes the request. Otherwise an engine that is killed
    # between the two would leave a number without a request, and the learner, which reads the
    # requests in order, would wait for it for ever.
    while store.compare_set(f"question/{number}", "", text).decode() != text:
        number += 1
    return number


def wait_for_answer(store: TCPStore, number: int) -> str:
    """Return the learner's answer to a request once it has come.

    Raises:
        RuntimeError: there was no answer within `GROUP_TIMEOUT`, or the learner has ended.
    """
    return store.get(f"answer/{number}").decode()


def join(store: TCPStore, group: str, *, rank: int, backend: str, members: int = 2) -> Any:
    """Join a group, in the same way as SGLang does on its side; the learner is rank 0.

    Returns:
        The `ProcessGroup`.
    """
    # `torch.distributed.new_group` cannot make this group: it needs a default process group that
    # has all members, and learner and engines have none in common.
    pg, _ = _new_process_group_helper(
        members,
        rank,
        [],
        Backend(backend),
        PrefixStore(group, store),
        group_name=group,  # type: ignore[arg-type]  # a `NewType` of some versions of torch
        timeout=GROUP_TIMEOUT,
    )
    # torch keeps its table of ranks only for groups that `torch.distributed` made itself.
    _world.pg_group_ranks[pg] = {member: member for member in range(members)}
    return pg


def leave(group: Any) -> None:
    """Leave a group, whose other members may have ended, and free its communicator."""
    # With NCCL, `destroy_process_group` would wait for work in which a dead member takes no part.
    _abort_process_group(group)


class Receiver:
    """Receive weights for an engine in this process; used by one thread at a time.

    Args:
        engine: Name of the engine, which no other engine of the run has.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._port, self._name, self._group = 0, "", None
        """Port of the learner whose group this engine has joined, 0 if it is in none; the name of
        the group; and the group."""

    def receive(self, manifest: Manifest) -> list[tuple[str, torch.Tensor]]:
        """Request a version and receive its tensors by name, on the CPU.

        Raises:
            UnreadableWeights: the learner has ended, or has deleted this version.
        """
        store = connect(manifest.port)
        is_new = self._port != manifest.port  # another learner: the first, or a restarted one
        if is_new:
            self._leave()
            self._name = new_group(self._engine)
        try:
            number = request_version(store, self._name, manifest.version)
            if is_new:
                self._group = join(store, self._name, rank=1, backend=manifest.backend)
                self._port = manifest.port
            reply = wait_for_answer(store, number)
            if reply != SENDING:
                raise UnreadableWeights(f"weights of version {manifest.version}: {reply}")
            return list(self._take(manifest))
        except RuntimeError as error:
            # After a failed broadcast the group can send nothing more; the learner leaves it too.
            self._leave()
            raise UnreadableWeights(f"weights of version {manifest.version}: {error}") from error

    def _leave(self) -> None:
        """Leave the group, if there is one: the next request joins a new one."""
        if self._group is not None:
            leave(self._group)
        self._port, self._group = 0, None

    def _take(self, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive the buckets of a version, and yield each tensor with its name."""
        for bucket in manifest.buckets:
            types = [getattr(torch, dtype) for _, dtype, _ in bucket]
            sizes = [
                dtype.itemsize * math.prod(shape)
                for dtype, (_, _, shape) in zip(types, bucket, strict=True)
            ]
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            torch.distributed.broadcast(flat, src=0, group=self._group)
            for (name, _, shape), dtype, part in zip(bucket, types, flat.split(sizes), strict=True):
                yield name, part.view(dtype).reshape(shape)
