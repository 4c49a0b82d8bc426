"""Weights sent from the learner to engines, by the code that uses NCCL; here by Gloo."""

import gc
import json
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import _world

from mage_async.errors import PolicyError, RunError, UnreadableWeights
from mage_async.inference.weight_fingerprint import joined
from mage_async.policy.snapshot import Place, Snapshot
from mage_services.weights import process_group, weight_sender
from mage_services.weights.process_group import (
    HOST,
    Manifest,
    Receiver,
    connect,
    is_manifest,
    on_disk,
    request_version,
)
from mage_services.weights.weight_sender import WeightSender, buckets_of

ENGINE = """
import json, sys
from datetime import timedelta
from pathlib import Path
from mage_async.errors import PolicyError
from mage_services.weights import process_group
from mage_services.weights.process_group import Manifest, Receiver

process_group.GROUP_TIMEOUT = timedelta(seconds=int(sys.argv[1]))
receiver = Receiver(sys.argv[2])
for line in sys.stdin:
    manifest = Manifest.read(Path(line.strip()))
    try:
        got = dict(receiver.receive(manifest))
        print(json.dumps({name: one.tolist() for name, one in got.items()}), flush=True)
    except PolicyError as error:
        print(json.dumps(str(error)), flush=True)
"""
SHARE = """
import sys
from pathlib import Path
import torch
from mage_services.weights.process_group import SENDING, Manifest, connect, join
from mage_services.weights.process_group import request_version, wait_for_answer

manifest, rank = Manifest.read(Path(sys.argv[1])), int(sys.argv[2])
store = connect(manifest.port)
number = request_version(store, "shared", manifest.version, 3) if rank == 1 else 0
group = join(store, "shared", rank=rank, backend="gloo", members=3)
assert rank == 2 or wait_for_answer(store, number) == SENDING
flat = torch.empty(14, dtype=torch.uint8)
torch.distributed.broadcast(flat, src=0, group=group)
print(flat.tolist())
"""
"""A GPU of an engine that shares its model over two."""
PLACES = (Place("a", torch.float32, (2,), 0, 8), Place("b", torch.bfloat16, (1, 3), 8, 14))


def snapshot(version: int) -> Snapshot:
    a, b = torch.full((2,), version + 0.5), torch.tensor([[version, 2, 3]], dtype=torch.bfloat16)
    data = torch.cat([a.view(torch.uint8), b.reshape(-1).view(torch.uint8)])
    return Snapshot(version, PLACES, data, joined([a, b[0]]), {"a": 2, "b": 3})


class Engine:
    """A process that receives what it is told of."""

    def __init__(self, name: str = "actor-0", timeout_s: int = 60) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(timeout_s), name],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def load(self, manifest: Path):
        """What it got."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(manifest, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def engines():
    """Two engines."""
    made = [Engine("actor-0"), Engine("actor-1")]
    yield made
    for engine in made:
        engine.process.kill()
        engine.process.communicate()


def test_engines_get_what_was_published_and_one_that_dies_takes_nobody_along(
    tmp_path, engines
) -> None:
    sender = WeightSender(tmp_path, "gloo", lambda version: False)
    first, second = engines
    for version in (1, 2):
        path = sender.write(snapshot(version))
        assert is_manifest(path)
        wanted = {"a": [version + 0.5] * 2, "b": [[version, 2, 3]]}
        assert first.load(path) == wanted
        assert second.load(path) == wanted
    first.process.kill()
    first.process.wait()
    assert second.load(sender.write(snapshot(3)))["a"] == [3.5, 3.5]
    stale = tmp_path / "stale.json"
    Manifest.read(path).write(stale)
    sender.remove([1, 2])
    assert sender.versions() == [3]
    assert second.load(stale) == "weights of version 2: no longer published"
    assert second.load(sender.write(snapshot(4)))["b"] == [[4, 2, 3]]


def test_an_engine_that_died_leaves_no_version_and_no_group_in_the_learner(tmp_path) -> None:
    sender = WeightSender(tmp_path, "gloo", lambda version: False)
    engine, versions, num_before = None, list[weakref.ref[torch.Tensor]](), len(_world.pg_map)
    try:
        for version in range(2):
            published = snapshot(version)
            versions.append(weakref.ref(published.data))
            path = sender.write(published)
            del published
            engine = Engine()  # the actor's engine was started again
            assert engine.load(path)["a"] == [version + 0.5] * 2
            engine.process.kill()
            engine.process.communicate()
    finally:
        if engine is not None:
            engine.process.kill()
            engine.process.communicate()
    sender.remove([0, 1])
    ended = time.monotonic() + 20
    while len(sender._queues) > 1 and time.monotonic() < ended:
        time.sleep(0.01)
    gc.collect()
    assert [version() for version in versions] == [None] * 2
    assert len(sender._queues) == 1  # the newest engine's: nobody has reported its death
    assert len(_world.pg_map) == num_before + 1


class Killed(Exception):
    """The process of an engine ends."""


class DyingStore:
    """The connection of an engine that is killed after some operations."""

    def __init__(self, store: TCPStore, num_operations: int) -> None:
        self._store, self._num_left = store, num_operations

    def __getattr__(self, name: str):
        if not self._num_left:
            raise Killed
        self._num_left -= 1
        return getattr(self._store, name)


@pytest.mark.parametrize("num_operations", [1, 2])
def test_an_engine_that_is_killed_while_it_requests_a_version_takes_nobody_along(
    tmp_path, num_operations: int
) -> None:
    path = WeightSender(tmp_path, "gloo", lambda version: False).write(snapshot(1))
    dying = DyingStore(connect(Manifest.read(path).port), num_operations)
    with suppress(Killed):
        request_version(dying, "killed", 1)
    engine = Engine(timeout_s=10)
    try:
        assert engine.load(path) == {"a": [1.5, 1.5], "b": [[1, 2, 3]]}
    finally:
        engine.process.kill()
        engine.process.communicate()


def test_engines_that_request_at_once_get_numbers_of_their_own() -> None:
    server = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)

    def requests(name: str) -> list[int]:
        store = connect(server.port)
        return [request_version(store, name, version) for version in range(20)]

    with ThreadPoolExecutor(4) as threads:
        numbers = [number for each in threads.map(requests, "abcd") for number in each]
    assert sorted(numbers) == list(range(1, 81))


@pytest.mark.parametrize("name", ["v000001.safetensors", "v000001.json"])
def test_a_version_that_cannot_be_written_is_an_error_of_one_line(tmp_path, name: str) -> None:
    sender = WeightSender(tmp_path, "gloo", lambda version: True)
    (tmp_path / name).mkdir()
    with pytest.raises(RunError, match=r"cannot write .* of version 1 .*make room, then --resume"):
        sender.write(snapshot(1))


def test_a_learner_without_memory_to_send_says_so(tmp_path, monkeypatch, capsys) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    left: list[str] = []
    sender = WeightSender(tmp_path, "gloo", lambda version: False)
    sender.write(snapshot(1))
    monkeypatch.setattr(sender, "_send", fail)
    monkeypatch.setattr(weight_sender, "join", lambda *_, **__: "the group")
    monkeypatch.setattr(weight_sender, "leave", left.append)
    sender._queues["engine"] = SimpleQueue()
    sender._queues["engine"].put((1, 1, 2))
    sender._serve("engine")
    said = capsys.readouterr().err
    assert said.startswith("weights of version 1 were not sent to an engine")
    assert said.endswith(": CUDA out of memory\n")
    assert left == ["the group"]


def test_a_request_that_cannot_be_answered_is_reported_and_the_next_one_has_a_new_thread(
    tmp_path, monkeypatch, capsys
) -> None:
    def fail(port: int) -> TCPStore:
        raise UnreadableWeights(f"no weights from port {port}")

    sender = WeightSender(tmp_path, "gloo", lambda version: False)
    monkeypatch.setattr(weight_sender, "connect", fail)
    sender._queues["engine"] = SimpleQueue()
    sender._queues["engine"].put((1, 1, 2))
    sender._serve("engine")
    assert capsys.readouterr().err.startswith("weights of version 1 were not sent to an engine")
    assert not sender._queues


@pytest.mark.slow
def test_an_engine_that_failed_to_receive_a_version_receives_the_next(tmp_path) -> None:
    sender = WeightSender(tmp_path, "gloo", lambda version: False)
    first, second = Manifest.read(sender.write(snapshot(1))), sender.write(snapshot(2))
    # The engine waits in vain for a bucket that the learner does not have.
    longer = msgspec.structs.replace(first, buckets=(*first.buckets, *first.buckets))
    longer.write(tmp_path / "longer.json")
    engine = Engine(timeout_s=10)
    try:
        assert engine.load(tmp_path / "longer.json").startswith("weights of version 1: ")
        assert engine.load(second)["a"] == [2.5, 2.5]
    finally:
        engine.process.kill()
        engine.process.communicate()


def test_each_gpu_of_an_engine_gets_all_of_the_weights(tmp_path: Path) -> None:
    published = snapshot(1)
    manifest = WeightSender(tmp_path, "gloo", lambda version: False).write(published)
    shares = [
        subprocess.Popen(
            [sys.executable, "-c", SHARE, str(manifest), str(rank)],
            text=True,
            stdout=subprocess.PIPE,
        )
        for rank in (1, 2)
    ]
    got = [json.loads(share.communicate(timeout=60)[0]) for share in shares]
    assert got == [published.data.tolist()] * 2


def test_a_learner_that_is_gone_is_said_in_one_sentence(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(process_group, "CONNECT_TIMEOUT", timedelta(seconds=0.2))
    Manifest(3, 1, "gloo", ()).write(tmp_path / "v3.json")
    with pytest.raises(PolicyError, match=r"no weights from 127\.0\.0\.1:1"):
        Receiver("actor-0").receive(Manifest.read(tmp_path / "v3.json"))
    with pytest.raises(PolicyError, match="no manifest of published weights"):
        Manifest.read(tmp_path / "none.json")


def test_measured_versions_are_on_disk_too(tmp_path) -> None:
    sender = WeightSender(tmp_path, "gloo", lambda version: version == 2)
    paths = [on_disk(sender.write(snapshot(version))) for version in (1, 2)]
    assert [path.name for path in paths] == ["v000001.json", "v000002.safetensors"]
    sender.remove([1, 2])
    assert list(tmp_path.iterdir()) == []


def test_files_of_an_earlier_learner_process_are_removed_once_a_newer_version_is_evaluated(
    tmp_path,
) -> None:
    earlier = WeightSender(tmp_path, "gloo", lambda version: True)
    for version in (1, 2):
        earlier.write(snapshot(version))
    sender = WeightSender(tmp_path, "gloo", lambda version: version == 4)
    for version in (3, 4, 5):
        sender.write(snapshot(version))
    sender.remove([3])
    assert (tmp_path / "v000002.safetensors").exists()  # the evaluator may still read it
    sender.remove([4])
    assert [file.name for file in tmp_path.iterdir()] == ["v000005.json"]


def test_buckets_hold_neighbours_up_to_a_size() -> None:
    places = [Place(str(n), torch.uint8, (4,), 4 * n, 4 * n + 4) for n in range(5)]
    found = [[place.name for place in bucket] for bucket in buckets_of(places, 8)]
    assert found == [["0", "1"], ["2", "3"], ["4"]]
    assert [len(bucket) for bucket in buckets_of(places, 3)] == [1] * 5
