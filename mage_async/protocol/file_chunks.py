"""A piece of a file as a message: a typed header and its bytes as one raw array."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from mage_async.errors import WireError
from mage_async.protocol.trial_header import Frame, Limits, Natural

FileName = Annotated[str, Meta(pattern=r"^(policy/[\w.-]{1,128}|weights/[0-9]{1,10})$")]
"""`policy/FILE` of the model's directory, or `weights/VERSION`."""
FileDigest = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
"""BLAKE2b of a file's bytes, 16 bytes as hex."""
FileBytes = Annotated[int, Meta(ge=1, le=2**50)]


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """`data` of a file from byte `offset` on, of `num_bytes` in all."""

    name: str
    offset: int
    num_bytes: int
    digest: str
    """Digest of the whole file."""
    data: Frame


class ChunkHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="Chunk"):
    """All of a `Chunk` but its bytes."""

    name: FileName
    offset: Natural
    num_bytes: FileBytes
    digest: FileDigest


def pack_chunk(chunk: Chunk, limits: Limits) -> tuple[ChunkHeader, list[Frame]]:
    """Header and array of a chunk, checked as the other side will."""
    header = ChunkHeader(chunk.name, chunk.offset, chunk.num_bytes, chunk.digest)
    _check(header, [chunk.data], limits)
    return header, [chunk.data]


def unpack_chunk(header: ChunkHeader, arrays: Sequence[Frame], limits: Limits) -> Chunk:
    """The chunk of a header and its array, which is a view.

    Raises:
        WireError: it is none, too large, or reaches beyond its file.
    """
    _check(header, arrays, limits)
    return Chunk(header.name, header.offset, header.num_bytes, header.digest, arrays[0])


def _check(header: ChunkHeader, arrays: Sequence[Frame], limits: Limits) -> None:
    sizes = [len(array) for array in arrays]
    if len(sizes) != 1 or not 1 <= sizes[0] <= limits.max_chunk_bytes:
        raise WireError(f"a chunk is an array of 1 to {limits.max_chunk_bytes} bytes, got {sizes}")
    if header.offset + sizes[0] > header.num_bytes:
        raise WireError(
            f"a chunk of {sizes[0]} bytes at {header.offset} reaches beyond {header.num_bytes}"
        )
