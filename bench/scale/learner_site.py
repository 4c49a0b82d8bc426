"""Run the learner's real message code without socket, disk and model, and measure its CPU time.

Frames go through the real access control and decoder to the real coordinator. Its answers are
encoded as for a socket, and journal records are encoded into memory. Every call is timed in CPU
seconds of this thread.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.scale.workload import Workload
from mage_async.admission.ledger import Ledger
from mage_async.admission.policies import POLICIES
from mage_async.environments.catalogue import load
from mage_async.protocol.codec import LastEncoded
from mage_async.protocol.messages import Message, Publication
from mage_async.protocol.trial_arrays import Frame
from mage_async.tasks.task_stream import TaskStream
from mage_async.trajectory import Group
from mage_services.learner.coordinator import Coordinator
from mage_services.transport.access_control import AccessControl, Peer
from mage_services.weights.weight_store import WeightStore
from tests.helpers.coordinator_site import coordinator_config
from tests.helpers.memory_channels import MemoryJournal, MemoryWeights

BUILD = "scale"
"""Name of the build and digest of the configuration: the learner admits peers with its own."""


@dataclass(slots=True)
class Outbox:
    """Stand in for `LearnerChannel`, and collect what it would send."""

    access: AccessControl = field(default_factory=lambda: AccessControl(BUILD, BUILD))
    encoder: LastEncoded = field(default_factory=LastEncoded)
    sent: list[tuple[Peer, Message]] = field(default_factory=list)

    def send(self, peer: Peer, message: Message) -> None:
        """Encode and collect a message."""
        self.encoder.encode(message)
        self.access.sent(peer, message)
        self.sent.append((peer, message))

    def forget(self, peer: Peer) -> None:
        """Forget a peer, as `LearnerChannel.forget` does."""
        self.access.forget(peer)

    def take_notes(self) -> list[str]:
        """Return the notes of the access control, as `LearnerChannel.take_notes` does."""
        return self.access.take_notes()


@dataclass(slots=True)
class Costs:
    """Count calls, and CPU seconds of this thread, by purpose."""

    calls: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)

    def timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call, and add its CPU time."""
        began = time.thread_time()
        outcome = call(*args)
        self.seconds[name] += time.thread_time() - began
        self.calls[name] += 1
        return outcome

    def clear(self) -> None:
        """Forget all counts."""
        self.calls.clear()
        self.seconds.clear()


class LearnerSite:
    """Drive a coordinator and its ledger in simulated time."""

    def __init__(self, work: Workload) -> None:
        self.now = 0.0
        self.costs, self.outbox = Costs(), Outbox()
        self.num_refused = 0
        self._versions = [0]
        slots = Ledger(
            work.groups_per_step,
            work.max_staleness,
            work.trials_per_group,
            policy=POLICIES[work.rule],
        )
        self.coordinator = Coordinator(
            self.outbox,  # type: ignore[arg-type]
            slots,
            MemoryJournal(forgets=True),
            TaskStream(load("rps"), work.seed),
            coordinator_config(600.0, steps=work.steps, episodes=1),
            lambda: self.now,
            WeightStore(MemoryWeights()),
        )
        self.coordinator.open(publication(0))

    def take(self, peer: Peer, frames: Sequence[Frame], name: str) -> None:
        """Handle a message of a peer."""
        self.costs.timed(name, self._take, peer, frames)

    def tick(self) -> None:
        """Let the coordinator look at its deadlines."""
        self.costs.timed("tick", self.coordinator.tick)

    def take_batch(self) -> list[Group] | None:
        """Return the next step's groups; None if they are not complete."""
        return self.costs.timed("take_batch", self.coordinator.ledger.take_batch)

    def trained(self, version: int, groups: list[Group]) -> None:
        """Commit a step."""
        self.costs.timed("commit", self._trained, version, groups)

    def announce(self, version: int) -> None:
        """Announce a version to all peers."""
        self.costs.timed("announce", self._announce, version)

    def _take(self, peer: Peer, frames: Sequence[Frame]) -> None:
        verdict = self.outbox.access.receive(peer, frames)
        if verdict.answer is not None:
            self.num_refused += 1
        if verdict.message is not None:
            self.coordinator.take(peer, verdict.message)

    def _trained(self, version: int, groups: list[Group]) -> None:
        """Do what the training loop and the run's log do on the event loop after a step."""
        self.coordinator.trained(version)
        self.coordinator.take_actors()

    def _announce(self, version: int) -> None:
        self.coordinator.announce(publication(version))
        self._versions.append(version)
        unused = self.coordinator.unused(self._versions)
        self._versions = [each for each in self._versions if each not in unused]


def publication(version: int) -> Publication:
    """Return the message that announces a version."""
    return Publication(version=version, path=f"/weights/{version}", digest="0" * 32)
