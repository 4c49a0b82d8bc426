"""Define the work of each schedule of `bench.system.throughput`, and lower bounds on its time."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from mage_async.admission.ledger import Ledger
from mage_async.protocol.messages import TrialResult
from mage_async.trajectory import Task, Trial
from tests.helpers.scripted_engine import LogNormalPace


@dataclass(frozen=True, slots=True)
class Shape:
    """Hold the sizes of every run of this benchmark."""

    steps: int = 16
    groups_per_step: int = 16
    trials_per_group: int = 2
    num_actors: int = 4
    groups_per_actor: int = 2
    max_staleness: int = 2
    """Bound on staleness of `async`; `sync` has 0."""
    turns_per_trial: int = 4
    """One episode of rock-paper-scissors."""
    mean_turn_s: float = 0.016
    """Short, so that the benchmark is, and still long beside the milliseconds of a message."""

    def num_groups(self) -> int:
        return self.steps * self.groups_per_step

    def num_at_once(self) -> int:
        """Return the number of groups that all actors play concurrently."""
        return self.num_actors * self.groups_per_actor


SHAPE = Shape()


@dataclass(frozen=True, slots=True)
class Work:
    """Hold the work of one seed, which every schedule has to do."""

    pace: LogNormalPace
    group_s: Sequence[float]
    """Seconds of each group, by grant, groups that are begun and not trained included."""

    def trained_s(self) -> Sequence[float]:
        """Return the seconds of the groups that are trained."""
        return self.group_s[: SHAPE.num_groups()]

    def train_s(self) -> float:
        """Return the seconds of a training step: the time in which actors play its groups."""
        return SHAPE.groups_per_step * mean(self.trained_s()) / SHAPE.num_at_once()

    def ideal_s(self) -> float:
        """Return the lower bound on any schedule, which `bench.system.throughput` derives."""
        first = self.group_s[: SHAPE.groups_per_step]
        ready_s = max(sum(first) / SHAPE.num_at_once(), max(first))
        generate_s = sum(self.trained_s()) / SHAPE.num_at_once()
        return max(generate_s + self.train_s(), ready_s + SHAPE.steps * self.train_s())


def draw_work(sigma: float, seed: int) -> Work:
    """Draw the seconds of every group from the names that actors give their trials."""
    pace = LogNormalPace(SHAPE.mean_turn_s, sigma, seed)
    trials = range(SHAPE.trials_per_group)
    # As many as may have been granted when the last step is trained.
    num_groups = SHAPE.num_groups() + (SHAPE.max_staleness + 1) * SHAPE.groups_per_step
    groups = [max(pace(f"{grant}.0.{i}") for i in trials) for grant in range(num_groups)]
    return Work(pace, [SHAPE.turns_per_trial * turn_s for turn_s in groups])


def rule_alone_s(work: Work, max_staleness: int) -> float:
    """Return the seconds that the work takes under the real ledger if nothing else takes time."""
    ledger = Ledger(SHAPE.groups_per_step, max_staleness, trials_per_group=1)
    task, step = Task("rps", "anybody", 0), -1  # -1: the end of a step, no group's number
    now, is_training, ends = 0.0, False, list[tuple[float, int]]()
    while ledger.version < SHAPE.steps:
        while ledger.may_grant() and len(ledger.played_by("all")) < SHAPE.num_at_once():
            grant = ledger.grant(task, num_episodes=1, peer="all", now=now, deadline_s=1e9).grant
            heapq.heappush(ends, (now + work.group_s[grant], grant))
        if not is_training and ledger.take_batch() is not None:
            is_training = True
            heapq.heappush(ends, (now + work.train_s(), step))
        now, ended = heapq.heappop(ends)
        if ended == step:
            is_training = False
            ledger.trained(ledger.version + 1)
        else:
            ledger.receive(TrialResult(ended, 0, Trial(task, 0, 1, (), ())))
    return now
