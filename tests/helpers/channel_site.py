"""Channels over real sockets, and their twins in memory, opened alike."""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import uvloop

from mage_async.policy_version import VersionRun
from mage_async.protocol.messages import (
    Heartbeat,
    Hello,
    TrialResult,
)
from mage_async.trajectory import Segment, Task, Trial
from mage_services.transport.channels import LearnerChannel, PeerChannel
from mage_services.transport.sockets import ipc_address
from tests.helpers.memory_channels import MemoryLearnerChannel, MemoryPeerChannel

Learner = LearnerChannel | MemoryLearnerChannel
PeerEnd = PeerChannel | MemoryPeerChannel


def hello(name: str = "actor-0", build: str = "b1", config_digest: str = "c1") -> Hello:
    return Hello(role="actor", name=name, build=build, config_digest=config_digest, group_quota=2)


def heartbeat(number: int = 0) -> Heartbeat:
    return Heartbeat(name="actor-0", counters={"number": number}, blocked_s={})


def trial(num_tokens: int) -> TrialResult:
    source = np.random.default_rng(0)
    segment = Segment(
        source.integers(0, 1000, num_tokens, dtype=np.int32),
        np.ones(num_tokens, bool),
        -source.random(num_tokens, dtype=np.float32),
        (VersionRun(0, 0, 0),),
    )
    return TrialResult(3, 0, Trial(Task("rps", "cycle-1", 5), 1, 3, (segment,), ()))


def run(main: Callable[[], Awaitable[None]]) -> None:
    """As every process of ours runs its main."""

    async def begin() -> None:
        await main()

    uvloop.run(begin())


class Site:
    """Where channels of one kind are opened, and closed when the test ends."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.address = "tcp://127.0.0.1:0" if kind == "tcp" else ""
        self.directory = directory
        self.kind = kind
        self.open = ExitStack()

    def learner(self, address: str | None = None) -> Learner:
        if self.kind == "memory":
            return MemoryLearnerChannel(build="b1", config_digest="c1")
        address = address or self.address or ipc_address(self.directory)
        return self.open.enter_context(LearnerChannel(address, build="b1", config_digest="c1"))

    def peer(self, learner: Learner, says: Hello | None = None) -> PeerEnd:
        if isinstance(learner, MemoryLearnerChannel):
            return learner.connect(says or hello())
        return self.open.enter_context(PeerChannel(learner.address, says or hello()))

    def send_raw(self, peer: PeerEnd, frames: list[bytes]) -> None:
        if isinstance(peer, MemoryPeerChannel):
            peer.put_raw(list(frames))
        else:
            peer._socket.send_multipart(frames)
