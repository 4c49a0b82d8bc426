"""Define the sizes of a simulated run, and the simulated seconds of its parts."""

import math
import random
from dataclasses import dataclass
from statistics import fmean

SAMPLED_GROUPS = 4000
"""Number of groups whose durations are drawn to estimate the mean."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Hold the sizes of a run; seconds are simulated ones."""

    num_actors: int = 1
    groups_per_actor: int = 1
    """Number of groups that an actor plays concurrently: its quota."""
    groups_per_step: int = 2
    trials_per_group: int = 8
    max_staleness: int = 2
    rule: str = "slots"
    """Admission rule."""
    steps: int = 12
    settle: int = 4
    """Number of steps before the measured ones."""
    trial_s: float = 8.0
    """Mean duration of a trial. Durations are log-normal; a group takes as long as its longest
    trial."""
    sigma: float = 0.6
    """Standard deviation of the logarithm of a trial's duration."""
    step_s: float = 30.0
    """Time from a batch to its commit."""
    publish_s: float = 1.0
    """Time from a commit to the announcement of its weights."""
    load_s: float = 1.0
    """Mean time from an announcement until an actor samples with the weights; uniform from half to
    1.5 of it."""
    link_s: float = 0.002
    """Time of a message on its way, in either direction."""
    take_s: float = 100e-6
    """Learner's time to handle a message."""
    send_s: float = 20e-6
    """Learner's time to send a message."""
    heartbeat_s: float = 1.0
    tick_s: float = 0.5
    join_s: float = 0.002
    """Time from the `Hello` of an actor to that of the next."""
    tokens: int = 1024
    """Number of tokens of a trial."""
    seed: int = 0

    def places(self) -> int:
        """Return the largest number of groups that all actors play concurrently."""
        return self.num_actors * self.groups_per_actor

    def trials_per_step(self) -> int:
        """Return the number of trials that a step trains."""
        return self.groups_per_step * self.trials_per_group

    def learner_bound(self) -> float:
        """Return the trials per second of a learner that never waits for a batch."""
        return self.trials_per_step() / max(self.step_s, self.publish_s)

    def actors_bound(self, mean_group_s: float) -> float:
        """Return the trials per second of actors that always play."""
        return self.places() * self.trials_per_group / mean_group_s

    def draw_s(self, source: random.Random) -> float:
        """Return the duration of a trial."""
        if not self.sigma:
            return self.trial_s
        # Without the first term, the mean would grow with sigma.
        return self.trial_s * math.exp(source.gauss(-self.sigma * self.sigma / 2, self.sigma))

    def mean_group_s(self) -> float:
        """Estimate the mean duration of a group."""
        source = random.Random(self.seed)
        trials = range(self.trials_per_group)
        return fmean(max(self.draw_s(source) for _ in trials) for _ in range(SAMPLED_GROUPS))
