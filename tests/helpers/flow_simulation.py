"""The flow of groups through one learner, simulated: the ledger is the real one, lengths are drawn.

Time is in steps of the trainer: training a batch takes 1. The engine generates as fast as the
trainer trains: with K groups allowed in play, a group lasts K / B on average, whoever plays beside
it. Lengths are log-normal. New weights are everywhere at once, and a group's tokens lie evenly over
its life. So throughput is 1 at best, and what it lacks is waiting.
"""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mage_async.admission.concurrent_groups import Concurrency
from mage_async.admission.ledger import Ledger
from mage_async.admission.policies import AdmissionPolicy
from mage_async.policy_version import VersionRun
from mage_async.protocol.messages import TrialResult
from mage_async.trajectory import Segment, Task, Trial

SEGMENT = Segment(
    np.zeros(1, np.int32), np.ones(1, bool), np.zeros(1, np.float32), (VersionRun(0, 0, 0),)
)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is simulated."""

    groups_per_step: int = 16
    in_play: int = 32
    max_staleness: int = 2
    sigma: float = 0.6
    """The standard deviation of the logarithm of a group's length."""
    steps: int = 500
    settle: int = 50
    """Steps before measuring."""
    target: float = 1.0
    """Share of over-age tokens that age-aware concurrency aims under; 1: `in_play` is fixed."""


@dataclass(frozen=True, slots=True)
class FlowFigures:
    """What one simulation shows, after it has settled. Shares are of 1."""

    throughput: float
    """As a share of a trainer's that never waits."""
    staleness_mean: float
    """The mean over groups, in steps."""
    staleness_max: int
    groups_over: float
    tokens_over: float
    """By tokens, against the bound."""
    tokens_over_by_third: tuple[float, float, float]
    """By third of a group's life: of three episodes, about an episode each."""
    groups_dropped: float
    work_wasted: float
    """Generated tokens that were never trained."""
    length_bias: float
    trained_length: float
    """Mean length of trained groups, in steps; of all groups it is `in_play / groups_per_step`."""
    in_play: float
    """Groups allowed in play, at the end."""


@dataclass(slots=True)
class _Life:
    """One group."""

    size: float
    """Its length over the mean of all, whoever plays beside it."""
    start: float
    end: float
    version: int
    trained: int = -1
    """The version it trained; -1: never."""
    cut: float = math.inf
    """When it was dropped."""


@dataclass(slots=True)
class _Simulation:
    policy: AdmissionPolicy
    work: Workload
    source: random.Random
    lives: list[_Life] = field(default_factory=list)
    events: list[tuple[float, int, int]] = field(default_factory=list)
    """(time, -1 for a publication, else the grant that is complete)"""
    published: list[float] = field(default_factory=lambda: [0.0])
    """When each version was."""
    in_flight: set[int] = field(default_factory=set)

    def run(self) -> tuple[Ledger, Concurrency]:
        """Until the last step is published."""
        work = self.work
        ledger = Ledger(work.groups_per_step, work.max_staleness, 1, policy=self.policy)
        pace = Concurrency(work.in_play, work.groups_per_step, work.max_staleness, work.target)
        ledger.max_concurrent_groups = pace.limit
        now, is_training = 0.0, False
        while ledger.version < work.steps:
            self._grant(ledger, now)
            if not is_training and (batch := ledger.take_batch()):
                is_training = True
                for group in batch:
                    self.lives[group.grant].trained = ledger.version
                    self.in_flight.discard(group.grant)
                heapq.heappush(self.events, (now + 1.0, -1, -1))
                continue
            now, kind, grant = heapq.heappop(self.events)
            if kind < 0:
                is_training = False
                self._publish(ledger, pace, now)
            elif grant in self.in_flight:
                ledger.receive(_result(grant))
                pace.record_group(*ledger.playing_time(grant, now))
        return ledger, pace

    def _grant(self, ledger: Ledger, now: float) -> None:
        limit = ledger.max_concurrent_groups or 1
        while ledger.may_grant():
            grant = ledger.grant(
                _task(ledger.next_grant), num_episodes=1, peer="a", now=now, deadline_s=math.inf
            ).grant
            sigma = self.work.sigma
            size = math.exp(self.source.gauss(-sigma * sigma / 2, sigma))
            end = now + size * limit / self.work.groups_per_step
            self.lives.append(_Life(size, now, end, ledger.version))
            self.in_flight.add(grant)
            heapq.heappush(self.events, (end, 0, grant))

    def _publish(self, ledger: Ledger, pace: Concurrency, now: float) -> None:
        dropped = {record.grant for record in ledger.trained(ledger.version + 1)}
        self.published.append(now)
        for grant in dropped:
            self.lives[grant].cut = min(now, self.lives[grant].end)
            self.in_flight.discard(grant)
        pace.record_step(1.0)
        ledger.max_concurrent_groups = pace.limit


def simulate(policy: AdmissionPolicy, work: Workload, seed: int) -> FlowFigures:
    """Play `work.steps` steps under an admission policy."""
    simulation = _Simulation(policy, work, random.Random(seed))
    _, pace = simulation.run()
    began = simulation.published[work.settle]
    seen = [life for life in simulation.lives if life.start >= began]
    trained = [life for life in seen if life.trained >= 0]
    dropped = [life for life in seen if life.cut < math.inf]
    ended = trained + dropped
    stale = np.array([life.trained - life.version for life in trained])
    over = np.array([_over_by_third(life, simulation.published, work) for life in trained])
    sizes = np.array([life.end - life.start for life in trained])
    wasted = sum(life.cut - life.start for life in dropped)
    thirds = (over * sizes[:, None]).sum(0) / sizes.sum()
    return FlowFigures(
        throughput=(work.steps - work.settle) / (simulation.published[-1] - began),
        staleness_mean=float(stale.mean()),
        staleness_max=int(stale.max()),
        groups_over=float((stale > work.max_staleness).mean()),
        tokens_over=float(thirds.mean()),
        tokens_over_by_third=(float(thirds[0]), float(thirds[1]), float(thirds[2])),
        groups_dropped=len(dropped) / len(ended),
        work_wasted=float(wasted / (wasted + sizes.sum())),
        length_bias=exact_length_bias(
            [life.size for life in seen], [life.size for life in trained]
        ),
        trained_length=float(sizes.mean()),
        in_play=pace.limit,
    )


def exact_length_bias(started: Sequence[float], trained: Sequence[float]) -> float:
    """Return the longest tenth's share of the trained trials over its share of the started ones."""
    if not len(started) or not len(trained):
        return 1.0
    edge = np.quantile(started, 0.9)
    share = np.mean(np.asarray(started) >= edge)
    return float(np.mean(np.asarray(trained) >= edge) / share)


def _over_by_third(life: _Life, published: list[float], work: Workload) -> np.ndarray:
    """The share of over-age tokens in each third of a trained group's life: [3]."""
    bound = life.trained - work.max_staleness
    edge = published[bound] if bound > 0 else -math.inf
    thirds = np.linspace(life.start, life.end, 4)
    return np.clip((edge - thirds[:-1]) / (thirds[1:] - thirds[:-1]), 0.0, 1.0)


def _task(grant: int) -> Task:
    return Task("simulated", "length", grant)


def _result(grant: int) -> TrialResult:
    return TrialResult(grant, 0, Trial(_task(grant), 0, 1, (SEGMENT,), ()))
