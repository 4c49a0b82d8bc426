"""Record the policy versions of sampled tokens, as runs of tokens with equal versions.

Version v is the weights after v optimizer steps; version 0 is the initial policy. The staleness of
a token is the version being trained minus the version that sampled the token, in steps; that of a
trial or a group is the largest of its tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, get_args

import numpy as np

Provenance = Literal["exact", "segment", "reply"]
"""How the versions of a run of tokens are known, from the most reliable to the least.

`exact`: the engine stated the version of each token. `segment`: the version follows from the number
of tokens received when new weights arrived, so it may be wrong for the tokens sampled around then.
`reply`: only the version at the end of the reply is known, and is assumed for all its tokens.
"""
PROVENANCES: tuple[Provenance, ...] = get_args(Provenance)
OLDEST_AGE = 8
"""Tokens with this staleness, in steps, or a larger one are counted together in metrics."""


@dataclass(frozen=True, slots=True)
class VersionRun:
    """State which versions sampled the tokens from `start` to the next run: the weights of
    `policy`, with a KV cache of `kv`.
    """

    start: int
    policy: int
    kv: int
    """The oldest version among the context's cached keys and values; `policy` if all are fresh."""
    provenance: Provenance = "exact"


def append_run(runs: list[VersionRun], run: VersionRun) -> None:
    """Append a run, in place. If it has the versions of the last run, that one is continued and
    nothing is appended.
    """
    if not runs or _versions(runs[-1]) != _versions(run):
        runs.append(run)


def moved(run: VersionRun, by: int) -> VersionRun:
    """Return a run shifted by a number of tokens."""
    return VersionRun(by + run.start, run.policy, run.kv, run.provenance)


def _versions(run: VersionRun) -> tuple[int, int, Provenance]:
    return run.policy, run.kv, run.provenance


def tokens_by_provenance(
    runs: Sequence[VersionRun], is_sampled: np.ndarray
) -> dict[Provenance, int]:
    """Count the sampled tokens of each provenance; `is_sampled` is bool [T]."""
    counts = dict.fromkeys(PROVENANCES, 0)
    # A run ends where the next one starts, the last one with the last token.
    for run, following in zip_longest(runs, runs[1:]):
        stop = len(is_sampled) if following is None else following.start
        counts[run.provenance] += int(is_sampled[run.start : stop].sum())
    return counts


def oldest(runs: Iterable[VersionRun]) -> int:
    """Return the oldest policy version of some runs, of which there must be at least one."""
    return min(run.policy for run in runs)
