"""A coordinator with peers in memory, for the tests of its decisions; time is set by hand."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from mage_async.admission.ledger import Ledger
from mage_async.config.schema import Config
from mage_async.environments.catalogue import load
from mage_async.policy_version import VersionRun
from mage_async.protocol.messages import (
    GroupGrant,
    Heartbeat,
    Hello,
    Message,
    Publication,
    TrialResult,
)
from mage_async.tasks.task_stream import TaskStream
from mage_async.trajectory import Segment, Task, Trial
from mage_services.learner.coordinator import Coordinator
from mage_services.weights.weight_store import WeightStore
from tests.helpers.memory_channels import (
    MemoryJournal,
    MemoryLearnerChannel,
    MemoryPeerChannel,
    MemoryWeights,
)

GROUPS_PER_STEP, MAX_STALENESS, TRIALS = 2, 1, 2
DEADLINE_S = 60.0


def coordinator_config(
    deadline_s: float, *, steps: int, every: int = 0, episodes: int = 3
) -> Config:
    """The keys that a coordinator uses; without `every` no version is evaluated."""
    config = Config()
    return replace(
        config,
        trial=replace(config.trial, episodes=episodes),
        admission=replace(config.admission, grant_deadline_s=deadline_s),
        evaluation=replace(config.evaluation, every=every),
        learner=replace(config.learner, steps=steps),
    )


@dataclass
class Site:
    """A coordinator with peers in memory, and the clock it looks at."""

    now: float = 100.0
    channel: MemoryLearnerChannel = field(default_factory=MemoryLearnerChannel)
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    weights: WeightStore = field(default_factory=lambda: WeightStore(MemoryWeights()))

    def __post_init__(self) -> None:
        ledger = Ledger(GROUPS_PER_STEP, MAX_STALENESS, TRIALS, max_expiries=2)
        tasks = TaskStream(load("rps"), 0)
        self.coordinator = Coordinator(
            self.channel,
            ledger,
            self.journal,
            tasks,
            coordinator_config(DEADLINE_S, steps=3, every=2),
            lambda: self.now,
            self.weights,
            max_drops_in_a_row=3,
        )

    async def connect(self, name: str = "actor-0", group_quota: int = 10) -> MemoryPeerChannel:
        """An actor that has said hello, or an evaluator where the name says so."""
        role = "evaluator" if name == "evaluator" else "actor"
        hello = Hello(
            role=role, name=name, build="test", config_digest="test", group_quota=group_quota
        )
        peer = self.channel.connect(hello)
        await self.hear()
        return peer

    async def say(self, peer: MemoryPeerChannel, *messages: Message) -> None:
        """Messages of a peer, taken by the coordinator one by one."""
        for message in messages:
            await peer.send(message)
            await self.hear()

    async def hear(self) -> None:
        self.coordinator.take(*await self.channel.receive())

    def pass_time(self, seconds: float) -> None:
        """As the learner's clock does it, tick by tick."""
        for _ in range(round(seconds)):
            self.now += 1.0
            self.coordinator.tick()

    def publish(self, version: int) -> None:
        """As the learner does after a step."""
        self.coordinator.trained(version)
        self.coordinator.publish(publication(version))


def publication(version: int) -> Publication:
    return Publication(version=version, path=f"/weights/{version}", digest=f"d{version}")


def heartbeat(name: str = "actor-0", completions: float = 1.0) -> Heartbeat:
    counters = {"num_completions": completions}
    return Heartbeat(name=name, counters=counters, blocked_s={"no grant": 2.0})


def result(grant: GroupGrant, index: int) -> TrialResult:
    """The shortest trial there can be."""
    task = Task(grant.environment, grant.member, grant.seed, grant.seat)
    segment = Segment(
        np.ones(1, np.int32), np.ones(1, bool), np.zeros(1, np.float32), (VersionRun(0, 0, 0),)
    )
    trial = Trial(task, index, grant.num_episodes, (segment,), ())
    return TrialResult(grant.grant, grant.epoch, trial)


def results(*grants: GroupGrant) -> list[TrialResult]:
    return [result(grant, index) for grant in grants for index in range(TRIALS)]


async def read(peer: MemoryPeerChannel) -> list[Message]:
    """All that waits for a peer; what was sent in memory has arrived."""
    return [await peer.receive() for _ in range(len(peer._inbox._waiting))]


def grants(messages: Sequence[Message]) -> list[GroupGrant]:
    return [message for message in messages if isinstance(message, GroupGrant)]


def run(main: Callable[[Site], Awaitable[None]]) -> None:
    async def begin() -> None:
        await main(Site())

    asyncio.run(begin())
