"""A coordinator, its journal and its actors, crashed anywhere: what was acknowledged is never lost.

The coordinator, the ledger, the journal's bytes, `replay` and compaction are the real ones; the
disk keeps what was synced and, of the rest, as much as a crash happens to leave, the last record
torn. Actors remember what they were told, which is all that anybody outside the learner can hold it
to.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mage_async.admission.ledger import Ledger
from mage_async.admission.replay import CONFIG_CHANGED, replay
from mage_async.environments.catalogue import load
from mage_async.policy_version import VersionRun
from mage_async.protocol.journal_records import (
    Commit,
    Dropped,
    Published,
    first_needed,
    first_segment_header,
)
from mage_async.protocol.messages import (
    Acknowledge,
    GroupDrop,
    GroupGrant,
    Hello,
    Loaded,
    Message,
    Publication,
    TrialResult,
    Welcome,
    WhoAreYou,
)
from mage_async.tasks.league import League
from mage_async.tasks.task_stream import TaskStream
from mage_async.trajectory import Group, Task, Trial
from mage_async.trajectory import Segment as Part
from mage_services.learner.coordinator import SILENCE_S, Coordinator
from mage_services.transport.channels import PeerGone
from mage_services.weights.weight_store import WeightStore
from tests.helpers.coordinator_site import coordinator_config
from tests.helpers.crashing_disk import DEADLINE_S, Disk
from tests.helpers.memory_channels import MemoryWeights

B, S, G = 2, 1, 2
Trials = frozenset[tuple[int, int]]


@dataclass
class Player:
    """An actor: what it plays, what it has sent, what it was told."""

    name: str
    life: int = 0
    playing: dict[tuple[int, int], GroupGrant] = field(default_factory=dict)
    unacknowledged: dict[tuple[int, int], TrialResult] = field(default_factory=dict)
    inbox: list[Message] = field(default_factory=list)
    outbox: list[Message] = field(default_factory=list)

    @property
    def peer(self) -> str:
        return f"{self.name}/{self.life}"

    def hello(self) -> Hello:
        return Hello(
            role="actor", name=self.name, build="test", config_digest="test", group_quota=3
        )

    def held(self, grant: int) -> set[int]:
        return {index for number, index in self.unacknowledged if number == grant}


def trial_of(grant: GroupGrant, index: int) -> TrialResult:
    part = Part(
        np.ones(1, np.int32),
        np.ones(1, bool),
        np.zeros(1, np.float32),
        (VersionRun(0, grant.version, grant.version),),
    )
    task = Task(grant.environment, grant.member, grant.seed, grant.seat)
    return TrialResult(
        grant.grant, grant.epoch, Trial(task, index, grant.num_episodes, (part,), ())
    )


class World:
    """One learner after another over one disk, and two actors that outlive them."""

    def __init__(self) -> None:
        self.now, self.checkpoint = 0.0, 0
        self.disk = Disk()
        self.players = [Player("a"), Player("b")]
        self.told: set[tuple[int, int]] = set()
        """Trials that some actor was told are taken."""
        self.announced: dict[int, tuple[int, ...]] = {}
        """The grants of every version that anybody has heard of."""
        self.committed: dict[int, tuple[int, ...]] = {}
        self.abandoned: set[int] = set()
        """Groups given up when the configuration was changed."""
        self.awaiting: tuple[int, list[Group]] | None = None
        self.tasks = TaskStream(load("rps"), 0)
        self.disk.begin(first_segment_header(0, 0))
        self.disk.sync(1)
        self.start(Ledger(B, S, G, max_expiries=2), 0)

    def start(self, ledger: Ledger, version: int) -> None:
        rules = coordinator_config(DEADLINE_S, steps=10**9)
        weights = WeightStore(MemoryWeights())
        self.coordinator = Coordinator(
            self,
            ledger,
            self.disk,
            self.tasks,
            rules,
            lambda: self.now,
            weights,  # type: ignore[arg-type]
            max_drops_in_a_row=10**9,
        )
        self.coordinator.open(Publication(version=version, path="w", digest="d"))

    # The channel.

    def send(self, peer: str, message: Message) -> None:
        for player in self.players:
            if player.peer == peer:
                player.inbox.append(message)
                return
        raise PeerGone(f"{peer} is gone")

    def forget(self, peer: str) -> None:
        """`say` asks the coordinator itself whom it knows."""

    def take_notes(self) -> list[str]:
        return []

    # Moves.

    def say(self, choice: int) -> None:
        """An actor says the oldest thing it has to say; at first, hello."""
        player = self.players[choice % 2]
        if player.outbox:
            message = player.outbox.pop(0)
            if isinstance(message, Hello) or player.peer in self.coordinator.peers:
                self.coordinator.take(player.peer, message)
            else:  # access control does not let it in
                self.send(player.peer, WhoAreYou())
        elif player.peer not in self.coordinator.peers:
            player.outbox.append(player.hello())

    def hear(self, choice: int) -> None:
        player = self.players[choice % 2]
        if not player.inbox:
            return
        match message := player.inbox.pop(0):
            case GroupGrant():
                player.playing[message.grant, message.epoch] = message
            case Acknowledge():
                player.unacknowledged.pop((message.grant, message.trial), None)
                self.told.add((message.grant, message.trial))
            case Welcome():
                player.playing = {k: g for k, g in player.playing.items() if k in message.keeps}
                player.outbox += player.unacknowledged.values()
                player.outbox.append(Loaded(version=message.version))
            case Publication():
                assert message.version in self.committed or message.version == 0
                self.announced[message.version] = self.committed.get(message.version, ())
                player.outbox.append(Loaded(version=message.version))
            case WhoAreYou():
                player.outbox.insert(0, player.hello())
            case _:
                raise AssertionError(message)

    def finish(self, choice: int) -> None:
        """An actor finishes a trial of some group it plays."""
        player = self.players[choice % 2]
        for key, grant in list(player.playing.items()):
            left = set(range(G)) - player.held(grant.grant) - set(grant.held)
            if not left:
                del player.playing[key]
                continue
            result = trial_of(grant, min(left))
            player.unacknowledged[grant.grant, result.trial.index] = result
            player.outbox.append(result)
            return

    def give_up(self, choice: int) -> None:
        player = self.players[choice % 2]
        if player.playing:
            grant, epoch = next(iter(player.playing))
            del player.playing[grant, epoch]
            player.outbox.append(GroupDrop(grant=grant, epoch=epoch, reason="cursed"))

    def kill_actor(self, choice: int) -> None:
        player = self.players[choice % 2]
        self.players[choice % 2] = Player(player.name, player.life + 1)

    def wait(self, seconds: float) -> None:
        for _ in range(1 + int(seconds)):
            self.now += seconds / (1 + int(seconds))
            self.coordinator.tick()

    def train(self) -> None:
        """Take a batch and commit it; it is published when the commit is durable."""
        if self.awaiting is not None or (groups := self.coordinator.ledger.take_batch()) is None:
            return
        version = self.coordinator.ledger.version + 1
        for group in groups:
            assert version - 1 - group.version <= S, "the bound is broken"
        grants = tuple(group.grant for group in groups)
        record = Commit(version=version, grants=grants, digest="d", tensors={}, time_s=1.0)
        self.awaiting = version, groups
        self.disk.append(record, lambda: self.publish(version, grants))

    def publish(self, version: int, grants: tuple[int, ...]) -> None:
        assert self.committed.setdefault(version, grants) == grants
        self.awaiting = None
        self.coordinator.trained(version)
        self.disk.append(Published(version=version, path="w", digest="d"))
        self.coordinator.publish(Publication(version=version, path="w", digest="d"))

    def save(self) -> None:
        """A checkpoint of the published version, and what it frees."""
        if self.awaiting is None:
            self.checkpoint = self.coordinator.ledger.version
            self.disk.compact(self.checkpoint)

    def crash(self, left: float, *, changes: bool = False) -> None:
        """The learner is killed, and the next one recovers from disk; perhaps it `changes` the
        configuration.
        """
        self.disk.crash(left)
        self.awaiting = None
        ledger = Ledger(B, S, G, max_expiries=2)
        segments = self.disk.segments()
        first = first_needed(segments, self.checkpoint)
        assert first is not None, "the journal lacks what the checkpoint needs"
        files = [file for file in self.disk.files if file.number >= first]
        for committed in replay(self.disk.records(files), ledger, League()):
            version, grants = committed.commit.version, committed.commit.grants
            assert self.committed.setdefault(version, grants) == grants
            if version > self.checkpoint:
                assert committed.groups is not None, "a committed trial is lost"
        self.committed = {v: g for v, g in self.committed.items() if v <= ledger.version}
        for version, grants in self.announced.items():
            assert self.committed.get(version, ()) == grants, "an announced version is lost"
        if changes:
            self.abandoned |= set(ledger._pending)
            ledger.drop_all(CONFIG_CHANGED)
        ledger.restart_timers(self.now)
        self.disk.begin(ledger.segment_header("", DEADLINE_S))
        self.start(ledger, ledger.version)

    def do(self, move: tuple[int, int, float]) -> None:
        what, choice, share = move
        if what < 4:
            self.say(choice)
        elif what < 8:
            self.hear(choice)
        elif what < 12:
            self.finish(choice)
        elif what < 14:
            self.disk.sync(1 + choice)
        else:
            [
                lambda: self.give_up(choice),
                lambda: self.kill_actor(choice),
                lambda: self.wait(share * (SILENCE_S + 2)),
                lambda: self.wait(DEADLINE_S if share > 0.8 else 0.5),
                self.train,
                self.train,
                self.save,
                lambda: setattr(self.disk, "wants_roll", True),
                lambda: self.crash(share),
                lambda: self.crash(share, changes=True),
            ][what - 14]()

    # What has to be true.

    def check(self) -> None:
        """All that actors were told of is trained, or held, or was dropped; nothing twice."""
        trained = [grant for grants in self.committed.values() for grant in grants]
        assert len(set(trained)) == len(trained), "a group was trained twice"
        slots = self.coordinator.ledger._pending
        training = {g for batch in self.coordinator.ledger._in_training for g in batch}
        records = self.disk.records(self.disk.archive)
        dropped = self.abandoned | {r.grant for r in records if isinstance(r, Dropped)}
        for grant, index in self.told:
            is_held = grant in slots and slots[grant].trials[index] is not None
            assert is_held or grant in training or grant in trained or grant in dropped, (
                f"trial {grant}.{index} was acknowledged and is lost"
            )
        counts = self.coordinator.ledger.counts()
        taken = {(r.grant, r.trial.index) for r in records if isinstance(r, TrialResult)}
        assert counts.acknowledged == len(taken), "the count of acknowledged trials is wrong"
        groups = counts.groups
        assert groups.granted == groups.trained + groups.dropped + groups.in_flight
        assert groups.trained == len(self.committed) * B


WEIGHTS = (6,) * 4 + (6,) * 4 + (5,) * 4 + (5, 5) + (0.5, 1, 1, 1, 4, 4, 2, 1, 1, 0.2)


def moves_of(seed: int, count: int) -> Iterator[tuple[int, int, float]]:
    source = random.Random(seed)
    for what in source.choices(range(len(WEIGHTS)), WEIGHTS, k=count):
        yield what, source.randrange(8), source.random()


@settings(max_examples=150, deadline=None)
@example(29163035, 329)  # a grant at the torn end of one segment, in the header of the next
@given(st.integers(0, 2**32), st.integers(10, 500))
def test_nothing_acknowledged_is_lost_wherever_the_learner_crashes(seed: int, count: int) -> None:
    world = World()
    for move in moves_of(seed, count):
        world.do(move)
    world.check()
    world.crash(0.0)
    world.check()
