"""What is simulated: sizes, and the seconds that all but the learner's own code takes."""

import math
import random
from dataclasses import dataclass
from statistics import fmean

SAMPLED_GROUPS = 4000


@dataclass(frozen=True, slots=True)
class Workload:
    """A run. Seconds are simulated."""

    num_actors: int = 1
    groups_per_actor: int = 1
    """Groups that an actor plays at a time: its credits."""
    groups_per_step: int = 2
    trials_per_group: int = 8
    max_staleness: int = 2
    rule: str = "slots"
    """Of admission."""
    steps: int = 12
    settle: int = 4
    """Steps before measuring."""
    trial_s: float = 8.0
    """Mean length of a trial; lengths are log-normal, and a group takes as long as its longest."""
    sigma: float = 0.6
    """The standard deviation of the logarithm of a trial's length."""
    step_s: float = 30.0
    """From a batch to its commit."""
    publish_s: float = 1.0
    """From a commit until its weights are announced."""
    load_s: float = 1.0
    """From an announcement until an actor draws with the weights: half to one and a half of it."""
    link_s: float = 0.002
    """A message on its way, in either direction."""
    take_s: float = 100e-6
    """The learner's time for a message that comes in."""
    send_s: float = 20e-6
    """The learner's time for a message that goes out."""
    heartbeat_s: float = 1.0
    tick_s: float = 0.5
    join_s: float = 0.002
    """From the hello of an actor to that of the next."""
    tokens: int = 1024
    """Of a trial."""
    seed: int = 0

    def places(self) -> int:
        """Groups that the actors play at a time, at most."""
        return self.num_actors * self.groups_per_actor

    def trials_per_step(self) -> int:
        """Trials that a step trains."""
        return self.groups_per_step * self.trials_per_group

    def learner_bound(self) -> float:
        """Trials a second of a learner that never waits for a batch."""
        return self.trials_per_step() / max(self.step_s, self.publish_s)

    def actors_bound(self, mean_group_s: float) -> float:
        """Trials a second of actors that always play; a place is taken until the longest trial."""
        return self.places() * self.trials_per_group / mean_group_s

    def draw_s(self, source: random.Random) -> float:
        """The length of a trial."""
        if not self.sigma:
            return self.trial_s
        return self.trial_s * math.exp(source.gauss(-self.sigma * self.sigma / 2, self.sigma))

    def mean_group_s(self) -> float:
        """The mean length of a group, estimated."""
        source = random.Random(self.seed)
        trials = range(self.trials_per_group)
        return fmean(max(self.draw_s(source) for _ in trials) for _ in range(SAMPLED_GROUPS))
