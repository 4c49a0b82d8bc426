"""Access control: pure decisions on arriving frames, shared by every kind of channel.

A peer that sent a fitting Hello is admitted; any other message of an unknown peer is not delivered.
Such a peer is asked to introduce itself, once until it does. A learner that begins finds everything
that its peers have sent since the last one, and answers each Hello with a Welcome, on which the
peer sends again what was not acknowledged.

A message that cannot be decoded is counted under its sender and goes no further. A peer over its
rate is refused with a sentence; what it sends after that is discarded, and if it goes on, its
connection is ended and its key is barred at its address for a while.

All state about peers is bounded, so unknown peers cannot fill the memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mage_async.errors import WireError
from mage_async.protocol.codec import decode
from mage_async.protocol.messages import (
    Acknowledge,
    Goodbye,
    Hello,
    Message,
    Refusal,
    WhoAreYou,
)
from mage_async.protocol.rate_limits import DEFAULT_ALLOWANCE, Allowance, Meter
from mage_async.protocol.trial_header import DEFAULT_LIMITS, Frame, Limits

Peer = str
"""Names one connection of one process: `actor-0/5e2c81d0`. A restarted process is another peer."""

MAX_COUNTED_PEERS = 8192
"""Faults of further peers are counted together, under "others"; of meters and refusals the oldest
are forgotten."""
MAX_PEERS = 8192
"""Peers admitted at one time; each is metered, so no more than `MAX_COUNTED_PEERS`."""
HEARING_S, HEARING_MESSAGES = 0.25, 64
"""Time, and messages, from a refusal until the connection of a peer that goes on sending is ended.
The peer may read the reason. A flooding peer does not, and discarding its messages for longer would
keep the learner busy."""
BARRED_S = 60.0
"""How long a key is barred at the address where it was refused for its rate."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What a peer sent that was no message."""

    count: int
    last: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with the frames of a peer."""

    message: Message | None = None
    """A message to deliver."""
    answer: Message | None = None
    """A message to send back."""
    is_over: bool = False
    """End the connection."""


NOTHING, END = Verdict(), Verdict(is_over=True)


@dataclass(slots=True)
class Hearing:
    """A peer that was refused: since when, or since its connection was last ended."""

    since: float
    num_messages: int = 0

    def receive(self, now: float) -> Verdict:
        """The peer goes on sending after a refusal."""
        self.num_messages += 1
        if now - self.since <= HEARING_S and self.num_messages <= HEARING_MESSAGES:
            return NOTHING
        self.since, self.num_messages = now, 0
        return END


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """A snapshot; reading it changes nothing."""

    peers: Mapping[Peer, Hello]
    num_received: int
    num_sent: int
    num_refused: int
    """Peers of another build or configuration, too many, or over their rate."""
    num_turned_away: int
    """Connections without a known key."""
    faults: Mapping[Peer, Faults]
    """Faults by peer, of peers that sent something malformed."""


@dataclass(slots=True)
class AccessControl:
    """Decides what to do with frames from a peer. Nothing here waits or sends."""

    build: str
    config_digest: str
    limits: Limits = DEFAULT_LIMITS
    allowance: Allowance = DEFAULT_ALLOWANCE
    known_keys: frozenset[bytes] = frozenset()
    """Public keys that are admitted; where there are none, no peer is asked for one."""
    peers: dict[Peer, Hello] = field(default_factory=dict)
    num_received: int = 0
    num_sent: int = 0
    num_refused: int = 0
    num_turned_away: int = 0
    faults: dict[Peer, Faults] = field(default_factory=dict)
    _asked: dict[Peer, WhoAreYou] = field(default_factory=dict)
    """Unknown peers that have not introduced themselves yet."""
    _meters: dict[Peer, Meter] = field(default_factory=dict)
    _refused: dict[Peer, Hearing] = field(default_factory=dict)
    """Peers that were refused for their rate."""
    _barred: dict[tuple[bytes, str], float] = field(default_factory=dict)
    """Key and address, and until when."""
    _notes: list[str] = field(default_factory=list)

    def receive(self, peer: Peer, frames: Sequence[Frame], *, now: float) -> Verdict:
        """What to do with a peer's frames that arrived at `now`, in seconds."""
        if (hearing := self._refused.get(peer)) is not None:
            return hearing.receive(now)
        meter = self._meter(peer, now)
        if reason := meter.arrived(sum(map(len, frames)), now=now):
            return self._refuse(peer, reason, now)
        try:
            message = decode(frames, self.limits)
        except WireError as fault:
            self._count_fault(peer, str(fault))
            reason = meter.was_malformed(now=now)
            return self._refuse(peer, f"{reason}: {fault}", now) if reason else NOTHING
        return self._sort(peer, message)

    def may_enter(self, key: bytes, address: str, *, now: float) -> bool:
        """Whether a connection with this public key may be made from that address."""
        is_known = key in self.known_keys
        if is_known and now >= self._barred.get((key, address), now):
            return True
        if not is_known:
            self.turned_away(f"{address}: it has no key that this learner knows")
        return False

    def turned_away(self, why: str) -> None:
        """A connection ended before it could say anything; of many, few are noted."""
        self.num_turned_away += 1
        count = str(self.num_turned_away)
        if count.strip("0") == "1":  # 1, 10, 100, …
            self._note(f"{count}. connection turned away, from {why}")

    def bar(self, key: bytes, address: str, *, now: float) -> None:
        """A peer with this key was refused for its rate: it may not come again at once."""
        _remember(self._barred, (key, address), now + BARRED_S)

    def sent(self, peer: Peer, message: Message) -> None:
        """A message has left; one that takes a trial in gives the peer its allowance for it back.

        A duplicate gives nothing back: sending one trial for ever is a flood like any other. A
        question that could not be sent is asked again.
        """
        self.num_sent += 1
        if isinstance(message, WhoAreYou):
            _remember(self._asked, peer, message)
        is_taken = isinstance(message, Acknowledge) and not message.is_duplicate
        if is_taken and (meter := self._meters.get(peer)) is not None:
            meter.was_wanted()

    def forget(self, peer: Peer) -> None:
        """The peer is gone; if it comes back it has to say hello."""
        self.peers.pop(peer, None)
        self._asked.pop(peer, None)

    def take_notes(self) -> list[str]:
        """Sentences for the screen that have not been taken yet."""
        notes, self._notes = self._notes, []
        return notes

    def statistics(self) -> ChannelStatistics:
        """A snapshot."""
        return ChannelStatistics(
            peers=MappingProxyType(dict(self.peers)),
            num_received=self.num_received,
            num_sent=self.num_sent,
            num_refused=self.num_refused,
            num_turned_away=self.num_turned_away,
            faults=MappingProxyType(dict(self.faults)),
        )

    def _sort(self, peer: Peer, message: Message) -> Verdict:
        """What to do with a message, by its sender."""
        if isinstance(message, Hello):
            self._asked.pop(peer, None)
            return self._receive_hello(peer, message)
        if peer not in self.peers:
            is_answered = peer in self._asked or isinstance(message, Goodbye)
            return NOTHING if is_answered else Verdict(answer=WhoAreYou())
        if isinstance(message, Goodbye):
            self.forget(peer)
        self.num_received += 1
        return Verdict(message)

    def _receive_hello(self, peer: Peer, hello: Hello) -> Verdict:
        reason = self._why_refused(peer, hello)
        if reason:
            self.num_refused += 1
            return Verdict(answer=Refusal(reason=reason))
        self.peers[peer] = hello
        self.num_received += 1
        return Verdict(hello)

    def _why_refused(self, peer: Peer, hello: Hello) -> str:
        if hello.build != self.build:
            return (
                f"{hello.name} is build {hello.build}, the learner {self.build}: "
                "run both from one install"
            )
        if hello.config_digest != self.config_digest:
            return (
                f"{hello.name} has configuration {hello.config_digest}, the learner "
                f"{self.config_digest}: start both from one run directory"
            )
        if peer not in self.peers and len(self.peers) >= MAX_PEERS:
            return f"{hello.name}: the learner serves {MAX_PEERS} peers already"
        return ""

    def _refuse(self, peer: Peer, reason: str, now: float) -> Verdict:
        """Refuse a peer for its rate: whatever it sends from now on is discarded."""
        reason = f"{peer} is refused: {reason}"[:500]
        self.num_refused += 1
        self._note(reason)
        _remember(self._refused, peer, Hearing(now))
        said_hello = self.peers.pop(peer, None) is not None
        return Verdict(Goodbye(reason=reason) if said_hello else None, Refusal(reason=reason))

    def _meter(self, peer: Peer, now: float) -> Meter:
        meter = self._meters.get(peer)
        if meter is None:
            meter = Meter(self.allowance, now=now)
            _remember(self._meters, peer, meter)
        return meter

    def _count_fault(self, peer: Peer, sentence: str) -> None:
        if peer not in self.faults and len(self.faults) >= MAX_COUNTED_PEERS:
            peer = "others"
        count = self.faults[peer].count if peer in self.faults else 0
        self.faults[peer] = Faults(count + 1, sentence)

    def _note(self, sentence: str) -> None:
        self._notes = [*self._notes[-19:], sentence]


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Set an entry, and forget the oldest one over `MAX_COUNTED_PEERS`."""
    known[key] = value
    if len(known) > MAX_COUNTED_PEERS:
        del known[next(iter(known))]
