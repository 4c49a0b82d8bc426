"""Trials on the wire: arrays, checks, and every way of damaging them."""

import dataclasses
import struct
import zlib
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_async.errors import WireError
from mage_async.policy_version import PROVENANCES, VersionRun
from mage_async.protocol.codec import PROTOCOL, decode, encode
from mage_async.protocol.limits import Limits
from mage_async.protocol.messages import Message, TrialResult
from mage_async.protocol.trial_arrays import TrialHeader
from mage_async.restriction import AllowedSets
from mage_async.trajectory import Alternative, Kind, Segment, Task, Trial, Turn

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


infos = st.dictionaries(texts, st.floats(-9, 9) | texts, max_size=3).map(
    lambda said: msgspec.json.encode(said).decode()
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    num_tokens = draw(st.integers(1, 40))
    source = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    starts = draw(st.lists(st.integers(0, num_tokens - 1), unique=True, max_size=4).map(sorted))
    policies = [draw(st.integers(0, 2**31 - 1)) for _ in starts]
    runs = [
        VersionRun(s, p, draw(st.integers(0, p)), draw(st.sampled_from(PROVENANCES)))
        for s, p in zip(starts, policies, strict=True)
    ]
    tokens = source.integers(0, 2**31 - 1, num_tokens, dtype=np.int32)
    is_sampled = source.random(num_tokens) < (0.5 if runs else 0.0)
    restricted = draw(st.sampled_from([0.0, 0.5, 1.0]))
    drawn_from = [
        np.unique([token, *source.integers(0, 2**31 - 1, 3)]).astype(np.int32)
        if source.random() < restricted
        else None
        for token in tokens[is_sampled]
    ]
    return Segment(
        tokens=tokens,
        is_sampled=is_sampled,
        logprobs=-source.exponential(size=num_tokens).astype(np.float32),
        versions=tuple(runs),
        allowed=AllowedSets.of(drawn_from),
    )


@st.composite
def turns(draw: st.DrawFn, played: list[Segment], num_episodes: int) -> Turn:
    segment = draw(st.integers(0, len(played) - 1))
    start = draw(st.integers(0, len(played[segment].tokens)))
    return Turn(
        kind=draw(st.sampled_from(Kind)),
        episode=draw(st.integers(0, num_episodes - 1)),
        index=draw(st.integers(0, 99)),
        segment=segment,
        start=start,
        stop=draw(st.integers(start, len(played[segment].tokens))),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        is_valid=draw(st.booleans()),
        action=draw(texts),
        anchor=draw(texts),
        num_reused=draw(st.integers(0, start)),
        info=draw(st.one_of(st.just(""), infos)),
    )


@st.composite
def alternatives(draw: st.DrawFn, played: list[Turn]) -> tuple[Alternative, ...]:
    """Alternatives to some of the actions."""
    asked = [n for n, turn in enumerate(played) if turn.kind is Kind.ACT and draw(st.booleans())]
    found = []
    for number in asked:
        turn, step = played[number], Alternative(number, draw(texts))
        if turn.stop > turn.start and draw(st.booleans()):
            place = draw(st.integers(turn.start, turn.stop - 1))
            step = dataclasses.replace(step, place=place, token=draw(st.integers(0, 2**31 - 1)))
        found.append(step)
    return tuple(found)


@st.composite
def results(draw: st.DrawFn) -> TrialResult:
    played = draw(st.lists(segments(), min_size=1, max_size=3))
    num_episodes = draw(st.integers(1, 4))
    counters = st.integers(0, 2**40)
    done = draw(st.lists(turns(played, num_episodes), max_size=4))
    trial = Trial(
        task=Task(draw(texts), draw(texts), draw(st.integers(0, 2**63)), draw(st.integers(0, 3))),
        index=draw(counters),
        num_episodes=num_episodes,
        segments=tuple(played),
        turns=tuple(done),
        num_prompt_tokens=draw(counters),
        num_reused_tokens=draw(counters),
        num_repeated_tokens=draw(counters),
        num_extension_faults=draw(counters),
        num_injections=draw(counters),
        num_retries=draw(counters),
        duration_s=draw(st.floats(0, 1e6)),
        alternatives=draw(alternatives(done)),
    )
    return TrialResult(draw(counters), draw(counters), trial)


def example() -> TrialResult:
    """Two episodes in one segment of ten tokens, two sampled under version 3, two under 4."""
    segment = Segment(
        tokens=np.arange(10, dtype=np.int32),
        is_sampled=np.array([0, 0, 1, 1, 0, 0, 1, 1, 0, 0], bool),
        logprobs=np.array([0, 0, -1, -2, 0, 0, -3, -4, 0, 0], np.float32),
        versions=(VersionRun(2, 3, 3), VersionRun(6, 4, 3)),
    )
    played = (
        Turn(Kind.ACT, 0, 0, 0, 2, 4, -1.0, True, "rock", "start", info='{"hint":[1,"é"]}'),
        Turn(Kind.ACT, 1, 0, 0, 6, 8, 1 / 3, True, "paper", "start"),
    )
    return TrialResult(7, 1, Trial(Task("rps", "cycle-1", 5), 2, 2, (segment,), played))


RESTRICTED = AllowedSets.of([np.array([1, 2, 9], np.int32), None, np.array([6, 7], np.int32), None])
"""Sets of the example's four sampled tokens 2, 3, 6 and 7."""


def with_allowed(**changes: object) -> TrialResult:
    return with_segment(allowed=dataclasses.replace(RESTRICTED, **changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokens": np.array([1, 3, 9, 6, 7], np.int32)}, "lies in its allowed set, got one that"),
        ({"tokens": np.array([2, 1, 9, 6, 7], np.int32)}, "are at least 0, and ascend"),
        ({"tokens": np.array([-1, 2, 9, 6, 7], np.int32)}, "are at least 0, and ascend"),
        ({"offsets": np.array([0, 4, 5], np.int32)}, "at least two tokens each"),
        ({"offsets": np.array([0, 3, 4], np.int32)}, "at least two tokens each, and each given"),
        (
            {"index": np.array([0, -1, 2, -1], np.int32)},
            "4 sampled tokens have set numbers -1 to 1",
        ),
        (
            {"index": np.array([0, -2, 1, -1], np.int32)},
            "4 sampled tokens have set numbers -1 to 1",
        ),
        (
            {"index": np.array([0, -1, 1], np.int32)},
            "numbers of allowed sets have 48 bytes, got 44",
        ),
    ],
)
def test_allowed_sets_that_no_engine_used_are_refused(changes: dict, sentence: str) -> None:
    encode(with_allowed())
    with pytest.raises(WireError, match=sentence):
        encode(with_allowed(**changes))


def test_lists_of_actions_that_are_too_long_to_record_are_refused_with_the_cure() -> None:
    with pytest.raises(WireError, match=r"take 12 numbers to record, at most 11 .*restricted = f"):
        encode(with_allowed(), Limits(max_allowed=11))


def with_trial(result: TrialResult, **changes: object) -> TrialResult:
    return dataclasses.replace(result, trial=dataclasses.replace(result.trial, **changes))


def with_turn(**changes: object) -> TrialResult:
    first, second = example().trial.turns
    return with_trial(example(), turns=(first, dataclasses.replace(second, **changes)))


def with_segment(**changes: object) -> TrialResult:
    (segment,) = example().trial.segments
    return with_trial(example(), segments=(dataclasses.replace(segment, **changes),))


def plain(message: Message) -> object:
    """Something that compares by value; arrays do not."""
    assert isinstance(message, TrialResult)
    trial = message.trial
    arrays = [
        (
            *(s.tokens.tobytes(), s.is_sampled.tobytes(), s.logprobs.tobytes(), s.versions),
            s.allowed and tuple(None if each is None else tuple(each) for each in s.allowed),
        )
        for s in trial.segments
    ]
    shapes = [(s.tokens.dtype, s.is_sampled.dtype, s.logprobs.dtype) for s in trial.segments]
    rest = dataclasses.replace(trial, segments=())
    fields = [getattr(rest, field.name) for field in dataclasses.fields(rest)]
    return message.grant, message.epoch, fields, arrays, shapes


def sealed(frames: list[bytes]) -> list[bytes]:
    crc = zlib.crc32(struct.pack(f"<{len(frames)}Q", *map(len, frames)))
    for frame in frames:
        crc = zlib.crc32(frame, crc)
    return [*frames, struct.pack("<I", crc)]


def frames_of(result: TrialResult) -> list[bytes]:
    return [bytes(frame) for frame in encode(result)]


def with_header(change: Callable[[dict], object]) -> list[bytes]:
    """The example's frames with a changed header and a checksum that fits."""
    frames = frames_of(example())
    fields = msgspec.msgpack.decode(frames[1])
    change(fields)
    return sealed([PROTOCOL, msgspec.msgpack.encode(fields), *frames[2:-1]])


@settings(max_examples=200, deadline=None)
@given(results())
def test_a_trial_arrives_as_it_was_sent(result: TrialResult) -> None:
    assert plain(decode(frames_of(result))) == plain(result)


def test_a_trial_without_alternatives_is_written_without_the_field() -> None:
    assert b"alternatives" not in b"".join(frames_of(example()))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([Alternative(2, "rock")], "in order of 2 turns, got 2 after -1"),
        ([Alternative(1, "rock"), Alternative(1, "rock")], "got 1 after 1"),
        ([Alternative(0, "x" * 1025)], "over 1024 characters"),
        ([Alternative(0, "paper", 4, 3)], "puts token 3 at 4, outside of 2:4"),
        ([Alternative(0, "paper", 3, -2)], "puts token -2 at 3"),
        ([Alternative(0, "paper", -1, 3)], "puts token 3 at -1"),
    ],
)
def test_an_alternative_that_cannot_be_one_is_refused(steps: list[Alternative], said: str) -> None:
    with pytest.raises(WireError, match=said):
        encode(with_trial(example(), alternatives=tuple(steps)))


def test_a_remark_has_no_alternative() -> None:
    first, second = example().trial.turns
    turns = (dataclasses.replace(first, kind=Kind.REFLECT), second)
    with pytest.raises(WireError, match="turn 0 has an alternative and is no action"):
        encode(with_trial(example(), turns=turns, alternatives=(Alternative(0, "rock"),)))


def test_no_peer_and_no_journal_may_bring_a_message_of_another_protocol() -> None:
    other = sealed([b"mage/1", *frames_of(example())[1:-1]])
    for read in (decode, partial(decode, is_checked=True)):
        with pytest.raises(WireError, match="peer speaks `mage/1`, this build mage/2"):
            read(other)


@st.composite
def damaged(draw: st.DrawFn, frames: list[bytes]) -> list[bytes]:
    """The frames with one thing done to them."""
    frames = list(frames)
    one, other = (draw(st.integers(0, len(frames) - 1)) for _ in range(2))
    cut = draw(st.integers(0, len(frames[one])))
    match draw(
        st.sampled_from(["flip", "cut", "grow", "lose", "swap", "repeat", "move", "replace"])
    ):
        case "flip" if frames[one]:
            bit = draw(st.integers(0, len(frames[one]) * 8 - 1))
            flipped = bytearray(frames[one])
            flipped[bit // 8] ^= 1 << bit % 8
            frames[one] = bytes(flipped)
        case "cut":
            frames[one] = frames[one][:cut]
        case "grow":
            frames[one] += draw(st.binary(min_size=1, max_size=8))
        case "lose":
            del frames[one]
        case "swap":
            frames[one], frames[other] = frames[other], frames[one]
        case "repeat":
            frames.insert(other, frames[one])
        case "move":
            frames[one], frames[other] = frames[one][:cut], frames[one][cut:] + frames[other]
        case _:
            frames[one] = draw(st.binary(max_size=64))
    return frames


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_damaged_frames_are_an_equal_trial_or_a_wire_error(data: st.DataObject) -> None:
    result = example()
    frames = data.draw(damaged(frames_of(result)))
    try:
        message = decode(frames)
    except WireError:
        return
    assert plain(message) == plain(result)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_damage_under_a_fitting_checksum_is_a_sound_trial_or_a_wire_error(
    data: st.DataObject,
) -> None:
    frames = data.draw(damaged(frames_of(example())[:-1]))
    try:
        message = decode(sealed(frames))
    except WireError:
        return
    assert plain(decode(frames_of(message))) == plain(message)


def test_tokens_and_logprobs_are_views_of_their_frames() -> None:
    frames = frames_of(example())
    (segment,) = decode(frames).trial.segments
    for array, frame in ((segment.tokens, frames[2]), (segment.logprobs, frames[3])):
        assert np.shares_memory(array, np.frombuffer(frame, np.uint8))
        assert not array.flags.writeable


def test_frames_of_one_segment_are_views_of_its_arrays() -> None:
    result = example()
    (segment,) = result.trial.segments
    frames = encode(result)
    assert np.shares_memory(np.frombuffer(frames[2], np.int32), segment.tokens)
    assert np.shares_memory(np.frombuffer(frames[3], np.float32), segment.logprobs)


def test_a_reward_keeps_every_bit() -> None:
    assert decode(frames_of(example())).trial.turns[1].reward == 1 / 3


def test_the_header_holds_every_field_of_a_trial_that_can_be_trained() -> None:
    fields = {field.name for field in dataclasses.fields(Trial)} - {"segments", "cut_at"}
    assert fields <= set(TrialHeader.__struct_fields__)


def test_what_no_environment_tried_is_not_sent() -> None:
    assert b"num_injections" not in bytes(encode(example())[1])
    assert b"num_injections" in bytes(encode(with_trial(example(), num_injections=1))[1])


UNSOUND = [
    (with_turn(segment=1), "turn 1 is in segment 1 of 1"),
    (with_turn(segment=-1), "turn 1 is in segment -1 of 1"),
    (with_turn(start=9, stop=8), "turn 1 spans 9:8 in a segment of 10 tokens"),
    (with_turn(stop=11), "turn 1 spans 6:11 in a segment of 10 tokens"),
    (with_turn(start=-1), "turn 1 spans -1:8"),
    (with_turn(episode=2), "turn 1 is in episode 2 at 0, of 2 episodes"),
    (with_turn(index=-1), "turn 1 is in episode 1 at -1"),
    (with_turn(reward=float("nan")), "turn 1 has reward nan, expected a finite number"),
    (with_turn(num_reused=7), "turn 1 reused 7 tokens of a prompt of 6"),
    (with_turn(action="x" * 40_000), "turn 1 has over 32768 characters of text"),
    (with_turn(info='"' + "x" * 5000 + '"'), "turn 1 has over 4096 characters of info"),
    (with_turn(info="__import__('os')"), "turn 1 has an info that is no JSON object"),
    (with_turn(info="[1]"), "turn 1 has an info that is no JSON object: Expected `object`"),
    (with_turn(info='{"a":' + "[" * 4000 + "]" * 80 + "}"), "info that is no JSON object"),
    (with_trial(example(), segments=()), "1 to 16384 segments, got 0"),
    (with_trial(example(), cut_at=1), "cut at episode 1 is only for evaluations"),
    (with_trial(example(), duration_s=float("nan")), "Expected `float`"),
    (with_trial(example(), num_prompt_tokens=-1), "Expected `int` >= 0"),
    (with_segment(versions=()), "segment 0 has sampled tokens and no version run"),
    (with_segment(versions=(VersionRun(10, 1, 1),)), "start in order below 10, got 10 after -1"),
    (with_segment(versions=(VersionRun(2, 1, 1),) * 2), "start in order below 10, got 2 after 2"),
    (with_segment(versions=(VersionRun(2, 1, 2),)), "0 <= kv <= policy, got 2 and 1"),
    (with_segment(tokens=np.full(10, -1, np.int32)), "token ids are at least 0, got -1"),
    (with_segment(tokens=np.arange(10)), "tokens are int32 .T., got int64"),
    (
        with_segment(tokens=np.arange(9, dtype=np.int32)),
        "9 tokens, 10 logprobs and 10 mask entries",
    ),
    (with_segment(logprobs=np.full(10, np.nan, np.float32)), "logprobs are finite"),
    (with_segment(logprobs=np.full(10, -np.inf, np.float32)), "logprobs are finite"),
]


@pytest.mark.parametrize(("result", "sentence"), UNSOUND)
def test_an_unsound_trial_is_not_sent(result: TrialResult, sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        encode(result)


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        (with_header(lambda h: h.update(num_tokens=[11])), r"arrays of \[44, 44, 2\] bytes"),
        (with_header(lambda h: h.update(num_tokens=[2**31 - 1])), "1 to 4194304 tokens"),
        (with_header(lambda h: h.update(num_tokens=[5, 5])), "2 to 2 lists of version runs, got 1"),
        (with_header(lambda h: h["turns"][0].update(stop=11)), "turn 0 spans 2:11"),
        (with_header(lambda h: h["turns"][0].update(kind=9)), "Invalid enum value 9"),
        (with_header(lambda h: h["turns"][0].update(reward=float("inf"))), "turn 0 has reward inf"),
        (with_header(lambda h: h["versions"][0].reverse()), "got 2 after 6"),
        (with_header(lambda h: h.update(surprise=1)), "unknown field `surprise`"),
        (with_header(lambda h: h["task"].pop("seed")), "missing required field `seed`"),
    ],
)
def test_an_unsound_trial_is_not_taken(frames: list[bytes], sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        decode(frames)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logprob_that_is_no_number_is_not_taken(bad: float) -> None:
    frames = frames_of(example())[:-1]
    frames[3] = np.full(10, bad, "<f4").tobytes()
    with pytest.raises(WireError, match="logprobs are finite"):
        decode(sealed(frames))


def test_mask_bits_behind_the_last_token_are_not_taken() -> None:
    frames = frames_of(example())[:-1]
    frames[4] = bytes([frames[4][0], frames[4][1] | 1])
    with pytest.raises(WireError, match="bits set after the last token"):
        decode(sealed(frames))


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (Limits(max_tokens=9), "1 to 9 tokens, got 10"),
        (Limits(max_turns=1), "0 to 1 turns, got 2"),
        (Limits(max_runs=1), "0 to 1 version runs, got 2"),
        (Limits(max_segments=0), "1 to 0 segments, got 1"),
        (Limits(max_text_chars=4), "over 4 characters"),
        (Limits(max_header_bytes=100), "header has"),
    ],
)
def test_each_limit_is_kept_on_both_sides(limits: Limits, sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        decode(frames_of(example()), limits)
    with pytest.raises(WireError, match=sentence):
        encode(example(), limits)
