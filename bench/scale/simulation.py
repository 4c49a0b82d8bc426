"""Simulate actors and training steps around the learner's real code, in simulated time.

Events are a heap of (time, number, call). Nothing sleeps, and a clock is read only to time the real
code. Messages wait in the learner's inbox, first come, first served, while the learner handles
earlier ones and sends its own.
"""

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.scale.idleness import Idleness
from bench.scale.learner_site import BUILD, LearnerSite
from bench.scale.workload import Workload
from mage_async.inference.scheduler import Statistics
from mage_async.policy_version import VersionRun
from mage_async.protocol.codec import encode
from mage_async.protocol.messages import (
    GroupGrant,
    Heartbeat,
    Hello,
    Loaded,
    Message,
    Publication,
    Refusal,
    TrialResult,
    Welcome,
)
from mage_async.protocol.trial_arrays import Frame
from mage_async.trajectory import Group, Kind, Segment, Task, Trial, Turn
from mage_services.transport.access_control import Peer

TURNS = 6
"""Turns of a trial: they only make its message as long as a real one."""


@dataclass(slots=True)
class Inbox:
    """Hold the messages that wait for the learner: the time at which each is handled, and its
    bytes."""

    waiting: deque[tuple[float, int]] = field(default_factory=deque)
    free_at: float = 0.0
    """Time at which the learner will have handled all messages so far."""
    bytes: int = 0
    most: int = 0
    """Largest number of messages that have waited at a time."""
    most_bytes: int = 0

    def arrived(self, now: float, num_bytes: int, take_s: float) -> float:
        """Add a message; return the time at which it will have been handled."""
        while self.waiting and self.waiting[0][0] <= now:
            self.bytes -= self.waiting.popleft()[1]
        self.free_at = max(now, self.free_at) + take_s
        self.waiting.append((self.free_at, num_bytes))
        self.bytes += num_bytes
        self.most = max(self.most, len(self.waiting))
        self.most_bytes = max(self.most_bytes, self.bytes)
        return self.free_at

    def clear(self) -> None:
        """Forget the maxima so far."""
        self.most = self.most_bytes = 0


@dataclass(slots=True)
class Actor:
    """Hold an actor's weights over time, and the groups that wait for newer ones."""

    peer: Peer
    hello: Hello
    versions: list[tuple[float, int]] = field(default_factory=list)
    """(time, version) since which the actor samples with it, oldest first."""
    waiting: list[GroupGrant] = field(default_factory=list)

    def version(self) -> int:
        """Return the version that the actor samples with; -1 before the first."""
        return self.versions[-1][1] if self.versions else -1


@dataclass(slots=True)
class Measured:
    """Hold the figures from the first measured step on."""

    began: float = 0.0
    ended: float = 0.0
    group_ages: Counter[int] = field(default_factory=Counter)
    """Number of groups by staleness: the version that a step begins with less that of the group's
    oldest token."""
    token_ages: Counter[int] = field(default_factory=Counter)
    lives_s: list[float] = field(default_factory=list)
    """Seconds of each trained group from its first token to the end of its longest trial."""
    num_grants: int = 0
    idle: Idleness = field(default_factory=Idleness)


class Simulation:
    """Simulate the run of one workload: `run`, then read `measured`."""

    def __init__(self, work: Workload) -> None:
        self.work, self.site, self.inbox = work, LearnerSite(work), Inbox()
        self.measured = Measured()
        self._source = random.Random(work.seed)
        self._now, self._number, self._version = 0.0, 0, 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._actors: dict[Peer, Actor] = {}
        self._lives_s: dict[int, float] = {}
        """Seconds of the longest trial of each group that is not trained yet, by grant."""
        self._is_training = self._is_publishing = False
        self._trained: list[Group] | None = None
        """A trained batch that waits until the version before it is announced."""
        self._playing = self._loading = 0
        """Number of groups being played, and of groups that wait for their actor's weights."""
        tokens = work.tokens
        self._arrays = (
            np.ones(tokens, np.int32), np.ones(tokens, bool), np.zeros(tokens, np.float32)
        )  # fmt: skip
        piece = tokens // TURNS
        self._turns = tuple(
            Turn(Kind.ACT, 0, i, 0, i * piece, (i + 1) * piece, 0.0, True, "rock")
            for i in range(TURNS)
        )

    def run(self) -> None:
        """Simulate all steps."""
        for number in range(self.work.num_actors):
            self._at(number * self.work.join_s, self._join, number)
        self._at(self.work.tick_s, self._tick)
        while self._version < self.work.steps:
            when, _, call, args = heapq.heappop(self._events)
            self._pass_time(when - self._now)
            self._now = self.site.now = when
            call(*args)
        self.measured.ended = self._now

    def _at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, call, args))

    def _pass_time(self, seconds: float) -> None:
        """Account for the time until the next event."""
        ledger, idle = self.site.coordinator.ledger, self.measured.idle
        if not self._is_training:
            idle.learner_waited(seconds, ledger)
        places = self.work.places()
        idle.actors_had(
            seconds, ledger, places=places, playing=self._playing, loading=self._loading
        )

    # The learner.

    def _served(self, peer: Peer, frames: list[Frame], name: str) -> None:
        self.site.take(peer, frames, name)
        self._deliver()
        self._try_to_train()

    def _tick(self) -> None:
        self.site.tick()
        self._deliver()
        self._at(self._now + self.work.tick_s, self._tick)

    def _deliver(self) -> None:
        """Deliver what the learner has sent, and account for the time of sending."""
        sent, self.site.outbox.sent = self.site.outbox.sent, []
        begin = max(self._now, self.inbox.free_at)
        for number, (peer, message) in enumerate(sent, 1):
            if isinstance(message, GroupGrant | Publication | Welcome | Refusal):
                when = self._now + number * self.work.send_s + self.work.link_s
                self._at(when, self._hear, self._actors[peer], message)
                self.measured.num_grants += isinstance(message, GroupGrant)
        self.inbox.free_at = begin + len(sent) * self.work.send_s

    def _try_to_train(self) -> None:
        """Begin a step if the learner has none and a batch is complete."""
        arrived = self.site.coordinator.arrived
        if self._is_training or not arrived.is_set():
            return
        if (groups := self.site.take_batch()) is None:
            arrived.clear()
            return
        self._is_training = True
        self._at(self._now + self.work.step_s, self._stepped, groups)

    def _stepped(self, groups: list[Group]) -> None:
        """Handle the end of a step, which is committed once the version before it is announced."""
        if self._is_publishing:
            self._trained = groups
            return
        self._count(groups)
        self._version += 1
        self._is_publishing, self._is_training = True, False
        self._at(self._now + self.work.publish_s, self._announce, self._version)
        self.site.trained(self._version, groups)
        if self._version == self.work.settle:
            self._begin_to_measure()
        self.site.coordinator.arrived.set()  # wakes the training loop, which looks for a batch
        self._try_to_train()

    def _announce(self, version: int) -> None:
        self.site.announce(version)
        self._deliver()
        self._is_publishing = False
        if self._trained is not None:
            groups, self._trained = self._trained, None
            self._stepped(groups)

    def _count(self, groups: list[Group]) -> None:
        """Count the staleness of a batch that is trained from `_version` on."""
        if self._version < self.work.settle:
            return
        for group in groups:
            runs = [trial.segments[0].versions for trial in group.trials]
            self.measured.group_ages[self._version - min(each[0].policy for each in runs)] += 1
            for each in runs:
                stops = [run.start for run in each[1:]] + [self.work.tokens]
                for run, stop in zip(each, stops, strict=True):
                    self.measured.token_ages[self._version - run.policy] += stop - run.start
            self.measured.lives_s.append(self._lives_s.pop(group.grant))

    def _begin_to_measure(self) -> None:
        self.measured = Measured(began=self._now)
        self.inbox.clear()
        self.site.costs.clear()

    # The actors.

    def _join(self, number: int) -> None:
        """Let an actor say hello, and begin its heartbeats."""
        credits = self.work.groups_per_actor
        name = f"actor-{number}"
        hello = Hello(
            role="actor", name=name, build=BUILD, config_digest=BUILD, group_quota=credits
        )
        actor = Actor(f"{name}/0", hello)
        self._actors[actor.peer] = actor
        self._say(actor, hello)
        beat = Heartbeat(name=name, counters=Statistics().counters(), blocked_s={"engine": 1.0})
        frames = [bytes(frame) for frame in encode(beat)]
        # Heartbeats of different actors do not coincide.
        phase = self._source.random() * self.work.heartbeat_s
        self._at(self._now + phase, self._beat, actor, frames)

    def _beat(self, actor: Actor, frames: list[Frame]) -> None:
        self._send(actor, frames, "heartbeat")
        self._at(self._now + self.work.heartbeat_s, self._beat, actor, frames)

    def _say(self, actor: Actor, message: Message) -> None:
        frames = [bytes(frame) for frame in encode(message)]
        self._send(actor, frames, type(message).__name__.lower())

    def _send(self, actor: Actor, frames: list[Frame], name: str) -> None:
        """Send frames to the learner; all messages take equally long, so their order stays."""
        arrives = self._now + self.work.link_s
        done = self.inbox.arrived(arrives, sum(map(len, frames)), self.work.take_s)
        self._at(done, self._served, actor.peer, frames, name)

    def _hear(self, actor: Actor, message: Message) -> None:
        """Handle a message of the learner at an actor."""
        match message:
            case GroupGrant() if message.version > actor.version():
                actor.waiting.append(message)
                self._loading += 1
            case GroupGrant():
                self._play(actor, message)
            case Welcome() | Publication() if message.version > actor.version():
                load_s = self.work.load_s * (0.5 + self._source.random())
                self._at(self._now + load_s, self._load, actor, message.version)
            case Refusal():
                raise AssertionError(message.reason)

    def _load(self, actor: Actor, version: int) -> None:
        actor.versions.append((self._now, version))
        self._say(actor, Loaded(version=version))
        waiting, actor.waiting = actor.waiting, []
        self._loading -= len(waiting)
        for grant in waiting:
            self._hear(actor, grant)

    def _play(self, actor: Actor, grant: GroupGrant) -> None:
        lengths_s = [self.work.draw_s(self._source) for _ in range(grant.num_trials)]
        self._lives_s[grant.grant] = max(lengths_s)
        self._playing += 1
        self._at(self._now + max(lengths_s), self._end)
        for index, length_s in enumerate(lengths_s):
            self._at(self._now + length_s, self._finish, actor, grant, index, self._now)

    def _end(self) -> None:
        """Handle the end of a group's last trial."""
        self._playing -= 1

    def _finish(self, actor: Actor, grant: GroupGrant, index: int, began: float) -> None:
        task = Task(grant.environment, grant.member, grant.seed, grant.seat)
        segment = Segment(*self._arrays, self._runs(actor, began))
        length_s = self._now - began
        trial = Trial(task, index, 1, (segment,), self._turns, duration_s=length_s)
        self._say(actor, TrialResult(grant.grant, grant.epoch, trial))

    def _runs(self, actor: Actor, began: float) -> tuple[VersionRun, ...]:
        """Return the versions that sampled a trial that ends now, with tokens at an even pace."""
        length_s, tokens = self._now - began, self.work.tokens
        runs: list[VersionRun] = []
        for since, version in reversed(actor.versions):
            start = math.ceil(max(0.0, since - began) / length_s * tokens)
            if start < tokens:
                runs.append(VersionRun(start, version, version))
            if since <= began:
                break
        return tuple(reversed(runs))
