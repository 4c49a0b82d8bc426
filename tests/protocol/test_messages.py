"""Messages without arrays, and what every message has in common."""

import struct
import zlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_async.errors import WireError
from mage_async.protocol.codec import PROTOCOL, LastEncoded, decode, encode
from mage_async.protocol.limits import Limits
from mage_async.protocol.messages import (
    MAX_REASON_CHARS,
    Acknowledge,
    Goodbye,
    GroupDrop,
    GroupGrant,
    Heartbeat,
    Hello,
    Message,
    Publication,
    Refusal,
    Welcome,
    WhoAreYou,
)

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)
reasons = st.text(st.characters(exclude_categories=["Cs"]), max_size=MAX_REASON_CHARS)
numbers = st.integers(0, 2**63 - 1)
counts = st.integers(1, 65_536)
seconds = st.floats(1e-9, 1e9)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Hello,
        role=st.sampled_from(["actor", "evaluator"]),
        name=names,
        build=names.filter(lambda text: len(text) <= 128),
        config_digest=names.filter(lambda text: len(text) <= 128),
        group_quota=st.integers(0, 65_536),
    ),
    st.builds(Welcome, version=numbers, weights_path=st.none() | names),
    st.builds(Refusal, reason=reasons),
    st.builds(WhoAreYou),
    st.builds(
        GroupGrant,
        grant=numbers,
        epoch=numbers,
        environment=names,
        member=names,
        seat=numbers,
        seed=numbers,
        num_trials=counts,
        num_episodes=counts,
        version=numbers,
        deadline_s=seconds,
        held=st.lists(numbers, max_size=8).map(tuple),
        max_turns=st.integers(0, 65_536),
    ),
    st.builds(GroupDrop, grant=numbers, epoch=numbers, reason=reasons),
    st.builds(Acknowledge, grant=numbers, epoch=numbers, trial=numbers, is_duplicate=st.booleans()),
    st.builds(Publication, version=numbers, path=names, digest=st.just("0f" * 32)),
    st.builds(
        Heartbeat,
        name=names,
        counters=st.dictionaries(names, st.floats(-1e300, 1e300), max_size=5),
        blocked_s=st.dictionaries(names, st.floats(0, 1e9), max_size=5),
    ),
    st.builds(Goodbye, reason=reasons),
)


def sealed(*frames: bytes) -> list[bytes]:
    """Frames with a checksum that fits, made here from the words of wire.py's docstring."""
    crc = zlib.crc32(struct.pack(f"<{len(frames)}Q", *map(len, frames)))
    for frame in frames:
        crc = zlib.crc32(frame, crc)
    return [*frames, struct.pack("<I", crc)]


def header(**fields: object) -> list[bytes]:
    """A sealed message with this header and no arrays."""
    return sealed(PROTOCOL, msgspec.msgpack.encode(fields))


@settings(max_examples=500, deadline=None)
@given(messages)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    assert decode([bytes(frame) for frame in encode(message)]) == message


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_a_header_of_any_bytes_is_a_message_or_a_wire_error(packed: bytes) -> None:
    try:
        message = decode(sealed(PROTOCOL, packed))
    except WireError:
        return
    assert decode(encode(message)) == message


@settings(max_examples=500, deadline=None)
@given(messages, st.data())
def test_a_header_with_one_byte_changed_is_a_message_or_a_wire_error(
    message: Message, data: st.DataObject
) -> None:
    packed = bytearray(encode(message)[1])
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        other = decode(sealed(PROTOCOL, bytes(packed)))
    except WireError:
        return
    assert decode(encode(other)) == other


@settings(max_examples=500, deadline=None)
@given(st.lists(st.binary(max_size=20), max_size=8))
def test_any_frames_are_a_wire_error(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


@settings(max_examples=500, deadline=None)
@given(messages, st.data())
def test_a_single_flipped_bit_is_seen(message: Message, data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode(message)]
    frame = data.draw(st.sampled_from(frames))
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        decode([bytes(frame) for frame in frames])


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        ([], "at least 3 frames, got none"),
        ([PROTOCOL], "3 to 7 frames, got 1"),
        ([PROTOCOL] * 8, "3 to 7 frames, got 8"),
        (
            [b"mage/0", b"", b""],
            "peer speaks `mage/0`, this build mage/2: run both from one install",
        ),
        ([b"\xff" * 99, b"", b""], "peer speaks `\\\\xff"),
        ([PROTOCOL, b"\x80", b"0000"], "checksum does not match"),
        (header(type="Hello"), "missing required field `role`"),
        (header(type="Welcome", version=1, wersion=2), "unknown field `wersion`"),
        (header(type="Welcome", version=-1), "Expected `int` >= 0"),
        (header(type="Welcome", version="1"), "Expected `int`, got `str`"),
        (header(type="Whatever"), "Invalid value 'Whatever'"),
        (header(type="Refusal", reason="x" * 2001), "length <= 2000"),
        (
            header(type="Heartbeat", name="a", counters={"x": float("nan")}, blocked_s={}),
            "Expected `float`",
        ),
        (sealed(PROTOCOL, b"\x81\xa4type\xa2\xff\xff"), "header is no message"),
        (sealed(PROTOCOL, b"\x82" + b"\x91" * 100_000), "header is no message"),
        (
            sealed(PROTOCOL, msgspec.msgpack.encode({"type": "WhoAreYou"}), b"array"),
            "WhoAreYou has no arrays, got 1 frames",
        ),
    ],
)
def test_what_is_wrong_is_said(frames: list[bytes], sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        decode(frames)


def test_sizes_are_checked_before_the_checksum_is_computed() -> None:
    limits = Limits(max_header_bytes=100, max_tokens=100, max_allowed=100)
    with pytest.raises(WireError, match="header has 101 bytes, at most 100"):
        decode([PROTOCOL, bytes(101), b"wrong"], limits)
    with pytest.raises(WireError, match="a frame has 401 bytes, at most 400"):
        decode([PROTOCOL, b"", bytes(401), b"wrong"], limits)


@pytest.mark.parametrize(
    "message",
    [
        Goodbye(reason="x" * (MAX_REASON_CHARS + 1)),
        Welcome(version=-1),
        Welcome(version=2**70),
        Goodbye(reason="\ud800"),
        Heartbeat(name="a", counters={"x": float("inf")}, blocked_s={}),
    ],
)
def test_what_the_other_side_would_refuse_is_refused_before_it_is_sent(message: Message) -> None:
    with pytest.raises(WireError):
        encode(message)


def test_a_byte_that_moved_to_the_next_frame_is_seen() -> None:
    tag, packed, crc = map(bytes, encode(WhoAreYou()))
    with pytest.raises(WireError, match="checksum"):
        decode([tag, packed[:-1], packed[-1:], crc])


def test_a_message_to_many_peers_is_encoded_once_and_another_one_anew():
    encoder, first = LastEncoded(), Publication(version=1, path="/weights/1", digest="0" * 32)
    assert encoder.encode(first) is encoder.encode(first)
    assert encoder.encode(first) == encode(first)
    second = Publication(version=2, path="/weights/2", digest="0" * 32)
    assert decode(encoder.encode(second)) == second


def test_a_message_that_cannot_be_encoded_leaves_nothing_of_the_one_before():
    encoder = LastEncoded()
    encoder.encode(Publication(version=1, path="/weights/1", digest="0" * 32))
    wrong = Publication(version=-1, path="/weights/1", digest="0" * 32)
    for _ in range(2):
        with pytest.raises(WireError):
            encoder.encode(wrong)
