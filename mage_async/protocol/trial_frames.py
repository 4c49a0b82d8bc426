"""A trial as a typed header and three raw arrays.

    header      grant, epoch, task, turns, version runs and lengths of the segments
    tokens      int32 [T]           T: tokens of all segments, one after the other
    logprobs    float32 [T]
    is_sampled  bits [ceil(T / 8)]  first token in the highest bit, unused bits 0

What is per token is an array, what is per turn is in the header: msgspec reads and writes 26 turns
in 13 µs; as a table of int32 that Python takes apart they cost 25 µs and more frames. Rewards keep
their float64, so a return the learner computes is the one an actor would compute.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from mage_async.errors import WireError
from mage_async.policy_version import VersionRun
from mage_async.trajectory import ExpertStep, Kind, Segment, Task, Trial, Turn

Frame = bytes | memoryview

_TOKENS = np.dtype("<i4")
_LOGPROBS = np.dtype("<f4")

Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest message taken from a peer."""

    max_header_bytes: int = 2**20
    max_tokens: int = 2**18
    """Tokens of one trial, over all segments."""
    max_segments: int = 256
    max_turns: int = 4096
    max_runs: int = 4096
    """Version runs of one trial."""
    max_text_chars: int = 2**15
    """Characters of one action, reflection or anchor."""
    max_expert_chars: int = 2**10
    """Characters of an expert's action."""
    max_info_chars: int = 2**12
    """Characters of what an environment said of one turn beside the observation."""
    max_chunk_bytes: int = 2**22
    """Bytes of a piece of a file; only peers accept them."""

    def max_frame_bytes(self) -> int:
        """The largest single frame that a learner takes."""
        return max(self.max_header_bytes, self.max_tokens * _TOKENS.itemsize)

    def max_peer_frame_bytes(self) -> int:
        """The largest single frame that a peer takes."""
        return max(self.max_frame_bytes(), self.max_chunk_bytes)


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True, eq=False)
class TrialResult:
    """A finished trial of a granted group."""

    grant: int
    epoch: int
    """Epoch of the grant that the trial was played under."""
    trial: Trial
    frames: Sequence[Frame] = field(default=(), repr=False)
    """The message as it arrived, checked; the journal holds it as it is. Empty where the trial was
    played in this process, or read from a journal."""


class TrialHeader(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag="TrialResult",
):
    """All of a `TrialResult` but the arrays; a trial that was cut short is none."""

    grant: Natural
    epoch: Natural
    task: Task
    index: Natural
    num_episodes: Size
    num_tokens: tuple[Size, ...]
    """Tokens of each segment."""
    versions: tuple[tuple[VersionRun, ...], ...]
    """Version runs of each segment."""
    turns: tuple[Turn, ...]
    num_prompt_tokens: Natural
    num_reused_tokens: Natural
    num_repeated_tokens: Natural
    num_extension_faults: Natural
    duration_s: Annotated[float, Meta(ge=0, le=1e9)]
    num_injections: Natural = 0
    expert_steps: tuple[ExpertStep, ...] = ()
    """Not written where no expert was asked."""
    memory: Natural | None = None


def pack_trial(result: TrialResult, limits: Limits) -> tuple[TrialHeader, list[Frame]]:
    """Header and array frames of a trial, checked as the other side will."""
    trial = result.trial
    if trial.cut_at is not None:
        raise WireError(
            f"a trial that was cut at episode {trial.cut_at} counts in evaluations alone: drop it"
        )
    header = TrialHeader(
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
    _check_counts(header, limits)
    tokens = _joined("tokens", [segment.tokens for segment in trial.segments], _TOKENS)
    logprobs = _joined("logprobs", [segment.logprobs for segment in trial.segments], _LOGPROBS)
    sampled = _joined("is_sampled", [s.is_sampled for s in trial.segments], np.dtype(bool))
    if not len(tokens) == len(logprobs) == len(sampled):
        raise WireError(
            f"a trial has {len(tokens)} tokens, {len(logprobs)} logprobs "
            f"and {len(sampled)} mask entries"
        )
    _check_values(header, tokens, logprobs, sampled, limits)
    return header, [_bytes(tokens), _bytes(logprobs), _bytes(np.packbits(sampled))]


def unpack_trial(header: TrialHeader, arrays: Sequence[Frame], limits: Limits) -> TrialResult:
    """The trial of a header and its arrays; tokens and log-probs are views of the frames.

    Raises:
        WireError: sizes, spans, runs or numbers that cannot be a trial's.
    """
    _check_counts(header, limits)
    total = sum(header.num_tokens)
    expected = [total * _TOKENS.itemsize, total * _LOGPROBS.itemsize, (total + 7) // 8]
    if [len(frame) for frame in arrays] != expected:
        got = [len(frame) for frame in arrays]
        raise WireError(f"a trial of {total} tokens has arrays of {expected} bytes, got {got}")
    tokens = np.frombuffer(arrays[0], _TOKENS)
    logprobs = np.frombuffer(arrays[1], _LOGPROBS)
    bits = np.frombuffer(arrays[2], np.uint8)
    if total % 8 and bits[-1] & (0xFF >> total % 8):
        raise WireError("mask has bits set behind the last token")
    sampled = np.unpackbits(bits, count=total).view(bool)
    _check_values(header, tokens, logprobs, sampled, limits)
    return TrialResult(header.grant, header.epoch, _trial(header, tokens, sampled, logprobs))


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


def _check_counts(header: TrialHeader, limits: Limits) -> None:
    """How much there is of everything, before any array is touched."""
    counts = (
        ("segments", len(header.num_tokens), 1, limits.max_segments),
        (
            "lists of version runs",
            len(header.versions),
            len(header.num_tokens),
            len(header.num_tokens),
        ),
        ("version runs", sum(map(len, header.versions)), 0, limits.max_runs),
        ("turns", len(header.turns), 0, limits.max_turns),
        ("tokens", sum(header.num_tokens), 1, limits.max_tokens),
    )
    for name, count, least, most in counts:
        if not least <= count <= most:
            raise WireError(f"a trial has {least} to {most} {name}, got {count}")


def _check_values(
    header: TrialHeader,
    tokens: np.ndarray,
    logprobs: np.ndarray,
    sampled: np.ndarray,
    limits: Limits,
) -> None:
    if tokens.min() < 0:
        raise WireError(f"token ids are at least 0, got {tokens.min()}")
    if not np.isfinite(logprobs).all():
        raise WireError("logprobs are finite, got one that is not")
    _check_turns(header, limits)
    _check_expert_steps(header, limits)
    start = 0
    for segment, length in enumerate(header.num_tokens):
        part = sampled[start : start + length]
        _check_runs(segment, header.versions[segment], length, bool(part.any()))
        start += length


def _check_runs(segment: int, runs: Sequence[VersionRun], length: int, is_sampled: bool) -> None:
    """Runs are in order, inside their segment, and there where a token was sampled."""
    if is_sampled and not runs:
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


def _check_turns(header: TrialHeader, limits: Limits) -> None:
    """Every turn lies in an episode and a segment of the trial, and its reward is a number."""
    for number, turn in enumerate(header.turns):
        if not (0 <= turn.episode < header.num_episodes and turn.index >= 0):
            raise WireError(
                f"turn {number} is in episode {turn.episode} at {turn.index}, "
                f"of {header.num_episodes} episodes"
            )
        if not 0 <= turn.segment < len(header.num_tokens):
            raise WireError(
                f"turn {number} is in segment {turn.segment} of {len(header.num_tokens)}"
            )
        if not 0 <= turn.start <= turn.stop <= header.num_tokens[turn.segment]:
            raise WireError(
                f"turn {number} spans {turn.start}:{turn.stop} in a segment of "
                f"{header.num_tokens[turn.segment]} tokens"
            )
        if not 0 <= turn.num_reused <= turn.start:
            raise WireError(
                f"turn {number} reused {turn.num_reused} tokens of a prompt of {turn.start}"
            )
        if not math.isfinite(turn.reward):
            raise WireError(f"turn {number} has reward {turn.reward}, expected a finite number")
        if max(len(turn.action), len(turn.anchor)) > limits.max_text_chars:
            raise WireError(f"turn {number} has over {limits.max_text_chars} characters of text")
        if turn.info:
            _check_info(number, turn.info, limits)


def _check_expert_steps(header: TrialHeader, limits: Limits) -> None:
    """Each belongs to an action of the trial, in order, and parts from it inside its completion."""
    last = -1
    for step in header.expert_steps:
        if not last < step.turn < len(header.turns):
            raise WireError(
                f"expert steps are in order of {len(header.turns)} turns, "
                f"got {step.turn} after {last}"
            )
        turn, last = header.turns[step.turn], step.turn
        if turn.kind is not Kind.ACT:
            raise WireError(f"turn {step.turn} has an expert step and is no action")
        if len(step.action) > limits.max_expert_chars:
            raise WireError(
                f"turn {step.turn} has an expert step of over {limits.max_expert_chars} characters"
            )
        is_none = step.place == step.token == -1
        if not is_none and not (turn.start <= step.place < turn.stop and 0 <= step.token < 2**31):
            raise WireError(
                f"the expert step of turn {step.turn} puts token {step.token} at {step.place}, "
                f"outside of {turn.start}:{turn.stop} or of all token ids"
            )


def _check_info(number: int, info: str, limits: Limits) -> None:
    """What an environment said is data: a JSON object, whoever reads it later."""
    if len(info) > limits.max_info_chars:
        raise WireError(f"turn {number} has over {limits.max_info_chars} characters of info")
    try:
        msgspec.json.decode(info, type=dict)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as fault:
        raise WireError(f"turn {number} has an info that is no JSON object: {fault}") from fault
