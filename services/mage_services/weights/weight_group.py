"""Groups of the learner and one engine, in which weights are sent: NCCL, or Gloo without GPUs.

Of an engine that shares its model over several GPUs each is a member. Sharing never ran on a GPU.

An engine has a group of its own, so an engine that dies harms no other, and joins the group when it
first needs weights. Everything is asked for by the engine and answered by a thread of the learner;
the training never waits here. Both meet in a store, a small server in the learner:

    key            written by     means
    asked          engines        a counter: the next question's number
    question/N     the engine     its group and how many members that has, and the version it wants
    answer/N       the learner    "sending": the version's buckets follow in the group; or why not

The path of such a publication names a `Manifest`: where the store is and what will be sent.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

from mage_async.errors import UnreadableWeights
from mage_async.inference.weight_fingerprint import WeightFingerprint, read_fingerprint

HOST = "127.0.0.1"
CONNECTING = timedelta(seconds=5)
PATIENCE = timedelta(seconds=60)
"""Longest wait for the other side of a group; a side that has died is noticed at once."""
SENDING = "sending"

Row = tuple[str, str, tuple[int, ...]]
"""Name, type and shape of a tensor."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a version's weights are, and where they can be asked for."""

    version: int
    port: int
    backend: str
    buckets: tuple[tuple[Row, ...], ...]
    """Each is sent as one tensor of bytes, its tensors one after the other."""
    receipt: str = ""
    """The learner's, as JSON."""

    def published_fingerprint(self, file: Path) -> WeightFingerprint | None:
        """The learner's receipt; None in a manifest of an older run.

        Raises:
            UnreadableWeights: it cannot be read.
        """
        return read_fingerprint(self.receipt, str(file)) if self.receipt else None

    def write(self, file: Path) -> None:
        """Write it, whole or not at all."""
        working = file.with_name(f".{file.name}.part")
        working.write_text(json.dumps(asdict(self)))
        working.replace(file)

    @staticmethod
    def read(file: Path) -> "Manifest":
        """Read it back.

        Raises:
            PolicyError: it is gone, or none.
        """
        try:
            found = json.loads(file.read_text())
            buckets = tuple(
                tuple((name, dtype, tuple(shape)) for name, dtype, shape in bucket)
                for bucket in found.pop("buckets")
            )
            return Manifest(**found, buckets=buckets)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UnreadableWeights(f"{file}: no manifest of published weights: {error}") from error


def is_manifest(path: Path) -> bool:
    """Whether published weights have to be asked for; otherwise `path` holds them."""
    return path.suffix == ".json"


def on_disk(path: Path) -> Path:
    """The file with the same weights, where the learner wrote one; `path` itself otherwise.

    It writes one of every version that is measured: an evaluator may get to it when there is no
    learner any more.
    """
    file = path.with_suffix(".safetensors")
    return file if file.exists() else path


def store_of(port: int) -> TCPStore:
    """A connection to the learner's store, for one thread.

    Raises:
        PolicyError: the learner is not there.
    """
    try:
        store = TCPStore(HOST, port, is_master=False, timeout=CONNECTING)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UnreadableWeights(f"no weights from {HOST}:{port}: {reason}") from error
    store.set_timeout(PATIENCE)
    return store


def ask(store: TCPStore, group: str, version: int, members: int = 2) -> int:
    """Ask for a version; returns the question's number. The engine joins, and awaits the answer."""
    number = store.add("asked", 1)
    question = {"group": group, "version": version, "members": members}
    store.set(f"question/{number}", json.dumps(question))
    return number


def answer(store: TCPStore, number: int) -> str:
    """Wait for the learner's answer to a question."""
    return store.get(f"answer/{number}").decode()


def join(store: TCPStore, group: str, *, rank: int, backend: str, members: int = 2) -> Any:
    """Meet the other side of a group, as SGLang does on its side: the learner is rank 0."""
    kind, own = Backend(backend), PrefixStore(group, store)
    pg, _ = _new_process_group_helper(
        members, rank, [], kind, own, group_name=group, timeout=PATIENCE
    )
    _world.pg_group_ranks[pg] = {member: member for member in range(members)}
    return pg


class Receiver:
    """An engine's side, for an engine in this process; used by one thread at a time."""

    def __init__(self) -> None:
        self._port, self._name, self._group = 0, "", None

    def receive(self, manifest: Manifest) -> list[tuple[str, torch.Tensor]]:
        """Request a version and receive its tensors by name, on the CPU.

        Raises:
            UnreadableWeights: the learner is gone, or keeps this version no longer.
        """
        store = store_of(manifest.port)
        is_new = self._port != manifest.port  # a learner that this engine has not met
        if is_new:
            self._name = uuid4().hex
        number = ask(store, self._name, manifest.version)
        try:
            if is_new:
                self._group = join(store, self._name, rank=1, backend=manifest.backend)
                self._port = manifest.port
            reply = answer(store, number)
            if reply != SENDING:
                raise UnreadableWeights(f"weights of version {manifest.version}: {reply}")
            return list(self._take(manifest))
        except RuntimeError as error:
            raise UnreadableWeights(f"weights of version {manifest.version}: {error}") from error

    def _take(self, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in manifest.buckets:
            shells = [torch.empty(shape, dtype=getattr(torch, dtype)) for _, dtype, shape in bucket]
            flat = torch.empty(sum(one.nbytes for one in shells), dtype=torch.uint8)
            torch.distributed.broadcast(flat, src=0, group=self._group)
            parts = flat.split([one.nbytes for one in shells])
            for row, part, shell in zip(bucket, parts, shells, strict=True):
                yield row[0], part.view(shell.dtype).reshape(shell.shape)
