"""Policy versions, runs of versions over tokens, and staleness.

Version v is the weights after v optimizer steps; 0 is the start. Staleness of a token is the
version being trained minus the version that drew it, in steps; a trial's and a group's is the
largest of its tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


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


def append_run(runs: list[VersionRun], run: VersionRun) -> None:
    """Add a run, in place, unless the last one already says the same versions."""
    if not runs or (runs[-1].policy, runs[-1].kv) != (run.policy, run.kv):
        runs.append(run)


def policy_per_token(runs: Sequence[VersionRun], num_tokens: int) -> np.ndarray:
    """The policy version that drew each token: int32 `[num_tokens]`; tokens before the first run
    get its version.
    """
    versions = np.zeros(num_tokens, np.int32)
    for run in runs:
        versions[run.start :] = run.policy
    if runs:
        versions[: runs[0].start] = runs[0].policy
    return versions


def oldest(runs: Iterable[VersionRun]) -> int:
    """The oldest policy version of some runs."""
    return min(run.policy for run in runs)
