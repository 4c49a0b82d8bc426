"""The peers that the learner has let in: when they spoke last, what they said, what they are told.

A peer that leaves, whose connection ends or that stays silent for too long loses its groups, which
are granted again, and its leases on published weights.
"""

from dataclasses import dataclass, field
from functools import partial

import msgspec

from mage_async.admission.ledger import SlotLedger
from mage_async.protocol.journal_records import Receipt
from mage_async.protocol.messages import Heartbeat, Hello, Loaded, Message, Publication, Welcome
from mage_services.learner.coordinator_rules import Journal
from mage_services.transport.access import Peer
from mage_services.transport.learner_channel import LearnerChannel, PeerGone
from mage_services.weights.weight_store import WeightStore

SILENCE_S = 4.0
"""An actor that has not spoken for so long is away: noticed within a tick more."""
FIRST_BEAT_S = 60.0
"""From its welcome to its first heartbeat, while it makes its engine."""
LOST = 30
"""An actor is dropped after so many silent intervals (`patience_s`): two minutes, by when the
supervisor has ended a local actor; half an hour for an actor that makes its engine."""
MAX_FAULTS = 20


@dataclass(slots=True)
class RegisteredPeer:
    """A peer that was let in."""

    hello: Hello
    last_heard: float
    beat: Heartbeat | None = None
    is_away: bool = False
    """Silent for too long: it is granted nothing until it speaks again."""

    @property
    def is_actor(self) -> bool:
        """Whether it plays groups; otherwise it evaluates."""
        return self.hello.role == "actor"

    def patience_s(self) -> float:
        """Seconds that the peer may be silent: one silent interval."""
        return FIRST_BEAT_S if self.beat is None else SILENCE_S

    def is_silent(self, now: float) -> bool:
        """Whether an actor has been silent for too long and is not marked as away yet."""
        is_expected = self.is_actor and not self.is_away
        return is_expected and now - self.last_heard > self.patience_s()

    def is_lost(self, now: float) -> bool:
        """Whether an actor has been away for `LOST` silent intervals."""
        return self.is_away and now - self.last_heard > LOST * self.patience_s()


@dataclass(slots=True)
class PeerRegistry:
    """See the module."""

    channel: LearnerChannel
    ledger: SlotLedger
    journal: Journal
    weights: WeightStore
    peers: dict[Peer, RegisteredPeer] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """Sentences about what peers did wrong, oldest first, at most `MAX_FAULTS`."""
    receipts: list[Receipt] = field(default_factory=list)
    """Those of weights that engines have loaded since `take_receipts`."""

    def greet(self, peer: Peer, hello: Hello, now: float) -> None:
        """Let a peer in, in place of the same process under an earlier connection."""
        for other, known in list(self.peers.items()):
            if known.hello.name == hello.name and other != peer:
                self.remove(other)  # the process was started again
        for owner in self.ledger.owners():
            if owner.startswith(f"{hello.name}/") and owner != peer:
                self.ledger.peer_gone(owner)  # it was, while there was no learner
        self.peers[peer] = RegisteredPeer(hello, now)
        self._may_play(peer)
        self._note_idle_places(hello)

    def hear(self, peer: Peer, now: float) -> bool:
        """A peer has spoken; whether it is let in. One that was away is told again what it keeps,
        for its groups are no longer its own.
        """
        known = self.peers.get(peer)
        if known is None:
            return False
        was_away, known.is_away = known.is_away, False
        known.last_heard = now
        if was_away:
            self._may_play(peer)
        if was_away and self.weights.is_open:
            self.welcome(peer)
        return True

    def welcome(self, peer: Peer) -> None:
        """Tell a peer what to draw with, and which groups are its own."""
        latest = self.weights.for_role(self.peers[peer].hello.role)
        keeps = self.ledger.playing(peer)
        self.weights.lease(peer, latest.version)
        self.send(peer, Welcome(version=latest.version, weights_path=latest.path, keeps=keeps))

    def announce(self, peer: Peer, publication: Publication) -> None:
        """Tell a peer of new weights, which stay until it has loaded newer ones."""
        self.weights.lease(peer, publication.version)
        self.send(peer, publication)

    def bring_up(self, peer: Peer) -> None:
        """Tell an actor what to draw with, unless it does already or is loading something."""
        if (target := self.weights.next_for(peer)) is not None:
            self.announce(peer, target)

    def loaded(self, peer: Peer, message: Loaded) -> None:
        """A peer draws with a version; its receipt is journalled."""
        self.weights.loaded(peer, message.version)
        if not message.digest:
            return
        receipt = Receipt(peer=peer, **msgspec.structs.asdict(message))
        self.journal.append(receipt)
        self.receipts.append(receipt)
        if message.num_retries:
            self.note(f"{peer}: read weights of version {message.version} twice, others at first")

    def take_receipts(self) -> list[Receipt]:
        """Receipts that were handed in since this was last asked."""
        taken, self.receipts = self.receipts, []
        return taken

    def look_after(self, now: float) -> None:
        """Mark silent peers as away, and forget lost ones.

        Nothing is sent to a peer that is away, so nothing else tells its end: a machine that
        vanished would keep its leases, and its place, for ever.
        """
        for peer, known in list(self.peers.items()):
            if self.weights.is_open and known.is_silent(now):
                self.note(f"{peer}: silent for {known.patience_s():g} s")
                known.is_away = True
                self._may_play(peer)
                self.ledger.peer_gone(peer)
            elif known.is_lost(now):
                silent_s = now - known.last_heard
                self.note(f"{peer}: forgotten, it has been silent for {silent_s:.0f} s")
                self.channel.forget(peer)
                self.remove(peer)

    def remove(self, peer: Peer) -> None:
        """A peer has gone, for good or until it says hello."""
        self.peers.pop(peer, None)
        self._may_play(peer)
        self.weights.release(peer)
        self.ledger.peer_gone(peer)

    def send(self, peer: Peer, message: Message) -> None:
        """Send at once; a peer that cannot be reached has gone."""
        try:
            self.channel.send(peer, message)
        except PeerGone as gone:
            self.note(str(gone))
            self.remove(peer)

    def send_when_durable(self, peer: Peer, *messages: Message) -> None:
        """Send when what the journal was given so far is durable."""
        for message in messages:
            self.journal.after(partial(self.send, peer, message))

    def note(self, sentence: str) -> None:
        """Remember what went wrong, for people to read."""
        self.faults = [*self.faults[1 - MAX_FAULTS :], sentence]

    def shares(self) -> dict[str, dict[str, float]]:
        """Seconds by state of each actor, as it last said."""
        return {
            known.hello.name: dict(known.beat.blocked_s)
            for known in self.peers.values()
            if known.beat is not None
        }

    def _note_idle_places(self, hello: Hello) -> None:
        """Say it where, with this peer, the actors could play more groups than they may."""
        places, most = self.ledger.num_places(), self.ledger.concurrency
        if most is not None and places - hello.credits <= most < places:
            self.note(
                f"the actors have room for {places} groups and are granted {most}, as "
                "admission.max_groups_in_play and over_age_target say: the rest of them is idle"
            )

    def _may_play(self, peer: Peer) -> None:
        """Tell the ledger how many groups a peer may be granted now: an actor that is here, its
        credits; anybody else none.
        """
        known = self.peers.get(peer)
        plays = known is not None and known.is_actor and not known.is_away
        self.ledger.set_credits(peer, known.hello.credits if known and plays else 0)
