"""What every decoder is fed to break it: seeds, a mutator, and what may come of an input.

A decoder takes any bytes and gives a sound value or its own error with a sentence. Everything else
that comes out of `Target.feed` is a bug: another exception, a value that cannot be written again or
is another one then. `tests/protocol/test_fuzzing.py` feeds thousands of mutated inputs.
`bench/chaos/fuzz.py` feeds millions, measures their time and memory, and uses coverage where
atheris is installed.

An input of the wire is a list of frames behind a table of their lengths (`unbundle`). Where its
first byte is odd, checksums are made to fit: damage that no checksum would let through reaches the
decoders behind it.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from mage_async.config import config_file
from mage_async.errors import ConfigError, WireError
from mage_async.protocol import codec
from mage_async.protocol.trial_arrays import Frame
from mage_services.journal import record_bytes
from tests.helpers.fuzzing.messages_and_records import (
    example_messages,
    example_records,
    example_trial,
)

MAX_FRAMES = 8
_SEALED = 1
_LENGTH = struct.Struct("<H")
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Target:
    """One decoder."""

    name: str
    seeds: tuple[bytes, ...]
    """Sound inputs, from which mutation begins."""
    feed: Callable[[bytes], bool]
    """Decode; whether the input was sound. Raises what only a bug raises."""


def bundle(frames: Sequence[Frame], *, sealed: bool) -> bytes:
    """Frames as one input."""
    lengths = b"".join(_LENGTH.pack(len(frame)) for frame in frames)
    head = bytes([len(frames) << 1 | sealed])
    return head + lengths + b"".join(bytes(frame) for frame in frames)


def unbundle(data: bytes) -> list[bytes]:
    """The frames of an input, whatever it holds; at most `MAX_FRAMES`."""
    head = data[0] if data else 0
    count = min(head >> 1, MAX_FRAMES)
    start = 1 + count * _LENGTH.size
    frames = []
    for number in range(count):
        size = data[1 + number * _LENGTH.size :][: _LENGTH.size]
        length = _LENGTH.unpack(size)[0] if len(size) == _LENGTH.size else 0
        frames.append(data[start : start + length])
        start += length
    return _seal(frames) if head & _SEALED else frames


def _seal(frames: list[bytes]) -> list[bytes]:
    """The frames with a checksum that fits in place of the last one."""
    frames = frames[:-1]
    crc = zlib.crc32(struct.pack(f"<{len(frames)}Q", *map(len, frames)))
    for frame in frames:
        crc = zlib.crc32(frame, crc)
    return [*frames, _CHECKSUM.pack(crc)]


def feed_wire(data: bytes) -> bool:
    """Decode frames; what is taken can be sent, and arrives as it was."""
    try:
        message = codec.decode(unbundle(data))
    except WireError:
        return False
    frames = codec.encode(message)
    again = codec.encode(codec.decode(frames))
    assert list(map(bytes, frames)) == list(map(bytes, again)), "sent again it is another message"
    return True


def feed_journal(data: bytes) -> bool:
    """Scan a segment, and read each record that is whole; sealed, the one record there is."""
    bodies = [data[1:]] if data[:1] == b"\x01" else record_bytes.scan(data[1:]).bodies
    is_sound = False
    for body in bodies:
        if not body:  # `scan` gives none
            continue
        try:
            record = record_bytes.decode_record(body)
        except WireError:
            continue
        again = b"".join(bytes(piece) for piece in record_bytes.encode_record(record))
        assert len(record_bytes.scan(record_bytes.MAGIC + again).bodies) == 1, (
            "written it is not whole"
        )
        is_sound = True
    return is_sound


def feed_config(data: bytes) -> bool:
    """Read a configuration file; what is taken is written, and read again, as it is."""
    with NamedTemporaryFile(suffix=".toml") as file:
        path = Path(file.name)
        path.write_bytes(data)
        try:
            config = config_file.load(path)
        except ConfigError:
            return False
    assert config_file.loads(config_file.dump(config)) == config, "written it is another one"
    return True


def targets(config: Path) -> list[Target]:
    """Every decoder; `config` is a configuration file to begin from."""
    resolved = config_file.dump(config_file.load(config))
    frames = [codec.encode(message) for message in example_messages()]
    trials = [frames[-1], codec.encode(example_trial(14)), codec.encode(example_trial(200))]
    records = [
        b"".join(bytes(p) for p in record_bytes.encode_record(record))
        for record in example_records()
    ]
    bodies = [bytes(record_bytes.scan(record_bytes.MAGIC + record).bodies[0]) for record in records]
    whole = record_bytes.MAGIC + b"".join(records)
    return [
        Target("wire", _bundles(frames), feed_wire),
        Target("trial frames", _bundles(trials), feed_wire),
        Target("journal", (b"\x00" + whole, *(b"\x01" + body for body in bodies)), feed_journal),
        Target("configuration", (config.read_bytes(), resolved.encode()), feed_config),
    ]


def _bundles(messages: Sequence[Sequence[Frame]]) -> tuple[bytes, ...]:
    return tuple(bundle(frames, sealed=sealed) for frames in messages for sealed in (False, True))
