"""The journal's bytes: what was written is read, and what was torn is cut where it was whole."""

import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_async.errors import WireError
from mage_async.policy_version import VersionRun
from mage_async.protocol.codec import decode, encode
from mage_async.protocol.journal_records import (
    Commit,
    Dropped,
    Granted,
    LoadedWeights,
    Published,
    Record,
    Segment,
    SegmentHeader,
    first_needed,
    first_segment_header,
    to_delete,
)
from mage_async.protocol.limits import DEFAULT_LIMITS
from mage_async.protocol.messages import GroupGrant, TrialResult
from mage_async.trajectory import Kind, Task, Trial, Turn
from mage_async.trajectory import Segment as Part
from mage_services.journal.record_bytes import (
    MAGIC,
    MAX_RECORD_BYTES,
    decode_record,
    encode_record,
    find_record,
    read_trial_header,
    scan,
)

SMALL = st.integers(0, 2**40)
NAMES = st.text(min_size=1, max_size=20)


def a_trial(grant: int, index: int, num_tokens: int) -> TrialResult:
    part = Part(
        np.arange(num_tokens, dtype=np.int32),
        np.arange(num_tokens) % 3 == 0,
        -np.arange(num_tokens, dtype=np.float32) / 7,
        (VersionRun(0, 2, 1),),
    )
    return TrialResult(grant, 1, Trial(Task("rps", "cycle-012", 7), index, 3, (part,), ()))


def a_grant(number: int, version: int = 0) -> GroupGrant:
    return GroupGrant(
        grant=number,
        epoch=0,
        environment="rps",
        member="cycle-012",
        seat=0,
        seed=number,
        num_trials=2,
        num_episodes=3,
        version=version,
        deadline_s=60.0,
    )


RECORDS = st.one_of(
    st.builds(a_trial, SMALL, st.integers(0, 9), st.integers(1, 200)),
    st.builds(Dropped, grant=SMALL, reason=st.text(max_size=50)),
    st.builds(Granted, peer=st.none() | NAMES, version=SMALL, grant=st.builds(a_grant, SMALL)),
    st.builds(Published, version=SMALL, path=NAMES, digest=NAMES),
    st.builds(
        LoadedWeights,
        peer=NAMES,
        version=SMALL,
        digest=NAMES,
        difference=st.floats(0, 1e9),
        num_retries=SMALL,
    ),
    st.builds(
        Commit,
        version=SMALL,
        grants=st.lists(SMALL, max_size=5).map(tuple),
        digest=NAMES,
        tensors=st.dictionaries(NAMES, NAMES, max_size=4),
        time_s=st.floats(0, 1e9),
    ),
    st.just(first_segment_header(3, 4)),
)


def segment_of(records: list[Record]) -> bytes:
    return MAGIC + b"".join(bytes(piece) for record in records for piece in encode_record(record))


def equal(one: Record, other: Record) -> bool:
    if isinstance(one, TrialResult):
        return b"".join(map(bytes, encode_record(one))) == b"".join(
            map(bytes, encode_record(other))
        )
    return one == other


@given(st.builds(a_trial, SMALL, st.integers(0, 9), st.integers(1, 200)))
def test_a_trial_that_has_arrived_is_written_as_it_arrived(sent: TrialResult) -> None:
    frames = [bytes(frame) for frame in encode(sent)]
    arrived = decode(frames)
    assert all(
        piece is frame for piece, frame in zip(encode_record(arrived)[3:], frames, strict=True)
    )
    assert segment_of([arrived]) == segment_of([sent])
    (body,) = scan(segment_of([arrived])).bodies
    assert decode_record(body).frames == ()


@pytest.mark.parametrize(("num_segments", "num_tokens"), [(9, 2**15), (300, 1000)])
def test_a_trial_of_many_or_long_contexts_is_sent_and_written(
    num_segments: int, num_tokens: int
) -> None:
    """As those of `trial.memory = "notes"` are: longer than any context."""
    result = a_trial(0, 0, num_tokens)
    part = result.trial.segments[0]
    notes = tuple(
        Turn(Kind.NOTES, 0, 0, number, 0, 3, 0.0, True, "a note " * 200)
        for number in range(num_segments)
    )
    trial = replace(result.trial, segments=(part,) * num_segments, turns=notes)
    sent = decode(encode(TrialResult(0, 1, trial)))
    assert isinstance(sent, TrialResult)
    (body,) = bodies_of(segment_of([sent]))
    assert equal(decode_record(body), TrialResult(0, 1, trial))


def test_the_largest_message_is_a_record() -> None:
    arrays = 4 * (2 * DEFAULT_LIMITS.max_tokens + DEFAULT_LIMITS.max_allowed)
    masks = DEFAULT_LIMITS.max_tokens // 8
    assert DEFAULT_LIMITS.max_header_bytes + arrays + masks + 1000 < MAX_RECORD_BYTES


def bodies_of(data: bytes) -> list[bytes]:
    return [bytes(body) for body in scan(data).bodies]


@given(st.lists(RECORDS, max_size=6))
def test_what_was_written_is_read(records: list[Record]) -> None:
    found = scan(segment_of(records))
    assert found.good_bytes == len(segment_of(records))
    assert len(found.bodies) == len(records)
    assert all(equal(decode_record(b), r) for b, r in zip(found.bodies, records, strict=True))


@given(RECORDS, RECORDS, st.data())
def test_a_record_is_found_behind_a_damaged_byte_and_not_in_a_part_of_it(
    first: Record, second: Record, data: st.DataObject
) -> None:
    whole, begin = segment_of([first, second]), len(segment_of([first]))
    place = data.draw(st.integers(len(MAGIC), begin - 1))
    damaged = whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :]
    assert find_record(damaged, scan(damaged).good_bytes) == begin
    assert find_record(damaged[:-1], len(MAGIC)) is None


@given(st.lists(RECORDS, min_size=1, max_size=4), st.data())
def test_a_cut_segment_keeps_exactly_the_records_before_the_cut(
    records: list[Record], data: st.DataObject
) -> None:
    whole = segment_of(records)
    cut = data.draw(st.integers(0, len(whole) - 1))
    kept = scan(whole[:cut])
    ends = [len(segment_of(records[:n])) for n in range(len(records) + 1)]
    assert len(kept.bodies) == max([n for n, end in enumerate(ends) if end <= cut], default=0)
    assert kept.good_bytes == max([end for end in ends if end <= cut], default=0)


@settings(max_examples=300)
@given(st.lists(RECORDS, min_size=1, max_size=4), st.data())
def test_a_flipped_bit_loses_its_record_and_what_follows_and_nothing_else(
    records: list[Record], data: st.DataObject
) -> None:
    whole = bytearray(segment_of(records))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    before = bodies_of(segment_of(records))
    ends = [len(segment_of(records[: n + 1])) for n in range(len(records))]
    count = 0 if bit // 8 < len(MAGIC) else sum(end <= bit // 8 for end in ends)
    assert bodies_of(bytes(whole)) == before[:count]


@settings(max_examples=300)
@given(st.lists(RECORDS, max_size=2), st.binary(max_size=200))
def test_any_bytes_behind_whole_records_are_a_tail_to_cut(
    records: list[Record], tail: bytes
) -> None:
    whole = segment_of(records)
    found = scan(whole + tail)
    assert found.good_bytes >= len(whole)
    assert bodies_of(whole) == [bytes(body) for body in found.bodies[: len(records)]]


@settings(max_examples=300)
@given(st.binary(min_size=1, max_size=300))
def test_whole_bytes_that_are_no_record_are_a_sentence_and_nothing_else(body: bytes) -> None:
    with pytest.raises(WireError):
        decode_record(bytes([body[0] % 3]) + body[1:])


@given(st.binary(max_size=300))
def test_the_header_of_a_damaged_trial_is_a_sentence_and_nothing_else(content: bytes) -> None:
    with pytest.raises(WireError):
        read_trial_header(b"\x01" + content)


def test_a_header_that_is_no_utf_8_is_a_sentence() -> None:
    (body,) = scan(segment_of([a_trial(1, 0, 4)])).bodies
    whole = bytes(body)
    assert read_trial_header(whole) is not None
    with pytest.raises(WireError, match="no header of this build"):
        read_trial_header(whole.replace(b"cycle-012", b"cycle-\xff12"))


def test_zeros_are_no_record() -> None:
    assert scan(MAGIC + bytes(4096)) == scan(MAGIC)


def test_a_length_beyond_the_bytes_is_not_believed() -> None:
    assert scan(MAGIC + (2**32 - 1).to_bytes(4, "little") + bytes(100)).bodies == []
    assert zlib.crc32(b"") == 0  # so a length of 0 with checksum 0 would be a record


def segments(*versions: tuple[int, int]) -> list[Segment]:
    return [Segment(n, v, oldest, 10) for n, (v, oldest) in enumerate(versions, 1)]


def test_a_checkpoint_needs_the_segments_of_the_groups_in_flight_at_its_head() -> None:
    found = segments((0, 0), (2, 1), (4, 3), (6, 5))
    assert first_needed(found, 7) == 3  # the groups of step 5's grants lie behind head 4
    assert first_needed(found, 5) == 2
    assert first_needed(found, 0) == 1


def test_nothing_older_than_the_oldest_group_is_needed_after_many_restarts_at_one_step() -> None:
    assert first_needed(segments((0, 0), (2, 1), (2, 2), (2, 2)), 2) == 1
    assert first_needed(segments((0, 0), (1, 1), (2, 2), (2, 2)), 2) == 2


def test_without_a_head_as_old_as_the_checkpoint_nothing_can_be_replayed() -> None:
    assert first_needed(segments((4, 3), (6, 5)), 3) is None
    assert first_needed([], 3) is None


def test_only_unneeded_segments_are_deleted_and_only_while_space_is_short() -> None:
    found = segments((0, 0), (2, 1), (4, 3), (6, 5))
    assert to_delete(found, 7, 40) == []
    assert to_delete(found, 7, 30) == [1]
    assert to_delete(found, 7, 0) == [1, 2]
    assert to_delete(found, 0, 0) == []


def test_a_head_knows_the_step_of_its_oldest_group() -> None:
    groups = (
        Granted(peer=None, version=2, grant=a_grant(5)),
        Granted(peer="a", version=3, grant=a_grant(6)),
    )
    empty = first_segment_header(4, 7)
    fields = {name: getattr(empty, name) for name in SegmentHeader.__struct_fields__}
    assert SegmentHeader(**fields | {"groups": groups}).oldest_version() == 2
    assert empty.oldest_version() == 4
