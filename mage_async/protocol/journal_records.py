"""The journal's bytes: the records that a run must not lose, in append-only segment files.

A segment begins with the line `mage-journal/1`. Records follow, each
`[length u32][crc32 u32][kind u8][body]` in little endian; the length counts kind and body. The
first record of a segment is a `SegmentHeader` with the state of the ledger, so that earlier
segments can be deleted.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise

import msgspec
from msgspec import field

from mage_async.errors import WireError
from mage_async.policy_version import oldest
from mage_async.protocol.codec import decode_journaled, encode
from mage_async.protocol.limits import DEFAULT_LIMITS, MAX_RECORD_BYTES, Limits
from mage_async.protocol.messages import Fields, GroupGrant, Number
from mage_async.protocol.trial_frames import Frame, TrialHeader, TrialResult
from mage_async.tasks.population import Table
from mage_async.trajectory import Trial

# When each record is written, and what waits until the record is durable:
#
#     record         written when                                  then
#     SegmentHeader  a learner begins, or a segment is full        -
#     Granted        a group is granted, or granted again          the actor is sent the grant
#     TrialResult    a trial is taken in                           it is acknowledged
#     Dropped        a group is dropped                            -
#     Commit         a step was computed                           its version is published
#     Published      its weights are on disk                       -
#     LoadedWeights  an engine samples with a version              -
#
# Records become durable in the order in which they are written. So the trials of a durable commit
# are durable, and every version that a peer has heard of can be computed again from the journal.
#
# A crash can damage only the end of the last segment. `scan` returns the whole records and says
# where the torn tail has to be cut off.

MAGIC = b"mage-journal/1\n"
_PREFIX = struct.Struct("<II")
_KIND_BYTES = 1
_TRIAL, _FIELDS = 1, 2
_SIZES = struct.Struct("<7I")
"""Bytes of each frame of a trial: tag, header, three arrays and checksum."""


class Granted(Fields):
    """A group was granted, or granted again if the grant's epoch is not 0."""

    peer: str | None
    """The actor that plays the group; None in a `SegmentHeader` if no actor does."""
    version: Number
    """Policy version at the first grant. The version in `grant` is older if actors lag."""
    grant: GroupGrant


class Dropped(Fields):
    """A group was dropped; its trials count as dropped."""

    grant: Number
    reason: str


class Commit(Fields):
    """A step was computed from exactly these groups."""

    version: Number
    """The policy version that the step made."""
    grants: tuple[Number, ...]
    digest: str
    """Digest of all weights after the step."""
    tensors: dict[str, str]
    """Digest of each tensor by name."""
    time_s: float
    """Training time of the run so far, in seconds."""
    methods: dict[str, str] = field(default_factory=dict)
    """Digest of the state of each method after the step, by method; methods without a state are
    left out."""


class Published(Fields):
    """The weights of a version were written; peers hear of them after this record."""

    version: Number
    path: str
    digest: str


class LoadedWeights(Fields, tag="Receipt"):
    """An engine samples with a version, and what it loaded is what was published.

    A replay does not need this record. In the file it is tagged `Receipt`.
    """

    peer: str
    version: Number
    digest: str
    """Of all loaded tensors (`mage_async/inference/weight_fingerprint.py`)."""
    difference: float
    """Mean absolute difference from the learner's log-probs of the probe tokens, in nats."""
    num_retries: Number


class SegmentHeader(Fields, tag="Head"):
    """The state of the learner at the beginning of a segment. In the file it is tagged `Head`."""

    config: str
    """The configuration in force from here on, as TOML."""
    version: Number
    first_grant: Number
    next_grant: Number
    groups: tuple[Granted, ...]
    """Groups in flight, oldest first. Their trials in `held` lie in earlier segments."""
    trained: Number
    acknowledged: Number
    granted_again: Number
    dropped: dict[str, Number]
    """Number of dropped groups by reason."""
    population: Table | None = None
    """Past policies in opponents' seats, and ratings; None if the run has none."""
    methods: dict[str, bytes] = field(default_factory=dict)
    """The state of each method that has one, by method."""

    def oldest_version(self) -> int:
        """Return the version at which the oldest group in flight was granted."""
        return min([self.version, *(granted.version for granted in self.groups)])


_Structs = SegmentHeader | Granted | Dropped | Commit | Published | LoadedWeights
Record = _Structs | TrialResult
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[_Structs] = msgspec.msgpack.Decoder(_Structs)
_TRIAL_HEADER: msgspec.msgpack.Decoder[TrialHeader] = msgspec.msgpack.Decoder(TrialHeader)


def first_segment_header(version: int, next_grant: int) -> SegmentHeader:
    """Return the header of a journal that begins here: no group is in flight."""
    return SegmentHeader(
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


def encode_record(record: Record, limits: Limits = DEFAULT_LIMITS) -> list[Frame]:
    """Return the bytes of a record, in pieces; arrays of a trial are views, not copies.

    Raises:
        WireError: a trial exceeds a limit, or the record exceeds `MAX_RECORD_BYTES`.
    """
    if isinstance(record, TrialResult):
        # A trial that came from a peer is kept as it arrived; its frames were checked then.
        frames = record.frames or encode(record, limits)
        pieces: list[Frame] = [bytes([_TRIAL]), _SIZES.pack(*map(len, frames)), *frames]
    else:
        pieces = [bytes([_FIELDS]), _ENCODER.encode(record)]
    length = sum(map(len, pieces))
    if length > MAX_RECORD_BYTES:
        raise WireError(f"a record has at most {MAX_RECORD_BYTES} bytes, got {length}")
    return [_PREFIX.pack(length, _checksum(length, pieces)), *pieces]


@dataclass(frozen=True, slots=True)
class Scan:
    """The whole records of a segment."""

    bodies: list[memoryview]
    """Kind and body of each record, for `decode_record`, as views of the scanned bytes."""
    good_bytes: int
    """Offset at which a torn tail begins: cut the segment here."""


def scan(data: Frame, most: int | None = None) -> Scan:
    """Find the whole records at the start of a segment's bytes, at most `most` of them.

    Copies nothing, and allocates nothing by a length that was not checked against `data`.
    """
    view = memoryview(data)
    if bytes(view[: len(MAGIC)]) != MAGIC:
        return Scan([], 0)
    records = list(islice(whole_records(view, len(MAGIC)), most))
    return Scan([body for _, body in records], records[-1][0] if records else len(MAGIC))


def whole_records(view: memoryview, start: int) -> Iterator[tuple[int, memoryview]]:
    """Yield the end offset, and kind and body, of each whole record from offset `start` on."""
    while (body := _body_at(view, start)) is not None:
        start += _PREFIX.size + len(body)
        yield start, body


def decode_record(body: Frame, limits: Limits = DEFAULT_LIMITS) -> Record:
    """Return the record of a scanned kind and body; arrays of a trial are copies.

    Raises:
        WireError: the bytes are whole, but no record: another build wrote them.
    """
    if body[0] == _TRIAL:
        return _decode_trial(bytes(body[_KIND_BYTES:]), limits)
    if body[0] != _FIELDS:
        raise WireError(f"a journal has no records of kind {body[0]}: another build wrote it")
    try:
        return _DECODER.decode(body[_KIND_BYTES:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise WireError(f"no record of this build: {fault}") from fault


def read_trial_header(body: Frame) -> TrialHeader | None:
    """Return a trial's record without its arrays; None for a record of another kind.

    Raises:
        WireError: the header is not of this build.
    """
    if body[0] != _TRIAL:
        return None
    sizes = _SIZES.unpack_from(body, _KIND_BYTES)
    start = _KIND_BYTES + _SIZES.size + sizes[0]
    try:
        return _TRIAL_HEADER.decode(body[start : start + sizes[1]])
    except msgspec.MsgspecError as fault:
        raise WireError(f"no header of this build: {fault}") from fault


def _body_at(view: memoryview, start: int) -> memoryview | None:
    """Return kind and body of the record at offset `start`; None if there is no whole record."""
    if len(view) - start < _PREFIX.size:
        return None
    length, crc = _PREFIX.unpack_from(view, start)
    begin = start + _PREFIX.size
    if not _KIND_BYTES <= length <= min(MAX_RECORD_BYTES, len(view) - begin):
        return None
    body = view[begin : begin + length]
    return body if _checksum(length, [body]) == crc else None


def _decode_trial(data: bytes, limits: Limits) -> TrialResult:
    if len(data) < _SIZES.size:
        raise WireError(f"a trial's record has at least {_SIZES.size} bytes, got {len(data)}")
    sizes = _SIZES.unpack_from(data)
    if sum(sizes) != len(data) - _SIZES.size:
        raise WireError(f"frames of {sum(sizes)} bytes in {len(data) - _SIZES.size}")
    message = decode_journaled(_split(memoryview(data)[_SIZES.size :], sizes), limits)
    if not isinstance(message, TrialResult):
        raise WireError(f"expected a trial, got {type(message).__name__}")
    return replace(message, frames=())


def _split(data: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    offsets = pairwise(accumulate(sizes, initial=0))
    return [data[start:stop] for start, stop in offsets]


def _checksum(length: int, pieces: Sequence[Frame]) -> int:
    # The length is covered too: otherwise a run of zeros would be a valid record.
    crc = zlib.crc32(length.to_bytes(4, "little"))
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc


@dataclass(frozen=True, slots=True)
class Segment:
    """What decides whether a segment file is still needed."""

    number: int
    version: int
    """Policy version of the segment's header."""
    oldest_version: int
    """Version at which the oldest group in flight in the segment's header was granted."""
    num_bytes: int


def first_needed(segments: Sequence[Segment], checkpoint_version: int) -> int | None:
    """Return the number of the first segment that a checkpoint needs to be brought up to date.

    Returns None if the segments that it needs are gone.
    """
    known = [segment for segment in segments if segment.version <= checkpoint_version]
    if not known:
        return None
    # The last header that is not newer than the checkpoint names the groups in flight. The trials
    # of these groups lie behind the last header older than the oldest of the groups; if there is no
    # such header, all trials are there only if no segment was deleted.
    oldest = known[-1].oldest_version
    before = [segment for segment in known if segment.version < oldest]
    if before:
        return before[-1].number
    return known[0].number if known[0].number == 1 else None


def to_delete(segments: Sequence[Segment], checkpoint_version: int, max_bytes: int) -> list[int]:
    """Return the numbers of the segments to delete after a checkpoint, oldest first.

    Only segments that the checkpoint does not need, and only until the rest fits into `max_bytes`:
    `mage replay` can use what is kept.
    """
    needed = first_needed(segments, checkpoint_version)
    total = sum(segment.num_bytes for segment in segments)
    numbers: list[int] = []
    for segment in segments:
        if total <= max_bytes or needed is None or segment.number >= needed:
            break
        numbers.append(segment.number)
        total -= segment.num_bytes
    return numbers


# Records as lines of text, and a filter over them, for `mage journal`.


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Selects the records that meet all conditions."""

    kinds: tuple[str, ...] = ()
    """Kinds, as `line_of` names them; empty: all."""
    grant: int | None = None
    """Only records that name this group; None: all."""
    step: int | None = None
    """Only records of this step and of the groups it trained; None: all."""
    trained: frozenset[int] = frozenset()
    """The groups that `step` trained, from `trained_in`."""

    def wants(self, record: Record) -> bool:
        """Whether a record meets the conditions."""
        if self.kinds and line_of(record)[0] not in self.kinds:
            return False
        if self.step is not None and not self._is_of_step(record):
            return False
        return self.grant is None or self.grant in _grants(record)

    def _is_of_step(self, record: Record) -> bool:
        if isinstance(record, Commit | Published | LoadedWeights):
            return record.version == self.step
        return isinstance(record, Granted | TrialResult) and bool(_grants(record) & self.trained)


def trained_in(records: Iterable[Record], step: int) -> frozenset[int]:
    """Return the numbers of the groups that a step trained."""
    commits = (record for record in records if isinstance(record, Commit))
    return frozenset(
        grant for commit in commits if commit.version == step for grant in commit.grants
    )


def line_of(record: Record) -> tuple[str, str]:
    """Return the kind of a record, and its contents as one line."""
    match record:
        case SegmentHeader():
            groups = len(record.groups)
            return "head", f"step {record.version}, {groups} groups in flight"
        case Granted(grant=grant):
            what = f"{grant.member} seat {grant.seat} at step {grant.version}"
            return "grant", f"group {grant.grant}.{grant.epoch} to {record.peer}: {what}"
        case TrialResult():
            group = f"group {record.grant}.{record.epoch}"
            return "trial", f"{group} {' and '.join(map(_trial_text, record.trials()))}"
        case Dropped():
            return "drop", f"group {record.grant}: {record.reason}"
        case Commit():
            grants = " ".join(map(str, record.grants))
            return "commit", f"step {record.version} {record.digest}: groups {grants}"
        case Published():
            return "publication", f"step {record.version} {record.path}"
        case LoadedWeights():
            apart = f"log-probs {record.difference:.2g} nats apart"
            return "receipt", f"step {record.version} {record.digest} at {record.peer}: {apart}"


def _trial_text(trial: Trial) -> str:
    drawn = oldest(run for part in trial.segments for run in part.versions)
    rewards = ", ".join(f"{reward:g}" for reward in trial.episode_rewards())
    return f"trial {trial.index}: {trial.num_tokens()} tokens from step {drawn}, [{rewards}]"


def _grants(record: Record) -> set[int]:
    match record:
        case SegmentHeader():
            return {granted.grant.grant for granted in record.groups}
        case Granted():
            return {record.grant.grant}
        case TrialResult() | Dropped():
            return {record.grant}
        case Commit():
            return set(record.grants)
        case Published() | LoadedWeights():
            return set()
