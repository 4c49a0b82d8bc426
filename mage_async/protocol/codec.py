"""A message as frames, and back: the bytes on every socket.

A message is a list of frames: `[tag][header][arrays …][checksum]`. The header is msgpack, typed and
bounded (`messages.py`); only a trial has arrays (`trial_frames.py`).
The checksum, CRC-32 in little endian, covers the length and the bytes of every frame before it. It
is zlib's: 9 µs for the 70 KB of a long trial where a crc32c package takes 2 µs, which is not worth
a dependency when encoding and decoding may take 100 µs.

The sender computes the checksum once and the learner compares it once, on arrival. The journal has
the frames of a trial as they arrived, under a checksum of its own (`decode_kept`).

Malformed input is `WireError` with a sentence, and nothing else, whatever the bytes.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from mage_async.errors import WireError
from mage_async.protocol.messages import Header, Message
from mage_async.protocol.trial_frames import TrialResult, pack_trial, unpack_trial
from mage_async.protocol.trial_header import DEFAULT_LIMITS, Frame, Limits, TrialHeader

PROTOCOL = b"mage/2"
KEPT = (PROTOCOL, b"mage/1")
"""Trials that a journal may hold: mage/1 knew neither `VersionRun.provenance` nor
`Turn.num_reused`, which have defaults.
"""
_MAX_ARRAYS = 3
_CHECKSUM = struct.Struct("<I")
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
    try:
        packed = _ENCODER.encode(header)
    except (OverflowError, TypeError, UnicodeEncodeError) as fault:
        raise WireError(f"{type(message).__name__} cannot be written: {fault}") from fault
    _check_header_size(packed, limits)
    _read_header(packed)  # bounds are checked only here: msgspec does so as it reads (0.2 to 10 µs)
    frames: list[Frame] = [PROTOCOL, packed, *arrays]
    return [*frames, _checksum(frames)]


@dataclass(slots=True)
class LastEncoded:
    """Encodes messages; one that is sent to many peers, as a publication is, only once."""

    limits: Limits = DEFAULT_LIMITS
    _message: Message | None = None
    _frames: list[Frame] = field(default_factory=list)

    def encode(self, message: Message) -> list[Frame]:
        """As `encode`; for the same object as before, the same frames.

        Raises:
            WireError: as `encode`.
        """
        if message is not self._message:
            self._frames = encode(message, self.limits)
            self._message = message
        return self._frames


def decode(frames: Sequence[Frame], limits: Limits = DEFAULT_LIMITS) -> Message:
    """The message of some frames of a peer; its tokens and log-probs are views of them.

    Sizes are checked before anything is allocated.

    Raises:
        WireError: the frames are no message of this protocol, for whatever reason.
    """
    _check_outside(frames, limits, (PROTOCOL,))
    if bytes(frames[-1][: _CHECKSUM.size + 1]) != _checksum(frames[:-1]):
        raise WireError("checksum does not match: frames were damaged, lost or mixed on the way")
    return _message(frames, limits)


def decode_kept(frames: Sequence[Frame], limits: Limits = DEFAULT_LIMITS) -> Message:
    """The message of frames that a journal kept; those of earlier protocols are taken too.

    Their checksum was compared when they arrived; since then a checksum of the journal covers them,
    which its reader has compared.

    Raises:
        WireError: the frames are no message of a protocol in `KEPT`, for whatever reason.
    """
    _check_outside(frames, limits, KEPT)
    return _message(frames, limits)


def _message(frames: Sequence[Frame], limits: Limits) -> Message:
    header = _read_header(frames[1])
    arrays = frames[2:-1]
    if isinstance(header, TrialHeader):
        return replace(unpack_trial(header, arrays, limits), frames=tuple(frames))
    if arrays:
        raise WireError(f"{type(header).__name__} has no arrays, got {len(arrays)} frames of them")
    return header


def _check_outside(frames: Sequence[Frame], limits: Limits, protocols: Sequence[bytes]) -> None:
    """What can be known without reading the header: tag, number of frames, sizes."""
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
        if len(frame) > limits.max_frame_bytes():
            most = limits.max_frame_bytes()
            raise WireError(f"a frame has {len(frame)} bytes, at most {most}")


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
