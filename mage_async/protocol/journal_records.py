"""The journal's bytes: what a run cannot forget, as records in append-only segments.

A segment is a file: the line `mage-journal/1`, then records, each
`[length u32][crc32 u32][kind u8][body]` in little endian; the length counts kind and body, the
checksum covers the length too, so no run of zeros is a record. A segment begins with a `Head`, all
that earlier segments say of groups and counts, so that earlier ones may be deleted.

    record       written when                                 durable before
    Head         a learner begins, or a segment is full       -
    Granted      a group is granted, or granted again         the actor is told
    TrialResult  a trial is taken in                          it is acknowledged
    Dropped      a group is given up                          -
    Commit       a step has been computed                     anyone hears of its version
    Published    its weights are on disk                      -
    Receipt      an engine draws with a version               -

Records become durable in the order in which they were written. So a durable commit rests on durable
trials, and **a version that anyone has heard of can be computed again from the journal**.

A crash tears only the tail: `scan` yields what is whole and says where the rest has to be cut.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from typing import Literal

import msgspec

from mage_async.errors import WireError
from mage_async.graph_memory.graph import Table as MemoryTable
from mage_async.protocol.codec import decode_kept, encode
from mage_async.protocol.messages import Fields, GroupGrant, Number
from mage_async.protocol.trial_frames import TrialResult
from mage_async.protocol.trial_header import DEFAULT_LIMITS, Frame, Limits, TrialHeader
from mage_async.tasks.population import Table

MAGIC = b"mage-journal/1\n"
MAX_RECORD_BYTES = 2**26
_PREFIX = struct.Struct("<II")
_KIND_BYTES = 1
_TRIAL, _FIELDS = 1, 2
_SIZES = struct.Struct("<6I")
"""Sizes of the frames of a trial: tag, header, three arrays and checksum."""


class Granted(Fields):
    """A group was granted, or granted again: its epoch says which."""

    peer: str | None
    """The actor that plays the group."""
    version: Number
    """Policy version when the group was first granted; older in the message where actors lag."""
    grant: GroupGrant


class Dropped(Fields):
    """A group was given up; its trials count as dropped."""

    grant: Number
    reason: str


class Commit(Fields):
    """A step was computed from exactly these groups."""

    version: Number
    """The one it made."""
    grants: tuple[Number, ...]
    digest: str
    """Digest of all weights after the step."""
    tensors: dict[str, str]
    """Digest of each tensor, by name."""
    time_s: float
    """Training time of the run so far."""
    digest_method: Literal["blake2b", "sum64"] = "blake2b"
    """How tensors were digested (`mage_async/policy/weight_digest.py`); older runs do not say."""
    memory: str = ""
    """Digest of the graph memory after the step; empty where the run has none."""


class Published(Fields):
    """Weights were written, and announced after this."""

    version: Number
    path: str
    digest: str


class Receipt(Fields):
    """An engine draws with a version, and what it loaded is what was published. A replay needs no
    receipt, and journals of older runs have none.
    """

    peer: str
    version: Number
    digest: str
    """Of all tensors that were loaded (`mage_async/inference/receipts/tensor_sums.py`)."""
    difference: float
    """Mean distance of the check tokens' log-probs from the learner's, in nats."""
    num_retries: Number


class Head(Fields):
    """All that was known when a segment began."""

    config: str
    """The configuration in force from here on, as TOML."""
    version: Number
    first_grant: Number
    next_grant: Number
    groups: tuple[Granted, ...]
    """Groups in flight, oldest first; `held` says which trials earlier segments have."""
    trained: Number
    acknowledged: Number
    granted_again: Number
    dropped: dict[str, Number]
    """Groups by reason."""
    population: Table | None = None
    """Rivals and ratings; None where the run has none."""
    memory: MemoryTable | None = None
    """The graph memory; None where the run has none."""

    def oldest_version(self) -> int:
        """The version at which the oldest group in flight was granted."""
        return min([self.version, *(granted.version for granted in self.groups)])


Record = Head | Granted | TrialResult | Dropped | Commit | Published | Receipt
_Structs = Head | Granted | Dropped | Commit | Published | Receipt
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[_Structs] = msgspec.msgpack.Decoder(_Structs)
_HEADER: msgspec.msgpack.Decoder[TrialHeader] = msgspec.msgpack.Decoder(TrialHeader)


@dataclass(frozen=True, slots=True)
class Scan:
    """What of a segment is whole."""

    bodies: list[memoryview]
    """Kind and body of each record, as views of the bytes scanned; `read` takes them."""
    good_bytes: int
    """Where a torn tail begins: cut the segment here."""


def first_head(version: int, next_grant: int) -> Head:
    """The head of a journal that begins here: nothing is in flight."""
    return Head(
        config="",
        version=version,
        first_grant=next_grant,
        next_grant=next_grant,
        groups=(),
        trained=0,
        acknowledged=0,
        granted_again=0,
        dropped={},
    )


def write(record: Record, limits: Limits = DEFAULT_LIMITS) -> list[Frame]:
    """The bytes of a record, in pieces; arrays of a trial are views of its own.

    A trial that has just arrived is written as it arrived; its frames were checked then.

    Raises:
        WireError: a trial is over a limit, or a record is over `MAX_RECORD_BYTES`.
    """
    if isinstance(record, TrialResult):
        frames = record.frames or encode(record, limits)
        pieces: list[Frame] = [bytes([_TRIAL]), _SIZES.pack(*map(len, frames)), *frames]
    else:
        pieces = [bytes([_FIELDS]), _ENCODER.encode(record)]
    length = sum(map(len, pieces))
    if length > MAX_RECORD_BYTES:
        raise WireError(f"a record has at most {MAX_RECORD_BYTES} bytes, got {length}")
    return [_PREFIX.pack(length, _checksum(length, pieces)), *pieces]


def scan(data: Frame, most: int | None = None) -> Scan:
    """The whole records at the start of a segment's bytes, whatever follows them; at most `most`.

    Nothing is copied and nothing allocated by a length that was not checked against `data`.
    """
    view = memoryview(data)
    if bytes(view[: len(MAGIC)]) != MAGIC:
        return Scan([], 0)
    found = list(islice(placed(view, len(MAGIC)), most))
    return Scan([body for _, body in found], found[-1][0] if found else len(MAGIC))


def placed(view: memoryview, start: int) -> Iterator[tuple[int, memoryview]]:
    """The whole records of a segment's bytes from `start` on, each before the place of its end."""
    while (body := _body_at(view, start)) is not None:
        start += _PREFIX.size + len(body)
        yield start, body


def read(body: Frame, limits: Limits = DEFAULT_LIMITS) -> Record:
    """The record of some scanned bytes; arrays of a trial are copies of its own.

    Raises:
        WireError: it is whole, and yet no record: another build wrote it.
    """
    if body[0] == _TRIAL:
        return _read_trial(bytes(body[_KIND_BYTES:]), limits)
    if body[0] != _FIELDS:
        raise WireError(f"a journal has no records of kind {body[0]}: another build wrote it")
    try:
        return _DECODER.decode(body[_KIND_BYTES:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise WireError(f"no record of this build: {fault}") from fault


def read_header(body: Frame) -> TrialHeader | None:
    """All of a trial's record but its arrays; None for a record of another kind.

    Raises:
        WireError: no header of this build.
    """
    if body[0] != _TRIAL:
        return None
    sizes = _SIZES.unpack_from(body, _KIND_BYTES)
    start = _KIND_BYTES + _SIZES.size + sizes[0]
    try:
        return _HEADER.decode(body[start : start + sizes[1]])
    except msgspec.MsgspecError as fault:
        raise WireError(f"no header of this build: {fault}") from fault


def _body_at(view: memoryview, start: int) -> memoryview | None:
    """Kind and body of the record at `start`; None where there is no whole one."""
    if len(view) - start < _PREFIX.size:
        return None
    length, crc = _PREFIX.unpack_from(view, start)
    begin = start + _PREFIX.size
    if not _KIND_BYTES <= length <= min(MAX_RECORD_BYTES, len(view) - begin):
        return None
    body = view[begin : begin + length]
    return body if _checksum(length, [body]) == crc else None


def _read_trial(data: bytes, limits: Limits) -> TrialResult:
    if len(data) < _SIZES.size:
        raise WireError(f"a trial's record has at least {_SIZES.size} bytes, got {len(data)}")
    sizes = _SIZES.unpack_from(data)
    if sum(sizes) != len(data) - _SIZES.size:
        raise WireError(f"frames of {sum(sizes)} bytes in {len(data) - _SIZES.size}")
    message = decode_kept(_cut(memoryview(data)[_SIZES.size :], sizes), limits)
    if not isinstance(message, TrialResult):
        raise WireError(f"expected a trial, got {type(message).__name__}")
    return replace(message, frames=())


def _cut(data: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    places = pairwise(accumulate(sizes, initial=0))
    return [data[start:stop] for start, stop in places]


def _checksum(length: int, pieces: Sequence[Frame]) -> int:
    crc = zlib.crc32(length.to_bytes(4, "little"))
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc
