"""Trials to flat arrays: sequence after sequence, no padding, and what to learn from each sampled
token.

Shapes: `T` packed tokens, `S` sequences (segments), `N` sampled tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mage_async.policy_version import PROVENANCES, VersionRun
from mage_async.trajectory import Segment, Trial


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Sequences in one row, and their sampled tokens."""

    tokens: np.ndarray
    """int64 [T]"""
    positions: np.ndarray
    """int64 [T]: place in its own sequence"""
    lengths: np.ndarray
    """int64 [S]"""
    sources: np.ndarray
    """int64 [N]: the packed position whose hidden state predicts the sampled token"""
    targets: np.ndarray
    """int64 [N]: the sampled tokens"""
    logprobs: np.ndarray
    """float32 [N]: under the behaviour policy"""
    advantages: np.ndarray
    """float32 [N]"""
    policy_versions: np.ndarray
    """int32 [N]: which weights drew the token"""
    kv_versions: np.ndarray
    """int32 [N]: the oldest weights among the cached keys it was drawn from"""
    episodes: np.ndarray
    """int32 [N]"""
    kinds: np.ndarray
    """int32 [N]: `Kind` of the token's turn"""
    provenances: np.ndarray
    """int32 [N]: how its versions are known, a place in `PROVENANCES`"""
    turns: np.ndarray
    """int64 [N]: the number of the token's turn, from 0 without gaps"""


@dataclass(frozen=True, slots=True, eq=False)
class Sequenced:
    """One segment with what its sampled tokens are worth, ready to be packed."""

    tokens: np.ndarray
    sampled: np.ndarray
    """int64 [n]: positions of the sampled tokens"""
    logprobs: np.ndarray
    columns: np.ndarray
    """float64 [6, n]: advantage, policy version, kv version, episode, kind, provenance"""
    turn_lengths: np.ndarray
    """int64: sampled tokens of each turn; they sum to n"""


def sequences(trial: Trial, advantages: np.ndarray) -> list[Sequenced]:
    """A trial's segments without what follows their last sampled token.

    Args:
        advantages: float64 [number of turns], in the order of `trial.turns`.
    """
    made = []
    for number, segment in enumerate(trial.segments):
        turns = [i for i, turn in enumerate(trial.turns) if turn.segment == number]
        if turns:
            made.append(_sequence(segment, trial, turns, advantages))
    return made


def pack(parts: Sequence[Sequenced]) -> Packed:
    """Lay sequences one after the other."""
    lengths = np.array([len(part.tokens) for part in parts], np.int64)
    starts = np.cumsum(lengths) - lengths
    tokens = np.concatenate([part.tokens for part in parts]).astype(np.int64)
    drawn = np.concatenate(
        [part.sampled + start for part, start in zip(parts, starts, strict=True)]
    )
    columns = np.concatenate([part.columns for part in parts], axis=1)
    turns = np.concatenate([part.turn_lengths for part in parts])
    return Packed(
        tokens,
        np.arange(len(tokens)) - np.repeat(starts, lengths),
        lengths,
        drawn - 1,
        tokens[drawn],
        np.concatenate([part.logprobs for part in parts]),
        columns[0].astype(np.float32),
        *(row.astype(np.int32) for row in columns[1:]),
        np.repeat(np.arange(len(turns)), turns),
    )


def _sequence(
    segment: Segment, trial: Trial, turns: list[int], advantages: np.ndarray
) -> Sequenced:
    spans = [trial.turns[i] for i in turns]
    counts = [turn.stop - turn.start for turn in spans]
    sampled = np.concatenate([np.arange(turn.start, turn.stop) for turn in spans])
    per_turn = np.array(
        [
            advantages[turns],
            [turn.episode for turn in spans],
            [turn.kind for turn in spans],
        ]
    )
    worth, episode, kind = np.repeat(per_turn, counts, axis=1)
    policy, kv, provenance = _versions(segment.versions, sampled)
    end = int(sampled[-1]) + 1
    return Sequenced(
        segment.tokens[:end],
        sampled,
        segment.logprobs[sampled],
        np.stack([worth, policy, kv, episode, kind, provenance]),
        np.array(counts, np.int64),
    )


def _versions(runs: Sequence[VersionRun], positions: np.ndarray) -> np.ndarray:
    """Policy version, key version and provenance of some positions: float64 [3, n]."""
    rows = [(run.policy, run.kv, PROVENANCES.index(run.provenance)) for run in runs]
    starts = np.array([run.start for run in runs])
    return np.array(rows, np.float64)[np.searchsorted(starts, positions, "right") - 1].T
