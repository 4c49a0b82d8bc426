"""Age-aware concurrency: how many groups to play at once, so that few tokens grow too old.

A group that is played beside many others takes long, and its first tokens, in meta-RL the
exploration, are stale when it is trained. So the number of groups in play follows the measured
lengths of groups: the largest number whose predicted share of over-age tokens is under a target.

The prediction. Let steps take `s` seconds, one after the other, and let every batch be taken when
the last one is published. A group that is complete waits for that moment, anything up to `s`; a
token drawn `y` seconds before is then over age if the sum is over `S s`: with probability
`clip(y / s - S + 1, 0, 1)`. Tokens lie evenly over their group's life. A busy engine shares its
tokens a second among the groups in play, so lengths grow in proportion to their number; on an idle
engine they do not, and the rule, which looks again after every step, only arrives more slowly.

What is over age under a rule that bounds the mean is, under a rule that bounds every group, what
the trainer waits for: there the same target buys throughput (0.002 at the default's bound).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

LIVES = (np.arange(16) + 0.5) / 16
"""Moments of a group's life at which its tokens are looked at."""


def over_age_share(
    lengths_s: Sequence[float] | np.ndarray, *, step_s: float, max_staleness: int
) -> float:
    """The predicted share of tokens over `max_staleness`, each group counted by its length."""
    lengths = np.asarray(lengths_s, float)[:, None]
    is_over = np.clip(lengths * LIVES / step_s - max_staleness + 1, 0.0, 1.0)
    return float((is_over * lengths).sum() / (lengths.sum() * len(LIVES)))


def most_in_play(
    lengths_s: Sequence[float] | np.ndarray,
    *,
    step_s: float,
    max_staleness: int,
    target: float,
    most: int,
) -> int:
    """The largest number of groups in play, 1 to `most`, with a share of at most `target`.

    Args:
        lengths_s: of groups, each over the number in play beside it, itself among them.
    """
    alone = np.asarray(lengths_s, float)
    low, high = 1, most  # the share grows with the number
    while low < high:
        middle = (low + high + 1) // 2
        share = over_age_share(alone * middle, step_s=step_s, max_staleness=max_staleness)
        low, high = (middle, high) if share <= target else (low, middle - 1)
    return low


@dataclass(slots=True)
class Concurrency:
    """Measures groups and steps, and says how many groups may be in play.

    Until `warm` groups were measured it says `most`. With a target of 1 it always does.
    """

    most: int
    groups_per_step: int
    max_staleness: int
    target: float
    warm: int = 32
    limit: int = field(init=False)
    """Groups that may be in play now."""
    _alone: deque[float] = field(default_factory=lambda: deque(maxlen=512), init=False)
    """Seconds from grant to complete, over the groups in play meanwhile."""
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=16), init=False)
    """Seconds the trainer was busy with each step."""

    def __post_init__(self) -> None:
        self.limit = self.most

    def completed(self, length_s: float, in_play: float) -> None:
        """A group was complete so long after its grant, with so many in play, itself among them."""
        self._alone.append(length_s / in_play)

    def trained(self, step_s: float) -> None:
        """A step kept the trainer busy so long: look again."""
        self._steps.append(step_s)
        if self.target < 1.0 and len(self._alone) >= self.warm:
            self.limit = most_in_play(
                self._alone,
                step_s=self.expected_step_s(),
                max_staleness=self.max_staleness,
                target=self.target,
                most=self.most,
            )

    def expected_step_s(self) -> float:
        """The longer of training a batch and playing one."""
        training = sum(self._steps) / len(self._steps)
        playing = self.groups_per_step * sum(self._alone) / len(self._alone)
        return max(training, playing)
