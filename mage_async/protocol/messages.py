"""Every message that crosses a socket, and its bytes.

A message is a list of frames: `[tag][header][arrays …][checksum]`. The header is msgpack, typed and
bounded; only a trial has arrays (`trial_frames.py`). The checksum, CRC-32 in little endian, covers
the length and the bytes of every frame before it. It is zlib's: 9 µs for the 70 KB of a long trial
where a crc32c package takes 2 µs, which is not worth a dependency when encoding and decoding may
take 100 µs.

    peer                      learner
    Hello                ->
                         <-   Welcome, or Refusal            WhoAreYou, where no Hello came first
                         <-   GroupGrant
    TrialResult          ->
                         <-   Acknowledge, or Unwanted
    GroupDrop            ->
                         <-   Publication
    Loaded               ->
    Heartbeat            ->
    Goodbye              <->  Goodbye

A peer on another machine, which sees no files of the run, begins with Enquiry and goes on to Hello:

    Enquiry              ->
                         <-   Prospectus, or Refusal
    Fetch                ->
                         <-   Chunk, or NoFile

This file is longer than most: all that may cross a socket, with its bounds, stands beside the one
decoder that holds it to them.

Malformed input is `WireError` with a sentence, and nothing else, whatever the bytes.
"""

import struct
import zlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mage_async.errors import WireError
from mage_async.protocol.file_chunks import (
    Chunk,
    ChunkHeader,
    FileDigest,
    FileName,
    pack_chunk,
    unpack_chunk,
)
from mage_async.protocol.trial_frames import (
    DEFAULT_LIMITS,
    Frame,
    Limits,
    TrialHeader,
    TrialResult,
    pack_trial,
    unpack_trial,
)

__all__ = [
    "DEFAULT_LIMITS",
    "KEPT",
    "MAX_REASON_CHARS",
    "PROTOCOL",
    "Acknowledge",
    "Chunk",
    "Enquiry",
    "Fetch",
    "Frame",
    "Goodbye",
    "GroupDrop",
    "GroupGrant",
    "Heartbeat",
    "Hello",
    "Limits",
    "Loaded",
    "Message",
    "NoFile",
    "Prospectus",
    "Publication",
    "Refusal",
    "Rival",
    "ServedFile",
    "TrialResult",
    "Unwanted",
    "Welcome",
    "WhoAreYou",
    "decode",
    "encode",
]

PROTOCOL = b"mage/2"
KEPT = (PROTOCOL, b"mage/1")
"""Trials that a journal may hold: mage/1 knew neither `VersionRun.provenance` nor
`Turn.num_reused`, which have defaults.
"""
MAX_REASON_CHARS = 2000
"""Cut a reason to this length before sending it."""
_MAX_ARRAYS = 3
_CHECKSUM = struct.Struct("<I")

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Digest = Annotated[str, Meta(min_length=1, max_length=128)]
Path = Annotated[str, Meta(min_length=1, max_length=4096)]
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=65_536)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Measured = Annotated[float, Meta(ge=-1e300, le=1e300)]
"""Finite: NaN fails every comparison."""
Booked = Annotated[float, Meta(ge=0, le=1e9)]


class Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    """A message that is a header and no arrays; its tag is its name."""


class Hello(Fields):
    """The first message of a peer, and again after `WhoAreYou`."""

    role: Literal["actor", "evaluator"]
    name: Name
    build: Digest
    """What the peer was built from; must equal the learner's."""
    config_digest: Digest
    credits: Annotated[int, Meta(ge=0, le=65_536)]
    """Most groups the peer plays at one time."""


class Welcome(Fields):
    """The learner takes the peer in, or takes it in anew: after a restart of the learner, a silence
    of the peer, a missed deadline, a full disk.

    The peer sends again what was not acknowledged, and drops every group that it may not keep.
    """

    version: Number
    weights_path: Path | None = None
    """None: no weights were published yet."""
    keeps: Annotated[tuple[tuple[Number, Number], ...], Meta(max_length=65_536)] = ()
    """Grant and epoch of the groups that are the peer's to play; all others have ended or gone to
    somebody else."""


class Enquiry(Fields):
    """A peer without anything of the run asks what it is; then it may fetch files and say Hello."""

    name: Name
    build: Digest


class ServedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file that a peer needs."""

    name: FileName
    num_bytes: Annotated[int, Meta(ge=0, le=2**50)]
    digest: FileDigest


class Prospectus(Fields):
    """What a peer needs to play from another machine."""

    config: Annotated[str, Meta(min_length=1, max_length=2**18)]
    """As TOML."""
    files: Annotated[tuple[ServedFile, ...], Meta(max_length=256)]
    """Of the model's directory."""


class Fetch(Fields):
    """Credit for one chunk of a file, from a byte on."""

    name: FileName
    offset: Number


class NoFile(Fields):
    """There is no such file, or it ends before the byte asked for."""

    name: FileName
    reason: Reason


class Refusal(Fields):
    """The learner does not take the peer in; final."""

    reason: Reason


class WhoAreYou(Fields):
    """Answer to anything but a Hello from an unknown peer, as after a restart of the learner; once,
    until it says hello.

    What the peer had sent, and sends before it says hello, is not taken, and not acknowledged.
    """


class Rival(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A version of the policy in the opponent's seat."""

    version: Number
    path: Path
    """Of its weights, which stay there as long as the group is in flight."""


class GroupGrant(Fields):
    """One group may be played: a slot, until its trials are trained or the group is dropped."""

    grant: Number
    epoch: Number
    """How often the group was granted before."""
    environment: Name
    member: Name
    seat: Number
    seed: Number
    num_trials: Count
    num_episodes: Count
    version: Number
    """The policy version of the (first) grant; staleness is bounded from here."""
    deadline_s: Seconds
    """From now on; after it the group is granted to someone else."""
    held: Annotated[tuple[Number, ...], Meta(max_length=65_536)] = ()
    """Trials that arrived under an earlier epoch; they need not be played again."""
    rival: Rival | None = None
    """Where `member` is a version of the policy: which, and where it lies."""
    max_turns: Annotated[int, Meta(ge=0, le=65_536)] = 0
    """Of an episode, actions alone; 0: as many as the environment allows."""


class GroupDrop(Fields):
    """A peer gives a group up."""

    grant: Number
    epoch: Number
    reason: Reason


class Acknowledge(Fields):
    """The learner holds this trial; the peer may forget it."""

    grant: Number
    epoch: Number
    trial: Number
    is_duplicate: bool


class Unwanted(Fields):
    """The learner knows of no such trial and does not take it; the peer may forget it."""

    grant: Number
    epoch: Number
    trial: Number
    reason: Reason


class Publication(Fields):
    """Weights are ready to be mapped."""

    version: Number
    path: Path
    digest: Digest


class Loaded(Fields):
    """A peer draws with this version, and reads no older one any more."""

    version: Number


class Heartbeat(Fields):
    """A peer lives. Counters are totals since its start, by name; blocked seconds by cause."""

    name: Name
    counters: Annotated[dict[Name, Measured], Meta(max_length=256)]
    blocked_s: Annotated[dict[Name, Booked], Meta(max_length=64)]


class Goodbye(Fields):
    """The sender ends its side; nothing follows."""

    reason: Reason


Header = (
    Hello
    | Welcome
    | Refusal
    | WhoAreYou
    | GroupGrant
    | GroupDrop
    | Acknowledge
    | Unwanted
    | Publication
    | Loaded
    | Heartbeat
    | Goodbye
    | Enquiry
    | Prospectus
    | Fetch
    | NoFile
    | ChunkHeader
    | TrialHeader
)
Message = (
    Hello
    | Welcome
    | Refusal
    | WhoAreYou
    | GroupGrant
    | GroupDrop
    | Acknowledge
    | Unwanted
    | Publication
    | Loaded
    | Heartbeat
    | Goodbye
    | Enquiry
    | Prospectus
    | Fetch
    | NoFile
    | Chunk
    | TrialResult
)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)


def encode(message: Message, limits: Limits = DEFAULT_LIMITS) -> list[Frame]:
    """The frames of a message; the arrays of a trial of one segment are views of its own.

    What the other side would refuse for its size or a field is refused here, where the cause is.

    Raises:
        WireError: a field is out of bounds, or a trial is over a limit.
    """
    header: Any = message
    arrays: list[Frame] = []
    if isinstance(message, TrialResult):
        header, arrays = pack_trial(message, limits)
    elif isinstance(message, Chunk):
        header, arrays = pack_chunk(message, limits)
    try:
        packed = _ENCODER.encode(header)
    except (OverflowError, TypeError, UnicodeEncodeError) as fault:
        raise WireError(f"{type(message).__name__} cannot be written: {fault}") from fault
    _check_header_size(packed, limits)
    _read_header(packed)
    frames: list[Frame] = [PROTOCOL, packed, *arrays]
    return [*frames, _checksum(frames)]


def decode(
    frames: Sequence[Frame],
    limits: Limits = DEFAULT_LIMITS,
    protocols: Sequence[bytes] = (PROTOCOL,),
) -> Message:
    """The message of some frames; its tokens and log-probs are views of them.

    Sizes are checked before anything is allocated.

    Args:
        protocols: tags that are taken.

    Raises:
        WireError: the frames are no message of this protocol, for whatever reason.
    """
    _check_outside(frames, limits, protocols)
    header = _read_header(frames[1])
    arrays = frames[2:-1]
    if isinstance(header, TrialHeader):
        return unpack_trial(header, arrays, limits)
    if isinstance(header, ChunkHeader):
        return unpack_chunk(header, arrays, limits)
    if arrays:
        raise WireError(f"{type(header).__name__} has no arrays, got {len(arrays)} frames of them")
    return header


def _check_outside(frames: Sequence[Frame], limits: Limits, protocols: Sequence[bytes]) -> None:
    """What can be known without reading the header: tag, number of frames, sizes, checksum."""
    if not frames:
        raise WireError("a message has at least 3 frames, got none")
    if bytes(frames[0][: len(PROTOCOL) + 1]) not in protocols:
        got = bytes(frames[0][:32]).decode("ascii", "backslashreplace")
        ours = PROTOCOL.decode()
        raise WireError(f"peer speaks `{got}`, this build {ours}: run both from one install")
    if not 3 <= len(frames) <= 3 + _MAX_ARRAYS:
        raise WireError(f"a message has 3 to {3 + _MAX_ARRAYS} frames, got {len(frames)}")
    _check_header_size(frames[1], limits)
    for frame in frames[2:-1]:
        if len(frame) > limits.max_peer_frame_bytes():
            most = limits.max_peer_frame_bytes()
            raise WireError(f"a frame has {len(frame)} bytes, at most {most}")
    if bytes(frames[-1][: _CHECKSUM.size + 1]) != _checksum(frames[:-1]):
        raise WireError("checksum does not match: frames were damaged, lost or mixed on the way")


def _check_header_size(header: Frame, limits: Limits) -> None:
    if len(header) > limits.max_header_bytes:
        raise WireError(f"header has {len(header)} bytes, at most {limits.max_header_bytes}")


def _read_header(packed: Frame) -> Header:
    try:
        return _DECODER.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise WireError(f"header is no message: {fault}") from fault


def _checksum(frames: Sequence[Frame]) -> bytes:
    """CRC-32 over the lengths (a byte that moved to the next frame is seen) and over the bytes."""
    crc = zlib.crc32(struct.pack(f"<{len(frames)}Q", *map(len, frames)))
    for frame in frames:
        crc = zlib.crc32(frame, crc)
    return _CHECKSUM.pack(crc)
