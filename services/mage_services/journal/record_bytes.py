"""Encode and decode the journal's records, and find whole records in the bytes of a segment.

A segment begins with the line `mage-journal/1`. Records follow, each `[length u32][crc32
u32][body]` in little endian; a body is `[kind u8][content]`. A crash can damage only the end of the
last segment. `scan` returns the whole records and says where the torn tail has to be cut off;
`find_record` tells a torn tail from damage, after which whole records follow.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from mmap import mmap

import msgspec

from mage_async.errors import WireError
from mage_async.protocol.codec import PROTOCOL, decode, encode
from mage_async.protocol.journal_records import FieldsRecord, Record
from mage_async.protocol.trial_arrays import Frame, TrialHeader, TrialResult

MAGIC = b"mage-journal/1\n"
MAX_RECORD_BYTES = 2**26
"""Largest number of bytes of one journal record, without its prefix."""
_PREFIX = struct.Struct("<II")
"""Length of a record's body in bytes, and its checksum: the bytes before each body."""
PREFIX_BYTES = _PREFIX.size
_KIND_BYTES = 1
"""Number of bytes of the kind with which a body begins."""
_TRIAL, _FIELDS = 1, 2
"""Kinds of records: a trial as its frames; any other record as msgpack of its fields."""
_SIZES = struct.Struct("<7I")
"""Seven lengths in bytes, of the frames of a trial: tag, header, four arrays and checksum."""
_MARKS = (
    (PROTOCOL, _PREFIX.size + _KIND_BYTES + _SIZES.size),
    (b"\xa4type", _PREFIX.size + _KIND_BYTES + 1),
    (b"\xa4type", _PREFIX.size + _KIND_BYTES + 3),
)
"""Bytes by which a record is found, and their offset in the record. A trial has its first frame.
Any other record has the first key of its fields, after the number of fields, which takes one byte
of msgpack for up to 15 fields and three bytes for more."""
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[FieldsRecord] = msgspec.msgpack.Decoder(FieldsRecord)
_DECODING_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that `msgspec` raises for bytes that are no message of the expected type."""
_TRIAL_HEADER: msgspec.msgpack.Decoder[TrialHeader] = msgspec.msgpack.Decoder(TrialHeader)


def encode_record(record: Record) -> list[Frame]:
    """Return the bytes of a record, in pieces; arrays of a trial are views, not copies.

    Raises:
        WireError: a field is out of bounds, a trial exceeds a limit, or the record exceeds
            `MAX_RECORD_BYTES`.
    """
    if isinstance(record, TrialResult):
        # A trial that came from a peer is kept as it arrived; its frames were checked then.
        frames = record.frames or encode(record)
        pieces: list[Frame] = [bytes([_TRIAL]), _SIZES.pack(*map(len, frames)), *frames]
    else:
        pieces = [bytes([_FIELDS]), _packed(record)]
    length = sum(map(len, pieces))
    if length > MAX_RECORD_BYTES:
        raise WireError(f"a record has at most {MAX_RECORD_BYTES} bytes, got {length}")
    return [_PREFIX.pack(length, _checksum(length, pieces)), *pieces]


def _packed(record: FieldsRecord) -> bytes:
    """Return the fields of a record as msgpack, which `decode_record` can read.

    Raises:
        WireError: a field is out of bounds.
    """
    try:
        packed = _ENCODER.encode(record)
        _DECODER.decode(packed)  # msgspec checks the bounds of fields only when it decodes
    except (*_DECODING_ERRORS, OverflowError, TypeError, UnicodeEncodeError) as fault:
        raise WireError(f"a record cannot be written: {fault}; got {record!r:.500}") from fault
    return packed


@dataclass(frozen=True, slots=True)
class Scan:
    """Hold the whole records of a segment."""

    bodies: list[memoryview]
    """The body of each record, for `decode_record`, as views of the scanned bytes."""
    good_bytes: int
    """Offset in bytes at which a torn tail begins; the segment is to be cut there."""


def scan(data: Frame | mmap) -> Scan:
    """Find the whole records at the start of a segment's bytes.

    Nothing is copied, and a length in `data` is checked against its size before it is used.
    """
    view = memoryview(data)
    if bytes(view[: len(MAGIC)]) != MAGIC:
        return Scan([], 0)
    records = list(whole_records(view, len(MAGIC)))
    return Scan([body for _, body in records], records[-1][0] if records else len(MAGIC))


def first_record(data: Frame | mmap) -> memoryview | None:
    """Return the body of a segment's first record; None if the segment is damaged there."""
    view = memoryview(data)
    return _body_at(view, len(MAGIC)) if bytes(view[: len(MAGIC)]) == MAGIC else None


def whole_records(view: memoryview, start: int) -> Iterator[tuple[int, memoryview]]:
    """Yield the end of each whole record from offset `start` on, with its body."""
    while (body := _body_at(view, start)) is not None:
        start += _PREFIX.size + len(body)
        yield start, body


def find_record(data: bytes, start: int) -> int | None:
    """Return the offset of the first whole record that begins at `start` or after it; None if
    there is none.
    """
    view, found = memoryview(data), list[int]()
    for mark, offset in _MARKS:
        place = data.find(mark, start + offset)
        while place >= 0 and _body_at(view, place - offset) is None:
            place = data.find(mark, place + 1)
        found += [place - offset] if place >= 0 else []
    return min(found, default=None)


def decode_record(body: Frame) -> Record:
    """Return the record of a scanned body; arrays of a trial are copies.

    Raises:
        WireError: the bytes are whole, but they are no record of this build.
    """
    if body[0] == _TRIAL:
        return _decode_trial(bytes(body[_KIND_BYTES:]))
    if body[0] != _FIELDS:
        raise WireError(f"a journal has no records of kind {body[0]}: another build wrote it")
    try:
        return _DECODER.decode(body[_KIND_BYTES:])
    except _DECODING_ERRORS as fault:
        raise WireError(f"no record of this build: {fault}") from fault


def read_trial_header(body: Frame) -> TrialHeader | None:
    """Return a trial's record without its arrays; None for a record of another kind.

    Raises:
        WireError: the frames have other sizes than the record says, or the header is not of this
            build.
    """
    if body[0] != _TRIAL:
        return None
    sizes = _frame_sizes(body, _KIND_BYTES)
    # The header is the second frame: it begins after the tag, whose size is `sizes[0]`.
    start = _KIND_BYTES + _SIZES.size + sizes[0]
    try:
        return _TRIAL_HEADER.decode(body[start : start + sizes[1]])
    except _DECODING_ERRORS as fault:
        raise WireError(f"no header of this build: {fault}") from fault


def _body_at(view: memoryview, start: int) -> memoryview | None:
    """Return the body of the record at offset `start`; None if there is no whole record."""
    if len(view) - start < _PREFIX.size:
        return None
    length, crc = _PREFIX.unpack_from(view, start)
    begin = start + _PREFIX.size
    if not _KIND_BYTES <= length <= min(MAX_RECORD_BYTES, len(view) - begin):
        return None
    body = view[begin : begin + length]
    return body if _checksum(length, [body]) == crc else None


def _frame_sizes(data: Frame, start: int) -> tuple[int, ...]:
    """Return the sizes of a trial's frames, which follow their sizes in `data` from `start` on.

    Raises:
        WireError: `data` is shorter or longer than sizes and frames together.
    """
    if (room := len(data) - start - _SIZES.size) < 0:
        raise WireError(f"a trial's record has at least {_SIZES.size} bytes, got {len(data)}")
    sizes = _SIZES.unpack_from(data, start)
    if sum(sizes) != room:
        raise WireError(f"a trial's frames have {sum(sizes)} bytes, its record has room for {room}")
    return sizes


def _decode_trial(data: bytes) -> TrialResult:
    """Return the trial whose frames follow one another in `data`, after their sizes."""
    offsets = pairwise(accumulate(_frame_sizes(data, 0), initial=_SIZES.size))
    frames = [memoryview(data)[start:stop] for start, stop in offsets]
    message = decode(frames, is_checked=True)
    if not isinstance(message, TrialResult):
        raise WireError(f"expected a trial, got {type(message).__name__}")
    return replace(message, frames=())


def _checksum(length: int, pieces: Sequence[Frame]) -> int:
    """Return the CRC-32 of a record's length and body."""
    # The length is covered too: otherwise a run of zeros would be a valid record.
    crc = zlib.crc32(length.to_bytes(4, "little"))
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc
