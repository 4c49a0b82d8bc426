"""Both seats of a play: on the wire, in the ledger and in the journal together, or not at all."""

from dataclasses import replace

import msgspec
import pytest

from mage_async.admission.ledger import Accepted, Duplicate, Ledger, Unknown
from mage_async.admission.replay import replay
from mage_async.attribution import steps_of
from mage_async.config.config_file import dump, find, load
from mage_async.errors import WireError
from mage_async.protocol.codec import decode, encode
from mage_async.protocol.journal_records import (
    Commit,
    Granted,
    Record,
    first_segment_header,
    line_of,
)
from mage_async.protocol.limits import DEFAULT_LIMITS, Limits
from mage_async.protocol.messages import GroupGrant, TrialResult
from mage_async.protocol.trial_arrays import pack_trial, unpack_trial
from mage_async.tasks.league import ITSELF, League
from mage_async.trajectory import Task, Trial
from mage_services.journal.record_bytes import (
    MAGIC,
    decode_record,
    encode_record,
    read_trial_header,
    scan,
)
from tests.helpers.populations import trial


def seat(index: int, *rewards: float) -> Trial:
    """A trial of a group; every second one is from across the table."""
    own = trial(ITSELF, list(rewards), index)
    return replace(own, task=own.task.from_other_seat()) if index % 2 else own


def pair(index: int, epoch: int = 0) -> TrialResult:
    """Both seats of a play."""
    return TrialResult(0, epoch, seat(index, 1.0, -2.0), other=seat(index + 1, -1.0, 2.0))


def ledger() -> Ledger:
    """One group of four trials a step."""
    return Ledger(groups_per_step=1, max_staleness=1, trials_per_group=4)


def granted(slots: Ledger) -> GroupGrant:
    return slots.grant(Task("kuhn", ITSELF, 5), num_episodes=2, peer="a", now=0.0, deadline_s=10.0)


def same(one: Trial, other: Trial) -> bool:
    parts = zip(one.segments, other.segments, strict=True)
    arrays = all(
        (a.tokens == b.tokens).all()
        and (a.logprobs == b.logprobs).all()
        and (a.is_sampled == b.is_sampled).all()
        and a.versions == b.versions
        for a, b in parts
    )
    return arrays and replace(one, segments=()).__repr__() == replace(other, segments=()).__repr__()


def test_one_message_carries_both_seats() -> None:
    sent = pair(2)
    got = decode(encode(sent))
    assert isinstance(got, TrialResult)
    assert got.other is not None
    assert same(got.trial, sent.trial)
    assert sent.other is not None
    assert same(got.other, sent.other)
    assert got.other.task.seat == 1 - got.trial.task.seat


def test_both_seats_are_checked_and_have_the_room_of_one_message() -> None:
    header, arrays = pack_trial(pair(0), DEFAULT_LIMITS)
    unpack_trial(header, arrays, Limits(max_tokens=4))
    with pytest.raises(WireError, match="both seats have at most 3 tokens, got 4"):
        unpack_trial(header, arrays, Limits(max_tokens=3))
    assert header.other is not None
    damaged = msgspec.structs.replace(header.other, turns=(), versions=((), ()))
    with pytest.raises(WireError, match="version runs"):
        unpack_trial(msgspec.structs.replace(header, other=damaged), arrays, DEFAULT_LIMITS)


def test_trials_that_are_not_of_one_play_are_not_packed() -> None:
    with pytest.raises(AssertionError, match="another play's trial"):
        encode(TrialResult(0, 0, seat(0, 1.0, 1.0), other=seat(3, 1.0, 1.0)))


def test_the_ledger_takes_both_seats_together_or_not_at_all() -> None:
    slots = ledger()
    granted(slots)
    assert isinstance(slots.receive(TrialResult(0, 0, seat(0, 1.0, 0.0))), Unknown)
    assert isinstance(slots.receive(TrialResult(0, 0, seat(1, 1.0, 0.0))), Unknown)
    shifted = TrialResult(0, 0, seat(1, 1.0, 0.0), other=seat(2, 1.0, 0.0))
    assert isinstance(slots.receive(shifted), Unknown)
    beyond = TrialResult(0, 0, seat(4, 1.0, 0.0), other=seat(5, 1.0, 0.0))
    assert isinstance(slots.receive(beyond), Unknown)
    assert slots.receive(pair(2)) == Accepted(is_complete=False)
    assert isinstance(slots.receive(pair(2)), Duplicate)
    assert slots.receive(pair(0)) == Accepted(is_complete=True)
    batch = slots.take_batch()
    assert batch is not None
    assert [each.index for each in batch[0].trials] == [0, 1, 2, 3]
    assert [each.task.seat for each in batch[0].trials] == [0, 1, 0, 1]
    assert slots.counts().acknowledged == 4


def test_a_grant_says_which_plays_are_held() -> None:
    slots = ledger()
    granted(slots)
    slots.receive(pair(2))
    slots.peer_gone("a")
    again = slots.grant_again(0, peer="b", now=0.0, deadline_s=10.0)
    assert again.held == (2, 3)


def test_a_journal_brings_both_seats_back() -> None:
    slots = ledger()
    records: list[Record] = [
        first_segment_header(0, 0),
        slots.grant_record(granted(slots)),
        pair(0),
        pair(2),
    ]
    records.append(Commit(version=1, grants=(0,), digest="d", tensors={}, time_s=0.0))
    data = MAGIC + b"".join(bytes(piece) for record in records for piece in encode_record(record))
    bodies = scan(data).bodies
    found = [decode_record(body) for body in bodies]
    (step,) = replay(found, ledger(), League())
    assert step.groups is not None
    assert [each.index for each in step.groups[0].trials] == [0, 1, 2, 3]
    header = read_trial_header(bodies[2])
    assert header is not None
    assert [(each.index, each.task.seat) for each in header.seats()] == [(0, 0), (1, 1)]
    said = line_of(found[2])[1]
    assert "trial 0: 2 tokens" in said
    assert "and trial 1: 2 tokens" in said


def test_a_torn_tail_has_neither_seat() -> None:
    slots = ledger()
    records: list[Record] = [
        first_segment_header(0, 0),
        slots.grant_record(granted(slots)),
        pair(0),
    ]
    whole = MAGIC + b"".join(bytes(piece) for record in records for piece in encode_record(record))
    for cut in range(1, 60):
        found = [decode_record(body) for body in scan(whole[:-cut]).bodies]
        restored = ledger()
        assert list(replay(found, restored, League())) == []
        again = restored.renew_grants("a", now=0.0, deadline_s=1.0)
        assert [each.held for each in again] == [()]


def test_what_is_in_flight_is_listed_with_both_seats() -> None:
    slots = ledger()
    shipped = dump(load(find("kuhn"), []))
    head = msgspec.structs.replace(first_segment_header(0, 0), config=shipped)
    (rest,) = steps_of([head, Granted(peer="a", version=0, grant=granted(slots)), pair(2)])
    assert [each.index for each in rest.groups[0].trials] == [2, 3]
