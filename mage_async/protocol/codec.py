"""Encode a message as ZeroMQ frames, and decode it: the bytes on every socket.

A message is a list of frames: `[tag][header][arrays ...][checksum]`. The header is typed, bounded
msgpack (`messages.py`); only a trial has arrays (`trial_arrays.py`). Malformed bytes of any kind
raise `WireError` with a sentence, and never another exception.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from mage_async.errors import WireError
from mage_async.protocol.limits import DEFAULT_LIMITS, Limits
from mage_async.protocol.messages import Header, Message
from mage_async.protocol.trial_arrays import (
    EpisodeHeader,
    EpisodeResult,
    Frame,
    TrialHeader,
    TrialResult,
    pack_episodes,
    pack_trial,
    unpack_episodes,
    unpack_trial,
)
from mage_async.trajectory import Trial

PROTOCOL = b"mage/2"
"""Tag with which every message begins."""
_MAX_ARRAYS = 4
"""Largest number of arrays of a message."""

# The checksum is a CRC-32, in little endian, over the length and the bytes of every frame before
# it. The sender computes it once and the learner compares it once, on arrival. The journal keeps
# the frames of a trial as they arrived, under a checksum of its own.
#
# zlib's CRC-32 takes 9 µs for the 70 KB of a long trial. A crc32c package would take 2 µs, which is
# not worth a dependency while encoding and decoding may take 100 µs.
_CHECKSUM = struct.Struct("<I")

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)


def encode(message: Message, limits: Limits = DEFAULT_LIMITS) -> list[Frame]:
    """Return the frames of a message; the arrays of a trial with one segment are views, not copies.

    Raises:
        WireError: a field is out of bounds, or a trial exceeds a limit. The receiver would refuse
            such a message; refusing it here shows the error where its cause is.
    """
    header: Any = message
    arrays: list[Frame] = []
    if isinstance(message, TrialResult):
        header, arrays = pack_trial(message, limits)
    elif isinstance(message, EpisodeResult):
        # The learner forwards episodes as they arrived; it never forwards a trial.
        if message.frames:
            return list(message.frames)
        header, arrays = pack_episodes(message, limits)
    try:
        packed = _ENCODER.encode(header)
    except (OverflowError, TypeError, UnicodeEncodeError) as fault:
        raise WireError(f"{type(message).__name__} cannot be written: {fault}") from fault
    _check_header_size(packed, limits)
    # msgspec checks the bounds of fields only when it decodes, so decode (0.2 to 10 µs).
    _decode_header(packed)
    frames: list[Frame] = [PROTOCOL, packed, *arrays]
    return [*frames, _checksum(frames)]


def encode_result(
    grant: int, epoch: int, trials: Sequence[Trial], num_retries: int = 0
) -> list[Frame]:
    """Return the frames of the `TrialResult` of a trial that was played to its end.

    Args:
        grant: Number of the group that the trial belongs to.
        epoch: How often the group had been granted before the grant under which the trial was
            played.
        trials: The trial, and that of the other seat if one policy played both.
        num_retries: Number of times that the trial had been played before.

    Raises:
        WireError: the trial exceeds a limit.
    """
    played = [replace(each, num_retries=num_retries) for each in trials]
    other_seat = played[1] if len(played) > 1 else None
    return encode(TrialResult(grant, epoch, played[0], other=other_seat))


@dataclass(slots=True)
class LastEncoded:
    """Encode messages; encode one that is sent to several peers in a row only once."""

    limits: Limits = DEFAULT_LIMITS
    _message: Message | None = None
    _frames: list[Frame] = field(default_factory=list)

    def encode(self, message: Message) -> list[Frame]:
        """Return `encode(message)`, or the frames of the last call if the message is the same
        object.

        Raises:
            WireError: as `encode`.
        """
        if message is not self._message:
            self._frames = encode(message, self.limits)
            self._message = message
        return self._frames


def decode(
    frames: Sequence[Frame], limits: Limits = DEFAULT_LIMITS, *, is_checked: bool = False
) -> Message:
    """Return the message of frames; the tokens and log-probs of a trial are views of the frames.

    Args:
        is_checked: Whether the checksum was compared on arrival, and another one, such as the
            journal's, has covered the frames since then; so it is not compared again.

    Raises:
        WireError: the frames are no message of this protocol.
    """
    _check_sizes(frames, limits)
    # The slice is one byte longer than a checksum, so that a frame which is too long is not equal.
    if not is_checked and bytes(frames[-1][: _CHECKSUM.size + 1]) != _checksum(frames[:-1]):
        raise WireError("checksum does not match: frames were damaged, lost or mixed on the way")
    header, arrays = _decode_header(frames[1]), frames[2:-1]
    if isinstance(header, EpisodeHeader):
        return replace(unpack_episodes(header, arrays, limits), frames=tuple(frames))
    if isinstance(header, TrialHeader):
        return replace(unpack_trial(header, arrays, limits), frames=tuple(frames))
    if arrays:
        raise WireError(f"{type(header).__name__} has no arrays, got {len(arrays)} frames of them")
    return header


def _check_sizes(frames: Sequence[Frame], limits: Limits) -> None:
    """Check the tag, the number of frames and their sizes, without decoding the header."""
    if not frames:
        raise WireError("a message has at least 3 frames, got none")
    # The slice is one byte longer than the tag, so that a frame which is too long is not equal.
    if bytes(frames[0][: len(PROTOCOL) + 1]) != PROTOCOL:
        got = bytes(frames[0][:32]).decode("ascii", "backslashreplace")
        ours = PROTOCOL.decode()
        raise WireError(f"peer speaks `{got}`, this build {ours}: run both from one install")
    if not 3 <= len(frames) <= 3 + _MAX_ARRAYS:
        raise WireError(f"a message has 3 to {3 + _MAX_ARRAYS} frames, got {len(frames)}")
    _check_header_size(frames[1], limits)
    for frame in frames[2:-1]:
        if len(frame) > (most := limits.max_frame_bytes()):
            raise WireError(f"a frame has {len(frame)} bytes, at most {most}")


def _check_header_size(header: Frame, limits: Limits) -> None:
    """Raise a `WireError` if a header is too large."""
    if len(header) > limits.max_header_bytes:
        raise WireError(f"header has {len(header)} bytes, at most {limits.max_header_bytes}")


def _decode_header(packed: Frame) -> Header:
    """Decode a header, and check the bounds of its fields."""
    try:
        return _DECODER.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise WireError(f"header is no message: {fault}") from fault


def _checksum(frames: Sequence[Frame]) -> bytes:
    """Return the checksum frame of some frames."""
    # The lengths are covered so that a byte which moved from one frame to the next is noticed.
    crc = zlib.crc32(struct.pack(f"<{len(frames)}Q", *map(len, frames)))
    for frame in frames:
        crc = zlib.crc32(frame, crc)
    return _CHECKSUM.pack(crc)
