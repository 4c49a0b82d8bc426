"""Policy versions, runs of versions over tokens, and staleness.

Version v is the weights after v optimizer steps; 0 is the start. Staleness of a token is the
version being trained minus the version that drew it, in steps; a trial's and a group's is the
largest of its tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

Provenance = Literal["exact", "segment", "reply"]
"""How the versions of a run are known, from the best to the least.

`exact`: the engine named the version of each token. `segment`: by how many tokens had been heard of
when new weights came, so it may be off by those that were under way. `reply`: only the version at
the end of the reply is known, and all its tokens are taken to be of it.
"""
PROVENANCES: tuple[Provenance, ...] = get_args(Provenance)


@dataclass(frozen=True, slots=True)
class VersionRun:
    """From token `start` on (until the next run), tokens were drawn by `policy` reading cached keys
    of `kv`.
    """

    start: int
    policy: int
    kv: int
    """The oldest version among the context's cached keys and values; equal to `policy` where all
    are fresh.
    """
    provenance: Provenance = "exact"


def append_run(runs: list[VersionRun], run: VersionRun) -> None:
    """Add a run, in place, unless the last one already says the same."""
    if not runs or _said(runs[-1]) != _said(run):
        runs.append(run)


def moved(run: VersionRun, by: int) -> VersionRun:
    """The run of a piece of tokens, `by` tokens further on in the whole."""
    return VersionRun(by + run.start, run.policy, run.kv, run.provenance)


def _said(run: VersionRun) -> tuple[int, int, Provenance]:
    return run.policy, run.kv, run.provenance


def tokens_by_provenance(
    runs: Sequence[VersionRun], is_sampled: np.ndarray
) -> dict[Provenance, int]:
    """How many sampled tokens have versions of each provenance; `is_sampled` is bool [T]."""
    counts = dict.fromkeys(PROVENANCES, 0)
    stops = [run.start for run in runs[1:]] + [len(is_sampled)] * bool(runs)
    for run, stop in zip(runs, stops, strict=True):
        counts[run.provenance] += int(is_sampled[run.start : stop].sum())
    return counts


def oldest(runs: Iterable[VersionRun]) -> int:
    """The oldest policy version of some runs."""
    return min(run.policy for run in runs)
