"""How weights leave a GPU beside the training, on a CPU: what awaits what, in which order.

A stand-in for a stream does what it was given when it is awaited, and no earlier.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mage_async.policy import snapshot as module
from mage_async.policy.snapshot import Place, Snapshot, beside_training, on_host
from mage_services.weights.weight_sender import WeightSender

MADE: Any = "the event"
BYTES = torch.arange(200, dtype=torch.uint8)


class LateStream:
    """Copies are made when somebody waits for them."""

    def __init__(self) -> None:
        self.given: list[Callable[[], object]] = []
        self.did: list[str] = []

    def wait_event(self, event: object) -> None:
        assert event is MADE
        self.did.append("waits for the event")

    def synchronize(self) -> None:
        for work in self.given:
            work()
        self.given = []
        self.did.append("awaited")


class Pinned(torch.Tensor):
    """Memory that a stream fills later."""

    stream: LateStream

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking, "the copy would hold up the device"
        Pinned.stream.given.append(lambda: torch.Tensor.copy_(self, source))
        return self


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    """A stream in the place of CUDA's, and staging memory of 64 bytes that it fills."""
    late = Pinned.stream = LateStream()

    @contextmanager
    def current(chosen: LateStream) -> Iterator[None]:
        late.did.append("is the current stream")
        yield
        late.did.append("is left")

    def pinned(num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8).as_subclass(Pinned)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: late)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(module, "pinned", pinned)
    monkeypatch.setattr(module, "STAGING_BYTES", 64)
    return late


@pytest.mark.parametrize("size", [1, 64, 65, 200])
def test_every_byte_arrives_before_it_is_read(stream: LateStream, size: int) -> None:
    assert torch.equal(on_host(BYTES[:size], MADE), BYTES[:size])
    assert stream.given == []


def test_work_begins_behind_the_event_and_is_awaited_at_its_end(stream: LateStream) -> None:
    with beside_training(BYTES, MADE):
        stream.did.append("works")
    order = ["waits for the event", "is the current stream", "works", "is left", "awaited"]
    assert stream.did == order


def test_weights_of_a_gpu_are_written_by_way_of_the_stream(
    stream: LateStream, tmp_path: Path
) -> None:
    place = Place("weight", torch.float32, (50,), 0, 200)
    rows = torch.zeros(50, dtype=torch.float64)
    Snapshot(3, (place,), BYTES, rows, {"weight": 50}, MADE).write(tmp_path / "v3.safetensors")
    found = load_file(tmp_path / "v3.safetensors")["weight"]
    assert torch.equal(found.view(torch.uint8), BYTES)
    assert stream.did.count("awaited") == 5 + 8  # pieces and the end, of the bytes and of the rows


def test_bytes_of_a_cpu_are_not_copied(stream: LateStream) -> None:
    assert on_host(BYTES, None) is BYTES
    assert stream.did == []


def test_only_the_newest_version_that_is_sent_stays_on_the_gpu(
    stream: LateStream, tmp_path: Path
) -> None:
    sender = WeightSender(tmp_path, "gloo", lambda version: version == 1)
    place = Place("weight", torch.float32, (50,), 0, 200)
    on_gpu: list[weakref.ref[torch.Tensor]] = []
    for version in (1, 2, 3):
        data, rows = BYTES.clone(), torch.zeros(50, dtype=torch.float64)
        on_gpu.append(weakref.ref(data))
        sender.write(Snapshot(version, (place,), data, rows, {"weight": 50}, MADE))
        del data
        sender.remove([])
        is_freed = [reference() is None for reference in on_gpu]
        assert is_freed == [True] * (version - 1) + [False]
    assert sender.versions() == [1, 2, 3]
    assert all(torch.equal(each.data, BYTES) for each in sender._snapshots.values())
    sender.remove([1, 2])
    assert sender.versions() == [3]
