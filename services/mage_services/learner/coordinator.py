"""The coordinator: decides on each message at once, without waiting, and answers it.

The coordinator owns the ledger of slots and knows the peers. The learner calls `take` for each
message, `tick` now and then, and `announce` for new weights; `arrived` is set whenever a batch may
have become complete.

    peer's message   the coordinator
    Hello            Welcome now, or when the policy is ready; then grants
    TrialResult      journal, then Acknowledge; perhaps the batch is complete. Unwanted where its
                     group was never granted
    GroupDrop        frees the slot, counts the reason
    Loaded           frees older weights; where there are newer ones, a Publication
    Heartbeat        remembers it; a peer that stops beating is away: its groups are granted again,
                     and when it is back a new Welcome says which it may go on with; in the end it
                     is forgotten, and the weights that it may read with it
    Goodbye          the same, for good
    (unknown peer's) WhoAreYou, so that it says hello; a result is taken all the same

`peer_registry.py` has the peers, `grants.py` what is granted, `arrivals.py` what is taken in.

What a peer is told follows from what the journal holds durably: a grant or an acknowledgement
leaves when its record, and with it every earlier one, is on disk. While the journal has no space no
result is taken in and nothing granted; afterwards each actor is welcomed again, and sends again
what was not acknowledged.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from mage_async.admission.concurrency import Concurrency
from mage_async.admission.counts import LedgerCounts
from mage_async.admission.groups_in_flight import OVER_AGE
from mage_async.admission.ledger import SlotLedger
from mage_async.graph_memory.memory import GraphMemory
from mage_async.protocol.journal_records import Dropped, Head, Published
from mage_async.protocol.messages import (
    Goodbye,
    GroupDrop,
    Heartbeat,
    Hello,
    Loaded,
    Message,
    Publication,
    TrialResult,
    WhoAreYou,
)
from mage_async.tasks.population import League, version_of
from mage_async.trajectory import Group
from mage_services.learner.arrivals import Arrivals
from mage_services.learner.coordinator_rules import CoordinatorRules, Journal, Tasks, head_of
from mage_services.learner.grants import Grants
from mage_services.learner.peer_registry import SILENCE_S, PeerRegistry, RegisteredPeer
from mage_services.transport.access import Peer
from mage_services.transport.learner_channel import LearnerChannel
from mage_services.weights.weight_store import EARLIER, WeightStore

STALL_S = 2.0
"""Where so long passes between two ticks, it was this process that did not run."""


@dataclass(slots=True)
class Coordinator:
    """See the module. `clock` gives seconds that never go back."""

    channel: LearnerChannel
    ledger: SlotLedger
    journal: Journal
    tasks: Tasks
    rules: CoordinatorRules
    clock: Callable[[], float]
    weights: WeightStore
    league: League = field(default_factory=League)
    """Versions of the policy that sit in opponents' seats, and ratings."""
    memory: GraphMemory = field(default_factory=GraphMemory)
    """What groups are told of earlier tasks."""
    pace: Concurrency | None = None
    """Age-aware concurrency; None: as many groups in play as the ledger's rule admits."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    greeted: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set whenever a peer says hello."""
    registry: PeerRegistry = field(init=False)
    grants: Grants = field(init=False)
    arrivals: Arrivals = field(init=False)
    _is_full: bool = field(default=False, init=False)
    """The journal had no space when it was last looked at."""
    _opened_at: float = field(default=0.0, init=False)
    _ticked_at: float | None = field(default=None, init=False)
    _is_closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.registry = PeerRegistry(self.channel, self.ledger, self.journal, self.weights)
        self.grants = Grants(
            self.registry,
            self.ledger,
            self.journal,
            self.tasks,
            self.rules,
            self.clock,
            self.weights,
            self.memory,
            self.arrived,
        )
        self.arrivals = Arrivals(
            self.registry, self.ledger, self.journal, self.clock, self.pace, self.arrived
        )

    @property
    def peers(self) -> dict[Peer, RegisteredPeer]:
        """Those that are let in."""
        return self.registry.peers

    @property
    def faults(self) -> list[str]:
        """Sentences about what peers did wrong, oldest first."""
        return self.registry.faults

    def take(self, peer: Peer, message: Message) -> None:
        """Decide on one message.

        Raises:
            DeterministicFailure: too many groups were dropped in a row.
        """
        known = self.peers.get(peer)
        if not self.registry.hear(peer, self.clock()) and not isinstance(message, Hello | Goodbye):
            self.registry.send(peer, WhoAreYou())
        match message:
            case Hello():
                self._greet(peer, message)
            case TrialResult():
                if not self._look_for_space():  # otherwise the result stays with its peer
                    self.arrivals.take(peer, message)
            case GroupDrop():
                self.grants.drop(message)
            case Loaded():
                self._loaded(peer, message)
            case Heartbeat():
                if known is not None:
                    known.beat = message
            case Goodbye():
                self.registry.remove(peer)
            case _:
                self.registry.note(f"{peer}: a learner cannot take {type(message).__name__}")
        self._grant()

    def tick(self) -> None:
        """What only time tells: deadlines passed, peers fallen silent."""
        now = self.clock()
        self._forgive_stall(now)
        for sentence in self.channel.take_notes():
            self.registry.note(sentence)
        self.registry.look_after(now)
        self._forget_strangers(now)
        self.grants.expire(now)
        self._look_for_space()
        self._grant()

    def announce(self, publication: Publication) -> None:
        """The weights of a version are there to be read: journal that, and tell the peers."""
        version, is_open = publication.version, self.weights.is_open
        if is_open or self.league.wants(version):
            self.journal.append(
                Published(version=version, path=publication.path, digest=publication.digest)
            )
        self.league.published(version)
        if is_open:
            self.publish(publication)
        else:
            self.open(*self.weights.lagging(version), publication)

    def publish(self, publication: Publication) -> None:
        """Announce new weights to every peer, then grant what they free.

        An actor that is still loading hears of the newest when it has done so.
        """
        self.weights.add(publication)
        for peer, known in list(self.peers.items()):
            if known.is_actor:
                self.registry.bring_up(peer)
            elif self.rules.is_measured(publication.version):
                self.registry.announce(peer, publication)
        self._grant()

    def open(self, *publications: Publication) -> None:
        """The first weights are there: welcome the peers that waited.

        Several, oldest first, where a restarted learner has lagging actors.
        """
        self.weights.open(*publications)
        self._opened_at = self.clock()
        for peer in list(self.peers):
            self._welcome(peer)
        self._grant()

    def unused(self, versions: Collection[int]) -> list[int]:
        """The versions among these that hold no lease and are no opponent."""
        return self.weights.unused(versions, self.rivals())

    def rivals(self) -> set[int]:
        """Versions that groups play against, or will.

        A complete group needs none, in training or not: to a restarted learner groups that were in
        training are in flight again, and it must not miss weights that were removed meanwhile.
        """
        playing = {version_of(member) for member in self.ledger.members_in_play()}
        return self.league.kept() | {version for version in playing if version is not None}

    def take_batch(self) -> list[Group] | None:
        """The next step's groups, if they are all there."""
        return self.ledger.take_batch()

    def trained(self, version: int) -> None:
        """The oldest batch taken has become `version`, and the journal says so durably."""
        for grant in self.ledger.trained(version):
            self.journal.append(Dropped(grant=grant, reason=OVER_AGE))
        self.journal.roll(self.head)

    def head(self) -> Head:
        """All a new segment of the journal has to begin with."""
        return head_of(self.ledger, self.rules, self.league, self.memory)

    def close(self) -> None:
        """Grant nothing more; what is played is still taken in."""
        self._is_closed = True

    def has_heard_all(self) -> bool:
        """Whether the evaluator and everyone who plays a group has said hello, since the learner's
        restart too: they can be said goodbye to.
        """
        roles = {known.hello.role for known in self.peers.values()}
        return "evaluator" in roles and self.ledger.owners() <= self.peers.keys()

    def dismiss(self, reason: str) -> None:
        """Say goodbye to every peer."""
        for peer in list(self.peers):
            self.registry.send(peer, Goodbye(reason=reason))

    def counts(self) -> LedgerCounts:
        """What became of groups and trials so far."""
        return self.ledger.counts()

    def _greet(self, peer: Peer, hello: Hello) -> None:
        self.registry.greet(peer, hello, self.clock())
        self.greeted.set()
        if self.weights.is_open:
            self._welcome(peer)

    def _welcome(self, peer: Peer) -> None:
        """Take a peer in, and repeat its grants: it may not have heard of all."""
        self.peers[peer].last_heard = self.clock()  # until now this process was silent itself
        self.registry.welcome(peer)
        self.grants.repeat(peer)

    def _forgive_stall(self, now: float) -> None:
        """Forgive silence and lateness in a time when this process did not listen."""
        gap = 0.0 if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        if gap > STALL_S:
            self.registry.note(f"the learner itself did not run for {gap:.1f} s")
            self._opened_at += gap
            self.ledger.postpone(gap, now + self.rules.deadline_s)
            for known in self.peers.values():
                known.last_heard = now

    def _loaded(self, peer: Peer, message: Loaded) -> None:
        """A peer draws with a version; an actor hears of newer ones now."""
        self.registry.loaded(peer, message)
        known = self.peers.get(peer)
        if known is not None and known.is_actor:
            self.registry.bring_up(peer)

    def _look_for_space(self) -> bool:
        """Whether the journal is full; when it is no longer, ask for what was not taken in."""
        was_full, reason = self._is_full, self.journal.why_full()
        self._is_full = bool(reason)
        if reason and not was_full:
            self.registry.note(f"nothing is taken in or granted: {reason}")
            self.arrived.set()  # a checkpoint may make space
        if was_full and not reason:
            for peer, known in list(self.peers.items()):
                if known.is_actor and self.weights.is_open:
                    self._welcome(peer)
        return self._is_full

    def _forget_strangers(self, now: float) -> None:
        """Forget owners from before a restart that have not come back."""
        if self.weights.is_open and now - self._opened_at > SILENCE_S:
            self.weights.release(EARLIER)
            for owner in self.ledger.owners() - self.peers.keys():
                self.registry.note(f"{owner}: has not come back after the learner's restart")
                self.ledger.peer_gone(owner)

    def _grant(self) -> None:
        """Grant what may be granted."""
        if not self.weights.is_open or self._is_full or self._is_closed:
            return
        if not self.league.wants(self.ledger.version):  # otherwise `publish` comes back here
            self.grants.hand_out()
