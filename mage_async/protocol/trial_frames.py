"""A trial as a typed header and three raw arrays; where the policy played both seats, both trials
as one message, so that they arrive, are journaled and are acknowledged together or not at all.

    header      grant, epoch, task, turns, version runs and lengths of the segments
    tokens      int32 [T]           T: tokens of all segments, one after the other
    logprobs    float32 [T]
    is_sampled  bits [ceil(T / 8)]  first token in the highest bit, unused bits 0

What is per token is an array, what is per turn is in the header: msgspec reads and writes 26 turns
in 13 µs; as a table of int32 that Python takes apart they cost 25 µs and more frames. Rewards keep
their float64, so a return the learner computes is the one an actor would compute.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mage_async.errors import WireError
from mage_async.protocol.trial_header import (
    TOKENS,
    Frame,
    Limits,
    TrialHeader,
    check_header,
    check_values,
)
from mage_async.trajectory import Segment, Trial

_LOGPROBS = np.dtype("<f4")


@dataclass(frozen=True, slots=True, eq=False)
class TrialResult:
    """A finished trial of a granted group, or both seats of one."""

    grant: int
    epoch: int
    """Epoch of the grant that the trial was played under."""
    trial: Trial
    frames: Sequence[Frame] = field(default=(), repr=False)
    """The message as it arrived, checked; the journal holds it as it is. Empty where the trial was
    played in this process, or read from a journal."""
    other: Trial | None = None
    """The trial of the other seat, where the policy played both: the next of its group."""

    def trials(self) -> tuple[Trial, ...]:
        """All that was played, in order of index."""
        return (self.trial,) if self.other is None else (self.trial, self.other)


def pack_trial(result: TrialResult, limits: Limits) -> tuple[TrialHeader, list[Frame]]:
    """Header and array frames of a trial, checked as the other side will."""
    headers = [_header(result, trial) for trial in result.trials()]
    header = headers[0] if len(headers) == 1 else headers[0].beside(headers[1])
    check_header(header, limits)
    segments = [segment for trial in result.trials() for segment in trial.segments]
    tokens = _joined("tokens", [segment.tokens for segment in segments], TOKENS)
    logprobs = _joined("logprobs", [segment.logprobs for segment in segments], _LOGPROBS)
    sampled = _joined("is_sampled", [segment.is_sampled for segment in segments], np.dtype(bool))
    if not len(tokens) == len(logprobs) == len(sampled):
        raise WireError(
            f"a trial has {len(tokens)} tokens, {len(logprobs)} logprobs "
            f"and {len(sampled)} mask entries"
        )
    for each, part in _spans(header):
        check_values(each, tokens[part], logprobs[part], sampled[part], limits)
    return header, [_bytes(tokens), _bytes(logprobs), _bytes(np.packbits(sampled))]


def unpack_trial(header: TrialHeader, arrays: Sequence[Frame], limits: Limits) -> TrialResult:
    """The trial of a header and its arrays; tokens and log-probs are views of the frames.

    Raises:
        WireError: sizes, spans, runs or numbers that cannot be a trial's.
    """
    check_header(header, limits)
    total = sum(sum(each.num_tokens) for each in header.seats())
    expected = [total * TOKENS.itemsize, total * _LOGPROBS.itemsize, (total + 7) // 8]
    if [len(frame) for frame in arrays] != expected:
        got = [len(frame) for frame in arrays]
        raise WireError(f"a trial of {total} tokens has arrays of {expected} bytes, got {got}")
    tokens = np.frombuffer(arrays[0], TOKENS)
    logprobs = np.frombuffer(arrays[1], _LOGPROBS)
    bits = np.frombuffer(arrays[2], np.uint8)
    if total % 8 and bits[-1] & (0xFF >> total % 8):
        raise WireError("mask has bits set behind the last token")
    sampled = np.unpackbits(bits, count=total).view(bool)
    trials = []
    for each, part in _spans(header):
        check_values(each, tokens[part], logprobs[part], sampled[part], limits)
        trials.append(_trial(each, tokens[part], sampled[part], logprobs[part]))
    return TrialResult(header.grant, header.epoch, trials[0], other=next(iter(trials[1:]), None))


def _header(result: TrialResult, trial: Trial) -> TrialHeader:
    if trial.cut_at is not None:
        raise WireError(
            f"a trial that was cut at episode {trial.cut_at} counts in evaluations alone: drop it"
        )
    return TrialHeader(
        grant=result.grant,
        epoch=result.epoch,
        task=trial.task,
        index=trial.index,
        num_episodes=trial.num_episodes,
        num_tokens=tuple(len(segment.tokens) for segment in trial.segments),
        versions=tuple(segment.versions for segment in trial.segments),
        turns=trial.turns,
        num_prompt_tokens=trial.num_prompt_tokens,
        num_reused_tokens=trial.num_reused_tokens,
        num_repeated_tokens=trial.num_repeated_tokens,
        num_extension_faults=trial.num_extension_faults,
        duration_s=trial.duration_s,
        num_injections=trial.num_injections,
        expert_steps=trial.expert_steps,
        memory=trial.memory,
    )


def _spans(header: TrialHeader) -> Iterator[tuple[TrialHeader, slice]]:
    """Each trial's header, and where its tokens lie in the arrays."""
    start = 0
    for each in header.seats():
        stop = start + sum(each.num_tokens)
        yield each, slice(start, stop)
        start = stop


def _trial(
    header: TrialHeader, tokens: np.ndarray, sampled: np.ndarray, logprobs: np.ndarray
) -> Trial:
    segments = []
    start = 0
    for length, versions in zip(header.num_tokens, header.versions, strict=True):
        part = slice(start, start + length)
        segments.append(Segment(tokens[part], sampled[part], logprobs[part], versions))
        start += length
    return Trial(
        task=header.task,
        index=header.index,
        num_episodes=header.num_episodes,
        segments=tuple(segments),
        turns=header.turns,
        num_prompt_tokens=header.num_prompt_tokens,
        num_reused_tokens=header.num_reused_tokens,
        num_repeated_tokens=header.num_repeated_tokens,
        num_extension_faults=header.num_extension_faults,
        duration_s=header.duration_s,
        num_injections=header.num_injections,
        expert_steps=header.expert_steps,
        memory=header.memory,
    )


def _joined(name: str, parts: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    for part in parts:
        if part.dtype != dtype or part.ndim != 1:
            raise WireError(
                f"a trial's {name} are {dtype} [T], got {part.dtype} {list(part.shape)}"
            )
    return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array).cast("B")
