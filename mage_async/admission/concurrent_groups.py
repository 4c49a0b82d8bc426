"""Choose how many groups all actors together play at once, so that few tokens become too old.

Each actor has a quota, the number of groups that it may play; the actor computes it, and
`ledger.py` enforces it.

The more groups are played concurrently, the longer each takes, and the staler its first tokens are
when it is trained; in meta-RL those belong to the episode that explores. `Concurrency` measures how
long groups and steps take, and admits the largest number of groups for which the predicted share of
tokens older than `max_staleness` stays within a target.

Under a policy that bounds the staleness of every group, no token becomes too old. Such a policy
makes the trainer wait for groups instead, and a smaller predicted share means less waiting. The
target, `admission.over_age_target`, is 1 by default, which is no bound; in
`bench/system/staleness_simulated.py`, `slots` with a bound of 2 steps and a target of 0.002 reaches
97 % of the ideal throughput.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

TOKEN_TIMES = (np.arange(16) + 0.5) / 16
"""Times before the completion of a group at which the prediction looks at a token, as fractions of
the group's duration: float64 [16], the centres of 16 equal intervals."""


def over_age_share(
    durations_s: Sequence[float] | np.ndarray, *, step_s: float, max_staleness: int
) -> float:
    """Predict the share of tokens staler than `max_staleness`, in 0..1.

    Assumptions: steps take `step_s` seconds each, one after the other, and a batch is taken when
    the step before it is published. So a complete group waits between 0 and `step_s` seconds for
    its step, uniformly distributed. A token sampled `y` seconds before its group was complete is
    too old if `y` plus that wait exceeds `max_staleness * step_s`: with probability
    `clip(y / step_s - max_staleness + 1, 0, 1)`. Tokens are spread evenly over the time from the
    group's grant to its completion, and all groups sample at the same rate: a group's share of the
    tokens is its share of all durations.

    Args:
        durations_s: Seconds from grant to completion, one per group.
        step_s: Seconds from one step to the next.
        max_staleness: Largest staleness of a token that is not too old, in steps.
    """
    durations = np.asarray(durations_s, float)[:, None]
    chance_over = np.clip(durations * TOKEN_TIMES / step_s - max_staleness + 1, 0.0, 1.0)
    return float((chance_over * durations).sum() / (durations.sum() * len(TOKEN_TIMES)))


@dataclass(slots=True)
class Concurrency:
    """Measure groups and steps, and set `limit`, the number of groups to play at once.

    `limit` is `max_groups` until `min_groups` groups were measured, and always if the target is 1
    or `max_staleness` is 0. With a `max_staleness` of 0 every batch is played whole before it is
    trained, so fewer groups at a time would only make it later.
    """

    max_groups: int
    """Largest value of `limit`."""
    groups_per_step: int
    max_staleness: int
    target: float
    """Largest share of tokens that may be too old, in 0..1."""
    min_groups: int = 32
    """Number of groups to measure before `limit` is computed."""
    limit: int = field(init=False)
    """Largest number of groups that may be incomplete at a time."""
    _alone_s: deque[float] = field(default_factory=lambda: deque(maxlen=512), init=False)
    """Seconds from grant to completion, divided by the mean number of concurrent groups, of each of
    the latest groups.
    """
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=16), init=False)
    """Seconds for which each step kept the trainer busy."""

    def __post_init__(self) -> None:
        self.limit = self.max_groups

    def record_group(self, duration_s: float, num_concurrent: float) -> None:
        """Record a complete group: its duration, and the mean number of concurrent groups."""
        self._alone_s.append(duration_s / num_concurrent)

    def record_step(self, step_s: float) -> None:
        """Record the seconds for which a step kept the trainer busy, and compute `limit` again."""
        self._steps_s.append(step_s)
        if self.target < 1.0 and self.max_staleness and len(self._alone_s) >= self.min_groups:
            self.limit = self.most_groups(self._alone_s, self.expected_step_s())

    def most_groups(self, alone_s: Sequence[float] | np.ndarray, step_s: float) -> int:
        """Return the largest number of concurrent groups, 1 to `max_groups`, within the target.

        A busy engine divides its tokens per second among the groups, so durations grow in
        proportion to their number. On an idle engine they do not; then the number, which is
        computed again after every step, only takes longer to settle.

        Args:
            alone_s: For each group, the seconds that it would take alone: its duration divided by
                the mean number of concurrent groups, itself included.
        """
        alone = np.asarray(alone_s, float)
        low, high = 1, self.max_groups  # binary search: the share grows with the number
        while low < high:
            middle = (low + high + 1) // 2
            share = over_age_share(alone * middle, step_s=step_s, max_staleness=self.max_staleness)
            low, high = (middle, high) if share <= self.target else (low, middle - 1)
        return low

    def expected_step_s(self) -> float:
        """Return the seconds from one step to the next: of training, or of playing if longer."""
        training = sum(self._steps_s) / len(self._steps_s)
        playing = self.groups_per_step * sum(self._alone_s) / len(self._alone_s)
        return max(training, playing)
