"""Copy the weights of one version, or its adapters, so that they are published while the next step
trains.

All tensors lie in one buffer without gaps. The same bytes become a safetensors file, shared memory,
or buckets that are sent to an engine. A file also holds the learner's weight fingerprint
(`mage_async/inference/weight_fingerprint.py`), by which an engine checks what it has loaded.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from safetensors import safe_open

from mage_async.inference.merged_adapters import digest_of
from mage_async.inference.weight_fingerprint import (
    COPIED_ROW_TOLERANCE,
    LENGTH_BYTES,
    MERGED_ROW_TOLERANCES,
    AdapterBase,
    WeightFingerprint,
    checked_row,
    joined,
    precision_of,
    read_fingerprint,
    row_checksums_of,
    sample_digest,
    tensor_digest,
)
from mage_async.inference.weights import reading
from mage_async.learning.lora import (
    AdaptedLayer,
    adapted_layers,
    adapter_tensors,
    base_tensors,
    merged_rows,
    merged_tensors,
    second_role_tensors,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types in safetensors files."""


@dataclass(frozen=True, slots=True)
class Place:
    """Describe the place of a tensor in the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    """`start` and `end` are offsets in the buffer, in bytes."""


def places_of(tensors: dict[str, torch.Tensor]) -> Iterator[Place]:
    """Lay out tensors in the order of safetensors: wide types first, then by name.

    So every tensor begins at a multiple of its element's size.
    """
    start = 0
    for name, tensor in sorted(tensors.items(), key=lambda one: (-one[1].element_size(), one[0])):
        end = start + tensor.numel() * tensor.element_size()
        yield Place(name, tensor.dtype, tuple(tensor.shape), start, end)
        start = end


def head_of(places: tuple[Place, ...], fingerprint: WeightFingerprint | None = None) -> bytes:
    """Return the header of a safetensors file, with the length before it.

    Args:
        fingerprint: Fingerprint of published weights; None for other files, such as checkpoints.
    """
    metadata = {"format": "pt"}
    if fingerprint is not None:  # in the file it is called `receipt`
        metadata |= {"version": str(fingerprint.version), "receipt": fingerprint.text()}
    entries = {"__metadata__": metadata} | {
        place.name: {
            "dtype": DTYPES[place.dtype],
            "shape": place.shape,
            "data_offsets": (place.start, place.end),
        }
        for place in places
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # up to a multiple, so that the tensors are aligned
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


# The functions below copy from a GPU while the next step trains there. The trainer's kernels are
# queued on the default stream: a copy on that stream would wait for all of them and delay later
# ones, and a copy to pageable memory blocks the device. So weights are copied through pinned memory
# on a stream of their own, which first waits for the event that marks the end of their copy out of
# the model. These functions were never run on a GPU.

STAGING_BYTES = 64 << 20
"""Number of bytes of pinned memory for a copy to the host, for weights of any size."""


@contextmanager
def beside_training(
    data: torch.Tensor, ready: torch.cuda.Event | None
) -> Iterator[torch.cuda.Stream | None]:
    """Run the `with` block on a new CUDA stream, so that it does not wait for the kernels of the
    step in training; at its end, block this thread until the stream is done.

    Args:
        data: Tensor that the block works on.
        ready: Event that is set once `data` is complete. None if `data` is on the CPU, where it is
            complete already; no stream is used then.
    """
    if ready is None:
        yield None
        return
    stream = torch.cuda.Stream(data.device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        yield stream
    stream.synchronize()


def on_host(data: torch.Tensor, ready: torch.cuda.Event | None) -> torch.Tensor:
    """Return the bytes in host memory: a copy if the tensor is on a GPU, the tensor itself if it is
    on the CPU.

    Args:
        data: uint8 [bytes]
        ready: See `beside_training`.
    """
    with beside_training(data, ready) as stream:
        if stream is None:
            return data
        whole = torch.empty(len(data), dtype=torch.uint8)
        size = min(len(data), STAGING_BYTES)
        staging = pinned(size)
        for source, target in zip(data.split(size), whole.split(size), strict=True):
            piece = staging[: len(source)]
            piece.copy_(source, non_blocking=True)
            stream.synchronize()
            target.copy_(piece)
        return whole


def pinned(num_bytes: int) -> torch.Tensor:
    """Allocate pinned host memory: uint8 [bytes]. torch caches it for the next copy."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Hold a copy of one version's weights, or of its adapters alone, for publication."""

    version: int
    places: tuple[Place, ...]
    """Places of all tensors, in the order of the buffer, without gaps."""
    data: torch.Tensor
    """uint8 [bytes], on the model's device"""
    rows: torch.Tensor
    """float64 [elements], on the model's device: the row of each tensor that is checksummed. Rows
    come from the model, not from `data`, so that a wrong copy is noticed."""
    row_lengths: dict[str, int]
    """Number of elements of each of these rows, in their order, by the name of its tensor."""
    ready: torch.cuda.Event | None = None
    """Event that is set once `data` holds the weights; None if the model is not on a GPU."""
    logprobs: torch.Tensor | None = None
    """Log-probs of the probe tokens by the model, on its device: float32 [probe tokens - 1]; None
    if they were not computed.
    """
    is_merged: bool = False
    """Whether adapters are merged, here or by engines. Merging rounds the weights."""
    base: AdapterBase | None = None
    """Description of the frozen weights, if the tensors are adapters; None if the tensors are whole
    weights.
    """

    @staticmethod
    @torch.no_grad()
    def of(
        model: "PreTrainedModel",
        version: int,
        logprobs: torch.Tensor | None = None,
        base: AdapterBase | None = None,
    ) -> "Snapshot":
        """Copy a model's weights, with adapters merged into them and without a tied LM head, or
        copy its adapters alone.

        Args:
            logprobs: Probe log-probs of this model (`mage_async/policy/weight_digest.py`).
            base: Description of the frozen weights (`base_of`); if it is given, the adapters alone
                are copied. None copies all weights.
        """
        layers, weights = adapted_layers(model), published_tensors(model)
        tensors = weights if base is None else adapter_tensors(model)
        copied = merged_tensors(model) if base is None else tensors.items()
        places = tuple(places_of(tensors))
        data = torch.empty(places[-1].end, dtype=torch.uint8, device=model.device)
        copies = dict(placed(places, data))
        for name, tensor in copied:
            if name in copies:  # all but a tied LM head
                copies[name].copy_(tensor)
        # If adapters alone are copied, rows both of their matrices and of the merged weights are
        # checksummed.
        lengths, rows = checked_rows(tensors | weights, layers, version)
        ready = torch.cuda.current_stream(data.device).record_event() if data.is_cuda else None
        return Snapshot(version, places, data, rows, lengths, ready, logprobs, bool(layers), base)

    def write(self, file: Path) -> None:
        """Write a safetensors file, whole or not at all, readable by every user.

        If the folder is in shared memory, the tensors are copied once, and no disk is used.
        """
        working = part_of(file)
        host = replace(self, data=on_host(self.data, self.ready))
        head = head_of(self.places, host.fingerprint())
        try:
            with working.open("wb") as out:
                out.write(head)
                out.write(host.data.numpy().data)
        except OSError:
            working.unlink(missing_ok=True)  # on a full disk other files need its space
            raise
        os.chmod(working, 0o644)
        os.replace(working, file)

    def fingerprint(self) -> WeightFingerprint:
        """Return the fingerprint that an engine's weights must have.

        It has no digests of weights on a GPU. Such weights are sent from GPU to GPU, so the engine
        never has their bytes in host memory. (`write` copies them into host memory first.)
        """
        data = None if self.data.is_cuda else self.data
        scored = [] if self.logprobs is None else self._in_host_memory(self.logprobs).tolist()
        without_rows = fingerprint_of(self.version, self.places, data, scored, self.base)
        return msgspec.structs.replace(
            without_rows,
            row_checksums=row_checksums_of(self.row_lengths, self._in_host_memory(self.rows)),
            row_tolerance=MERGED_ROW_TOLERANCES[without_rows.precision]
            if self.is_merged
            else COPIED_ROW_TOLERANCE,
        )

    def _in_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in host memory."""
        return on_host(tensor.view(torch.uint8), self.ready).view(tensor.dtype)


def fingerprint_of(
    version: int,
    places: Sequence[Place],
    data: torch.Tensor | None,
    logprobs: Sequence[float],
    base: AdapterBase | None = None,
) -> WeightFingerprint:
    """Return a fingerprint without row checksums.

    Args:
        data: Weights in host memory, uint8 [bytes]. The fingerprint has a digest of each tensor if
            there are `logprobs` or the tensors are adapters, otherwise one digest of a sample of
            the bytes. None if the weights are not in host memory: the fingerprint has no digest
            then.
        logprobs: Probe log-probs in nats; empty if they were not computed.
        base: The frozen weights, if the tensors are adapters.
    """
    dtypes = {place.dtype for place in places} | ({getattr(torch, base.dtype)} if base else set())
    tensors, sample = dict[str, str](), ""
    if data is not None and (logprobs or base):
        tensors = {name: tensor_digest(name, tensor) for name, tensor in placed(places, data)}
    elif data is not None:
        sample = sample_digest(data.numpy(), version)
    return WeightFingerprint(
        version=version,
        base=base,
        precision=precision_of(min(dtypes, key=lambda dtype: dtype.itemsize)),
        tensors=tensors,
        sample=sample,
        logprobs=tuple(value if math.isfinite(value) else None for value in logprobs),
    )


def checked_rows(
    tensors: dict[str, torch.Tensor], layers: dict[str, AdaptedLayer], version: int
) -> tuple[dict[str, int], torch.Tensor]:
    """Return the rows that a version checksums, one of each tensor: their lengths by the tensor's
    name, and the rows themselves, concatenated and with adapters merged, float64 [elements].

    Args:
        layers: Layers with adapters, by name.
    """
    rows = merged_rows(tensors, layers, partial(checked_row, version=version))
    return {name: len(row) for name, row in rows.items()}, joined(rows.values())


def base_of(model: "PreTrainedModel") -> AdapterBase:
    """Describe the frozen weights of a model with adapters; reads all of them."""
    layer, dtype = next(iter(adapted_layers(model).values())), model.dtype
    scale = next(iter(layer.scaling.values()))
    digest = digest_of(untied(model, base_tensors(model)), dtype)
    name: Any = str(dtype).removeprefix("torch.")
    return AdapterBase(digest, name, scale)


def placed(places: Iterable[Place], data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a buffer with their names, without copying."""
    for place in places:
        yield place.name, data[place.start : place.end].view(place.dtype).reshape(place.shape)


def part_of(file: Path) -> Path:
    """Return the name under which a file is written until it is complete."""
    return file.with_name(f".{file.name}.part")


def published_tensors(model: "PreTrainedModel") -> dict[str, torch.Tensor]:
    """Return a model's published tensors by name, adapters not merged, without a tied LM head."""
    return untied(model, base_tensors(model) | second_role_tensors(model))


def untied(model: "PreTrainedModel", tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by name without the LM head, if it is the embedding."""
    tied = "lm_head.weight" if model.config.tie_word_embeddings else ""
    return {name: one for name, one in tensors.items() if name != tied}


def published_fingerprint(file: Path) -> WeightFingerprint | None:
    """Read the learner's fingerprint from a file of weights; None for a model directory's file.

    Raises:
        UnreadableWeights: the file or its fingerprint cannot be read.
    """
    with reading(file), safe_open(file, "pt") as tensors:
        text = (tensors.metadata() or {}).get("receipt")
    return None if text is None else read_fingerprint(text, str(file))


def read_snapshot(file: Path) -> tuple[tuple[Place, ...], torch.Tensor]:
    """Map a file that `Snapshot.write` wrote, without copying.

    Returns:
        The tensors' places in the order of the buffer, and the buffer: uint8 [bytes]
    """
    with safe_open(file, "pt") as tensors:
        places = tuple(
            places_of({name: tensors.get_tensor(name) for name in tensors.offset_keys()})
        )
    whole = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
    return places, whole[len(whole) - places[-1].end :]
