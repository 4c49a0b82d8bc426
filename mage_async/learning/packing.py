"""Trials to flat arrays: one row of tokens, and the data of sampled tokens.

Shapes: `N` sampled tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from mage_async.completion import with_roles, without_roles
from mage_async.learning.layout import Layout
from mage_async.policy_version import PROVENANCES, VersionRun
from mage_async.trajectory import Segment, Trial, Turn, exploits_from


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """What is known of each sampled token of one segment, or of all that are packed: all [N]."""

    logprobs: np.ndarray
    """float32: under the behaviour policy"""
    policy_versions: np.ndarray
    """int32: which weights drew the token"""
    kv_versions: np.ndarray
    """int32: the oldest weights among the cached keys it was drawn from"""
    episodes: np.ndarray
    """int32"""
    kinds: np.ndarray
    """int32: `Kind` of the token's turn"""
    provenances: np.ndarray
    """int32: how its versions are known, a place in `PROVENANCES`"""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Sequences in one row, and their sampled tokens."""

    layout: Layout
    sources: np.ndarray
    """int64 [N]: the place in the row whose hidden state predicts the sampled token"""
    targets: np.ndarray
    """int64 [N]: the sampled tokens"""
    sampled: SampledTokens
    turns: np.ndarray
    """int64 [N]: the number of the token's turn, from 0 without gaps"""
    turn_lengths: np.ndarray
    """int64 [turns]: tokens of each turn; they sum to N"""
    advantages: Tensor
    """float32 [turns], on the learner's device"""
    experts: np.ndarray
    """int64 [N]: what an expert would have had instead of the token; -1 where that is not known, or
    is the same
    """


@dataclass(frozen=True, slots=True, eq=False)
class Sequenced:
    """One segment with the advantages of its turns, ready to be packed."""

    tokens: np.ndarray
    """int32 [tokens up to the last sampled one]; the exploiter's as `~token`"""
    places: np.ndarray
    """int64 [n]: where the sampled tokens stand"""
    sampled: SampledTokens
    turn_lengths: np.ndarray
    """int64 [turns]: sampled tokens of each turn; they sum to n"""
    advantages: Tensor
    """float32 [turns], on the learner's device"""
    experts: Mapping[int, int] = field(default_factory=dict)
    """The token that an expert would have had, by the place of the sampled one; few have one."""


def sequences(
    trials: Sequence[Trial], advantages: Tensor, *, has_roles: bool = False
) -> list[Sequenced]:
    """The trials' segments without what follows their last sampled token.

    Args:
        advantages: float32 [turns of all trials], in the order of each trial's `turns`.
        has_roles: the last episode was played by an exploiter, the others by an explorer.
    """
    parts: list[tuple[Segment, list[Turn], dict[int, int]]] = []
    num_episodes: list[int | None] = []
    order: list[int] = []
    for trial in trials:
        first, own = len(order), [list[int]() for _ in trial.segments]
        experts = [dict[int, int]() for _ in trial.segments]
        for step in trial.expert_steps:
            if step.place >= 0:
                experts[trial.turns[step.turn].segment][step.place] = step.token
        for place, turn in enumerate(trial.turns):
            own[turn.segment].append(place)
        for segment, places, known in zip(trial.segments, own, experts, strict=True):
            if places:
                parts.append((segment, [trial.turns[place] for place in places], known))
                num_episodes.append(trial.num_episodes if has_roles else None)
                order += [first + place for place in places]
    by_segment = advantages[torch.tensor(order, device=advantages.device)]
    pieces = by_segment.split([len(turns) for _, turns, _ in parts])
    return [
        _sequence(*part, piece, count)
        for part, piece, count in zip(parts, pieces, num_episodes, strict=True)
    ]


def pack(parts: Sequence[Sequenced], *, shares_opening: bool = False) -> Packed:
    """Lay sequences one after the other, behind their opening where it is shared."""
    layout = Layout.of([part.tokens for part in parts], shares_opening=shares_opening)
    sources = [layout.where(number, part.places - 1) for number, part in enumerate(parts)]
    targets = np.concatenate([without_roles(part.tokens[part.places]) for part in parts])
    turns = np.concatenate([part.turn_lengths for part in parts])
    return Packed(
        layout,
        np.concatenate(sources),
        targets.astype(np.int64),
        _joined([part.sampled for part in parts]),
        np.repeat(np.arange(len(turns)), turns),
        turns,
        torch.cat([part.advantages for part in parts]),
        np.concatenate([_experts(part) for part in parts]),
    )


def _sequence(
    segment: Segment,
    turns: Sequence[Turn],
    experts: Mapping[int, int],
    advantages: Tensor,
    num_episodes: int | None,
) -> Sequenced:
    """One segment; `num_episodes` is None where the policy has one role."""
    starts = np.array([turn.start for turn in turns], np.int64)
    counts = np.array([turn.stop for turn in turns], np.int64) - starts
    places = np.arange(counts.sum()) + np.repeat(starts - counts.cumsum() + counts, counts)
    policy, kv, provenance = _versions(segment.versions, places)
    sampled = SampledTokens(
        logprobs=segment.logprobs[places],
        policy_versions=policy,
        kv_versions=kv,
        episodes=np.repeat(np.array([turn.episode for turn in turns], np.int32), counts),
        kinds=np.repeat(np.array([turn.kind for turn in turns], np.int32), counts),
        provenances=provenance,
    )
    border = None if num_episodes is None else exploits_from(turns, num_episodes)
    tokens = with_roles(segment.tokens[: int(places[-1]) + 1], border)
    return Sequenced(tokens, places, sampled, counts, advantages, experts)


def _experts(part: Sequenced) -> np.ndarray:
    """Of each sampled token, what an expert would have had: int64 [n]."""
    experts = np.full(len(part.places), -1, np.int64)
    if part.experts:
        places = np.fromiter(part.experts, np.int64)
        experts[np.searchsorted(part.places, places)] = np.fromiter(part.experts.values(), np.int64)
    return experts


def _joined(parts: Sequence[SampledTokens]) -> SampledTokens:
    names = [field.name for field in fields(SampledTokens)]
    return SampledTokens(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    )


def _versions(runs: Sequence[VersionRun], places: np.ndarray) -> np.ndarray:
    """Policy version, key version and provenance of some tokens: int32 [3, n]."""
    rows = [(run.policy, run.kv, PROVENANCES.index(run.provenance)) for run in runs]
    starts = np.array([run.start for run in runs])
    return np.array(rows, np.int32)[np.searchsorted(starts, places, "right") - 1].T
