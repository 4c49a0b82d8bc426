"""Where tensors lie in a buffer, and the safetensors head that makes a file of that buffer."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch

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
"""The names that safetensors has for types."""
LENGTH_BYTES = 8
"""Of the number before the head, which says how long that is."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    """`start` and `end` are offsets in the buffer, in bytes."""


def places_of(tensors: dict[str, torch.Tensor]) -> Iterator[Place]:
    """In safetensors' own order: wide types first, so that every tensor begins at a multiple of its
    own element's size, then by name.
    """
    start = 0
    for name, tensor in sorted(tensors.items(), key=lambda one: (-one[1].element_size(), one[0])):
        end = start + tensor.numel() * tensor.element_size()
        yield Place(name, tensor.dtype, tuple(tensor.shape), start, end)
        start = end


def head_of(places: tuple[Place, ...], **metadata: str) -> bytes:
    """What stands before the tensors of a safetensors file."""
    entries = {"__metadata__": {"format": "pt", **metadata}} | {
        place.name: {
            "dtype": DTYPES[place.dtype],
            "shape": place.shape,
            "data_offsets": (place.start, place.end),
        }
        for place in places
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # so that every tensor begins at its element's size
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
