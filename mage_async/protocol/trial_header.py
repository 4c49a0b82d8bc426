"""The header of a trial: what is not per token, its bounds, and the checks of both sides."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from mage_async.errors import WireError
from mage_async.policy_version import VersionRun
from mage_async.trajectory import ExpertStep, Kind, Task, Turn

Frame = bytes | memoryview

TOKENS = np.dtype("<i4")
"""Of token ids, in the arrays of a trial."""

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

    def max_frame_bytes(self) -> int:
        """The largest single frame that is taken."""
        return max(self.max_header_bytes, self.max_tokens * TOKENS.itemsize)


DEFAULT_LIMITS = Limits()


class OtherSeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the trial of the other seat has of its own: its task is the first one's from across the
    table, its index the next, and its tokens follow in the same arrays.
    """

    num_tokens: tuple[Size, ...]
    versions: tuple[tuple[VersionRun, ...], ...]
    turns: tuple[Turn, ...]
    num_prompt_tokens: Natural
    num_reused_tokens: Natural
    num_repeated_tokens: Natural
    num_extension_faults: Natural
    num_injections: Natural = 0


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
    other: OtherSeat | None = None
    """Where the policy played both seats."""

    def seats(self) -> "tuple[TrialHeader, ...]":
        """A header of each trial: of the one, or of both seats."""
        if self.other is None:
            return (self,)
        own = msgspec.structs.replace(self, other=None)
        return own, msgspec.structs.replace(
            own,
            task=self.task.across(),
            index=self.index + 1,
            **msgspec.structs.asdict(self.other),
        )

    def beside(self, header: "TrialHeader") -> "TrialHeader":
        """This header with the trial of the other seat."""
        across = (self.task.across(), self.index + 1, self.num_episodes)
        assert (header.task, header.index, header.num_episodes) == across, "another play's trial"
        own = {name: getattr(header, name) for name in OtherSeat.__struct_fields__}
        return msgspec.structs.replace(self, other=OtherSeat(**own))


def check_header(header: TrialHeader, limits: Limits) -> None:
    """How much there is of everything, before any array is touched."""
    for each in header.seats():
        check_counts(each, limits)
    total = sum(sum(each.num_tokens) for each in header.seats())
    if total > limits.max_tokens:
        raise WireError(f"both seats have at most {limits.max_tokens} tokens, got {total}")
    if header.other is not None and (header.expert_steps or header.memory is not None):
        raise WireError("a trial of both seats has no expert, and is told of no earlier task")


def check_counts(header: TrialHeader, limits: Limits) -> None:
    """How much there is of everything in one trial."""
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


def check_values(
    header: TrialHeader,
    tokens: np.ndarray,
    logprobs: np.ndarray,
    sampled: np.ndarray,
    limits: Limits,
) -> None:
    """What one trial is made of, as far as its arrays and numbers say."""
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
