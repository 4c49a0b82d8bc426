"""Encode a trial as message frames: a typed header and four raw arrays.

If the policy played both seats (players) of a game, the trials of both are one message: they
arrive, are journaled and are acknowledged together or not at all.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, dataclass_transform

import msgspec
import numpy as np
from msgspec import Meta

from mage_async.errors import WireError
from mage_async.policy_version import VersionRun
from mage_async.protocol.limits import Limits
from mage_async.restriction import AllowedSets
from mage_async.trajectory import Alternative, FinishedEpisodes, Kind, Segment, Task, Trial, Turn

#     header      grant, epoch, task, turns, version runs and lengths of the segments
#     tokens      int32 [T]           T: tokens of all segments, one after the other
#     logprobs    float32 [T]
#     is_sampled  bits [ceil(T / 8)]  first token in the highest bit, unused bits 0
#     allowed     int32 [A]           `AllowedSets` of the restricted segments, one after the other:
#                                     index, offsets and tokens; empty if nothing is restricted
#
# Values per token are arrays; values per turn are in the header. msgspec writes and reads 26 turns
# in 13 µs. If they were an int32 table, which Python code would have to convert, it would take 25
# µs, and more frames. Rewards keep their float64, so the learner computes the same returns as an
# actor would.

Frame = bytes | memoryview
"""One frame of a message."""

TOKENS = np.dtype("<i4")
"""dtype of token ids."""
_LOGPROBS = np.dtype("<f4")
"""dtype of log-probs."""

Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]


@dataclass(frozen=True, slots=True, eq=False)
class TrialResult:
    """Hold a finished trial of a granted group, or the trials of both seats."""

    grant: int
    epoch: int
    """Epoch of the grant under which the trial was played."""
    trial: Trial
    frames: Sequence[Frame] = field(default=(), repr=False)
    """Frames that arrived, after their checks; the journal stores them unchanged. They are empty if
    the trial was played in this process or read from a journal.
    """
    other: Trial | None = None
    """The trial of the other seat, if the policy played both; its index in the group follows that
    of `trial`.
    """

    def trials(self) -> tuple[Trial, ...]:
        """Return the trial, or the trials of both seats, in order of index."""
        return (self.trial,) if self.other is None else (self.trial, self.other)


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeResult:
    """Hold the finished episodes of a trial that is being played: an actor sends them to the
    learner, and the learner to the actor that is granted the group next.
    """

    grant: int
    epoch: int
    """Epoch of the grant under which the episodes were played."""
    finished: FinishedEpisodes
    frames: Sequence[Frame] = field(default=(), repr=False)
    """See `TrialResult.frames`; they are sent on as they arrived."""


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class SeatHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Hold the fields of a trial that differ between the two seats of one play, without its arrays.

    The trial of the other seat has the same task from the other seat (`Task.from_other_seat`) and
    an index that is larger by one. Its tokens follow those of the first trial in the same arrays.
    """

    num_tokens: tuple[Size, ...]
    """Number of tokens of each segment."""
    versions: tuple[tuple[VersionRun, ...], ...]
    """Version runs of each segment."""
    turns: tuple[Turn, ...]
    num_prompt_tokens: Natural
    num_reused_tokens: Natural
    num_repeated_tokens: Natural
    num_extension_faults: Natural
    num_injections: Natural = 0
    num_cut_episodes: Natural = 0
    num_retries: Natural = 0
    num_allowed: tuple[tuple[Natural, Natural], ...] = ()
    """For each segment, the number of its allowed sets and the number of tokens in them; empty if
    no segment is restricted.
    """


class TrialHeader(SeatHeader, kw_only=True, tag="TrialResult"):
    """Hold a `TrialResult` without its arrays."""

    grant: Natural
    epoch: Natural
    task: Task
    index: Natural
    num_episodes: Size
    duration_s: Annotated[float, Meta(ge=0, le=1e9)]
    num_kept_episodes: Natural = 0
    alternatives: tuple[Alternative, ...] = ()
    """Actions that an adviser proposed for some of the turns; empty without an adviser."""
    memory: Natural | None = None
    """Version of the guidance that the prompts began with; None without guidance."""
    other: SeatHeader | None = None
    """The other seat's trial, if the policy played both seats."""

    def seats(self) -> "tuple[TrialHeader, ...]":
        """Return one header per trial: one, or two for both seats."""
        if self.other is None:
            return (self,)
        own = msgspec.structs.replace(self, other=None)
        return own, msgspec.structs.replace(
            own,
            task=self.task.from_other_seat(),
            index=self.index + 1,
            **msgspec.structs.asdict(self.other),
        )

    def with_other(self, header: "TrialHeader") -> "TrialHeader":
        """Return this header together with that of the other seat's trial."""
        expected = (self.task.from_other_seat(), self.index + 1, self.num_episodes)
        assert (header.task, header.index, header.num_episodes) == expected, "another play's trial"
        own = {name: getattr(header, name) for name in SeatHeader.__struct_fields__}
        return msgspec.structs.replace(self, other=SeatHeader(**own))


class EpisodeHeader(TrialHeader, frozen=True, tag="EpisodeResult"):
    """Hold an `EpisodeResult` without its arrays."""

    last_message: str = ""
    """See `FinishedEpisodes.last_message`."""


_SHARED_FIELDS = [name for name in TrialHeader.__struct_fields__ if name in Trial.__slots__]
"""Names of the fields that a trial and its header both have, with the same meaning."""


def pack_trial(result: TrialResult, limits: Limits) -> tuple[TrialHeader, list[Frame]]:
    """Return the header and the array frames of a trial, after the same checks that the receiver
    makes.

    Raises:
        WireError: the trial exceeds a limit, or its parts contradict each other.
    """
    headers = [_header(result, trial) for trial in result.trials()]
    header = headers[0] if len(headers) == 1 else headers[0].with_other(headers[1])
    _check_header(header, limits)
    segments = [segment for trial in result.trials() for segment in trial.segments]
    tokens = _joined("tokens", [segment.tokens for segment in segments], TOKENS)
    logprobs = _joined("logprobs", [segment.logprobs for segment in segments], _LOGPROBS)
    sampled = _joined("is_sampled", [segment.is_sampled for segment in segments], np.dtype(bool))
    if not len(tokens) == len(logprobs) == len(sampled):
        raise WireError(
            f"a trial has {len(tokens)} tokens, {len(logprobs)} logprobs "
            f"and {len(sampled)} mask entries"
        )
    for seat, part in _spans(header):
        _check_values(seat, tokens[part], logprobs[part], sampled[part], limits)
    frames: list[Frame] = [_bytes(tokens), _bytes(logprobs), _bytes(np.packbits(sampled))]
    sets = [segment.allowed for segment in segments if segment.allowed is not None]
    parts = [part for each in sets for part in (each.index, each.offsets, each.tokens)]
    frames.append(_bytes(_joined("allowed sets", parts, TOKENS)) if parts else b"")
    # The result is not used. The call makes the checks that the receiver makes when it reads.
    _read_allowed(header, frames, tokens, sampled, limits)
    return header, frames


def unpack_trial(header: TrialHeader, arrays: Sequence[Frame], limits: Limits) -> TrialResult:
    """Return the trial of a header and its arrays; tokens and log-probs are views of the frames.

    Raises:
        WireError: sizes, spans, version runs or values are impossible for a trial.
    """
    _check_header(header, limits)
    total = sum(sum(seat.num_tokens) for seat in header.seats())
    expected = [total * TOKENS.itemsize, total * _LOGPROBS.itemsize, (total + 7) // 8]
    if len(arrays) != 4 or [len(frame) for frame in arrays[:3]] != expected:
        got = [len(frame) for frame in arrays]
        raise WireError(f"a trial of {total} tokens has arrays of {expected} bytes, got {got}")
    tokens = np.frombuffer(arrays[0], TOKENS)
    logprobs = np.frombuffer(arrays[1], _LOGPROBS)
    bits = np.frombuffer(arrays[2], np.uint8)
    # The last byte has `total % 8` used bits, from the highest one on; the others must be 0.
    if total % 8 and bits[-1] & (0xFF >> total % 8):
        raise WireError("mask has bits set after the last token")
    sampled = np.unpackbits(bits, count=total).view(bool)
    allowed = iter(_read_allowed(header, arrays, tokens, sampled, limits))
    trials = []
    for seat, part in _spans(header):
        _check_values(seat, tokens[part], logprobs[part], sampled[part], limits)
        own = [next(allowed) for _ in seat.num_tokens]
        trials.append(_trial(seat, tokens[part], sampled[part], logprobs[part], own))
    other_seat = trials[1] if len(trials) > 1 else None
    return TrialResult(header.grant, header.epoch, trials[0], other=other_seat)


def pack_episodes(result: EpisodeResult, limits: Limits) -> tuple[EpisodeHeader, list[Frame]]:
    """Return the header and the array frames of finished episodes; see `pack_trial`.

    Raises:
        WireError: see `pack_trial`.
    """
    trial = TrialResult(result.grant, result.epoch, result.finished.trial)
    header, arrays = pack_trial(trial, limits)
    fields = {name: getattr(header, name) for name in TrialHeader.__struct_fields__}
    return EpisodeHeader(**fields, last_message=result.finished.last_message), arrays


def unpack_episodes(
    header: EpisodeHeader, arrays: Sequence[Frame], limits: Limits
) -> EpisodeResult:
    """Return the finished episodes of a header and its arrays; see `unpack_trial`.

    Raises:
        WireError: see `unpack_trial`; or no trial can be continued from the episodes.
    """
    result = unpack_trial(header, arrays, limits)
    trial = result.trial
    if result.other is not None or not 0 < trial.num_played() < trial.num_episodes:
        raise WireError(
            "an unfinished trial has the finished episodes of one seat, 1 to "
            f"{trial.num_episodes - 1} of them; got {trial.num_played()}"
        )
    finished = FinishedEpisodes(trial, header.last_message)
    return EpisodeResult(result.grant, result.epoch, finished)


def _header(result: TrialResult, trial: Trial) -> TrialHeader:
    """Return the header of one trial of a result: of `result.trial` or `result.other`."""
    # A trial that was cut short has no last episode to train on; only evaluations count it.
    if trial.cut_at is not None:
        raise WireError(
            f"a trial that was cut at episode {trial.cut_at} is only for evaluations: drop it"
        )
    return TrialHeader(
        grant=result.grant,
        epoch=result.epoch,
        num_tokens=tuple(len(segment.tokens) for segment in trial.segments),
        versions=tuple(segment.versions for segment in trial.segments),
        num_allowed=_num_allowed(trial.segments),
        **{name: getattr(trial, name) for name in _SHARED_FIELDS},
    )


def _num_allowed(segments: Sequence[Segment]) -> tuple[tuple[int, int], ...]:
    """Return `TrialHeader.num_allowed` of a trial's segments."""
    sets = [segment.allowed for segment in segments]
    if all(each is None for each in sets):
        return ()
    return tuple(
        (0, 0) if each is None else (len(each.offsets) - 1, len(each.tokens)) for each in sets
    )


def _read_allowed(
    header: TrialHeader,
    arrays: Sequence[Frame],
    tokens: np.ndarray,
    sampled: np.ndarray,
    limits: Limits,
) -> list[AllowedSets | None]:
    """Read the allowed sets of each segment of a message, as views of its last array, and check
    them.

    Args:
        tokens: Token ids of all segments, int32 [T].
        sampled: bool [T]
    """
    lengths: list[int] = []
    counts: list[tuple[int, int]] = []
    for seat in header.seats():
        lengths += seat.num_tokens
        counts += seat.num_allowed or [(0, 0)] * len(seat.num_tokens)
    if len(counts) != len(lengths):
        raise WireError(f"{len(lengths)} segments have {len(counts)} counts of allowed sets")
    stops = np.cumsum(lengths)
    drawn = [
        tokens[stop - length : stop][sampled[stop - length : stop]]
        for length, stop in zip(lengths, stops, strict=True)
    ]
    # The parts of `AllowedSets` for each segment: the index has an entry for each sampled token,
    # and the offsets are one more than the sets.
    sizes = [
        (len(own), num_sets + 1, num_tokens) if num_sets else (0, 0, 0)
        for own, (num_sets, num_tokens) in zip(drawn, counts, strict=True)
    ]
    total = sum(map(sum, sizes))
    if total > limits.max_allowed:
        raise WireError(
            f"the legal actions of a trial take {total} numbers to record, at most "
            f"{limits.max_allowed} fit; make the lists shorter or set sampling.restricted = false"
        )
    got = len(arrays[3])
    if got != total * TOKENS.itemsize:
        raise WireError(
            f"{total} numbers of allowed sets have {total * TOKENS.itemsize} bytes, got {got}"
        )
    numbers = np.frombuffer(arrays[3], TOKENS) if total else np.zeros(0, TOKENS)
    # For each segment three parts: index, offsets and tokens of its allowed sets.
    parts = iter(np.split(numbers, np.cumsum([size for each in sizes for size in each])))
    found: list[AllowedSets | None] = []
    for own, (num_sets, _) in zip(drawn, counts, strict=True):
        allowed = AllowedSets(next(parts), next(parts), next(parts))
        if num_sets and (fault := allowed.fault(own)):
            raise WireError(fault)
        found.append(allowed if num_sets else None)
    return found


def _spans(header: TrialHeader) -> Iterator[tuple[TrialHeader, slice]]:
    """Yield each trial's header, and the slice of its tokens in the arrays."""
    start = 0
    for seat in header.seats():
        stop = start + sum(seat.num_tokens)
        yield seat, slice(start, stop)
        start = stop


def _trial(
    header: TrialHeader,
    tokens: np.ndarray,
    sampled: np.ndarray,
    logprobs: np.ndarray,
    allowed: Sequence[AllowedSets | None],
) -> Trial:
    """Return the trial of a header.

    Args:
        tokens, sampled, logprobs: arrays [T] of all segments of this trial.
    """
    segments = []
    start = 0
    for length, versions, sets in zip(header.num_tokens, header.versions, allowed, strict=True):
        part = slice(start, start + length)
        segments.append(Segment(tokens[part], sampled[part], logprobs[part], versions, sets))
        start += length
    shared = {name: getattr(header, name) for name in _SHARED_FIELDS}
    return Trial(segments=tuple(segments), **shared)


def _joined(name: str, parts: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Join arrays [T] of one dtype to a contiguous array; a single one is not copied."""
    for part in parts:
        if part.dtype != dtype or part.ndim != 1:
            raise WireError(
                f"a trial's {name} are {dtype} [T], got {part.dtype} {list(part.shape)}"
            )
    return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)


def _bytes(array: np.ndarray) -> memoryview:
    """Return the bytes of an array, without copying."""
    return array.data.cast("B")


def _check_header(header: TrialHeader, limits: Limits) -> None:
    """Check all counts of a message, before any array is read."""
    for seat in header.seats():
        num_segments = len(seat.num_tokens)
        counts = (
            ("segments", num_segments, 1, limits.max_segments),
            ("lists of version runs", len(seat.versions), num_segments, num_segments),
            ("version runs", sum(map(len, seat.versions)), 0, limits.max_runs),
            ("turns", len(seat.turns), 0, limits.max_turns),
            ("tokens", sum(seat.num_tokens), 1, limits.max_tokens),
        )
        for name, count, least, most in counts:
            if not least <= count <= most:
                raise WireError(f"a trial has {least} to {most} {name}, got {count}")
    total = sum(sum(seat.num_tokens) for seat in header.seats())
    if total > limits.max_tokens:
        raise WireError(f"both seats have at most {limits.max_tokens} tokens, got {total}")
    if header.other is not None and (header.alternatives or header.memory is not None):
        raise WireError("a trial of both seats has no alternatives and no guidance")


def _check_values(
    header: TrialHeader,
    tokens: np.ndarray,
    logprobs: np.ndarray,
    sampled: np.ndarray,
    limits: Limits,
) -> None:
    """Check the values of one trial: token ids, log-probs, version runs, turns, alternatives."""
    if tokens.min() < 0:
        raise WireError(f"token ids are at least 0, got {tokens.min()}")
    if not np.isfinite(logprobs).all():
        raise WireError("logprobs are finite, got one that is not")
    for number, turn in enumerate(header.turns):
        if fault := _turn_fault(turn, header, limits):
            raise WireError(f"turn {number} {fault}")
    _check_alternatives(header, limits)
    start = 0
    for segment, length in enumerate(header.num_tokens):
        part = sampled[start : start + length]
        _check_runs(segment, header.versions[segment], length, bool(part.any()))
        start += length


def _check_runs(segment: int, runs: Sequence[VersionRun], length: int, has_sampled: bool) -> None:
    """Check that runs are in order and inside their segment, and that a segment with sampled tokens
    has a run.
    """
    if has_sampled and not runs:
        raise WireError(f"segment {segment} has sampled tokens and no version run")
    last = -1
    for run in runs:
        if not last < run.start < length:
            raise WireError(
                f"version runs of segment {segment} start in order below {length}, "
                f"got {run.start} after {last}"
            )
        if not 0 <= run.kv <= run.policy < 2**31:
            raise WireError(f"a version run has 0 <= kv <= policy, got {run.kv} and {run.policy}")
        last = run.start


def _turn_fault(turn: Turn, header: TrialHeader, limits: Limits) -> str:
    """Return what is wrong with a turn: its episode, segment, span or values; "" if nothing."""
    if not (0 <= turn.episode < header.num_episodes and turn.index >= 0):
        return f"is in episode {turn.episode} at {turn.index}, of {header.num_episodes} episodes"
    if not 0 <= turn.segment < len(header.num_tokens):
        return f"is in segment {turn.segment} of {len(header.num_tokens)}"
    length = header.num_tokens[turn.segment]
    if not 0 <= turn.start <= turn.stop <= length:
        return f"spans {turn.start}:{turn.stop} in a segment of {length} tokens"
    if not 0 <= turn.num_reused <= turn.start:
        return f"reused {turn.num_reused} tokens of a prompt of {turn.start}"
    if not math.isfinite(turn.reward):
        return f"has reward {turn.reward}, expected a finite number"
    if max(len(turn.action), len(turn.anchor)) > limits.max_text_chars:
        return f"has over {limits.max_text_chars} characters of text"
    if len(turn.info) > limits.max_info_chars:
        return f"has over {limits.max_info_chars} characters of info"
    try:
        if turn.info:  # every reader parses it
            msgspec.json.decode(turn.info, type=dict)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as fault:
        return f"has an info that is no JSON object: {fault}"
    return ""


def _check_alternatives(header: TrialHeader, limits: Limits) -> None:
    """Check the actions of an adviser: they are in order of their turns, and each turn is an action
    of the agent.

    An adviser's action may differ from the agent's at one token, inside the turn's completion.
    """
    last = -1
    for each in header.alternatives:
        if not last < each.turn < len(header.turns):
            raise WireError(
                f"alternatives are in order of {len(header.turns)} turns, "
                f"got {each.turn} after {last}"
            )
        turn, last = header.turns[each.turn], each.turn
        if turn.kind is not Kind.ACT:
            raise WireError(f"turn {each.turn} has an alternative and is no action")
        if len(each.action) > limits.max_alternative_chars:
            raise WireError(
                f"turn {each.turn} has an alternative of over {limits.max_alternative_chars} "
                "characters"
            )
        is_inside = turn.start <= each.place < turn.stop and 0 <= each.token < 2**31
        # Place and token are -1 where the adviser's action has the tokens of the agent's.
        if not is_inside and not each.place == each.token == -1:
            raise WireError(
                f"the alternative of turn {each.turn} puts token {each.token} at {each.place}, "
                f"outside of {turn.start}:{turn.stop} or of all token ids"
            )
