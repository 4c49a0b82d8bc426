"""Who may talk to the learner: pure decisions on arriving frames, shared by every kind of channel.

A peer that said a fitting Hello is let in; anything else from a stranger is answered, not
delivered. What cannot be decoded is counted under the peer that sent it and goes no further.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from mage_async.errors import WireError
from mage_async.wire import (
    DEFAULT_LIMITS,
    Frame,
    Goodbye,
    Hello,
    Limits,
    Message,
    Refusal,
    WhoAreYou,
    decode,
)

Peer = str
"""Names one connection of one process: `actor-0/5e2c81d0`. A restarted process is another peer."""

MAX_COUNTED_PEERS = 1024
"""Faults of further peers are counted together, under "others": strangers cannot fill the
memory."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What a peer sent that was no message."""

    count: int
    last: str


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """A snapshot; reading it changes nothing."""

    peers: Mapping[Peer, Hello]
    num_received: int
    num_sent: int
    num_refused: int
    """Peers of another build or configuration."""
    faults: Mapping[Peer, Faults]
    """By peer; only peers that sent something malformed."""

    def num_malformed(self) -> int:
        """Malformed messages of all peers."""
        return sum(faults.count for faults in self.faults.values())


@dataclass(slots=True)
class Door:
    """Decides what to do with frames from a peer. Nothing here waits or sends."""

    build: str
    config_digest: str
    limits: Limits = DEFAULT_LIMITS
    peers: dict[Peer, Hello] = field(default_factory=dict)
    num_received: int = 0
    num_sent: int = 0
    num_refused: int = 0
    faults: dict[Peer, Faults] = field(default_factory=dict)

    def receive(self, peer: Peer, frames: Sequence[Frame]) -> tuple[Message | None, Message | None]:
        """What to deliver and what to answer, either or neither: `(delivered, answer)`."""
        try:
            message = decode(frames, self.limits)
        except WireError as fault:
            self._count_fault(peer, str(fault))
            return None, None
        if isinstance(message, Hello):
            return self._receive_hello(peer, message)
        if peer not in self.peers:
            return None, (None if isinstance(message, Goodbye) else WhoAreYou())
        if isinstance(message, Goodbye):
            del self.peers[peer]
        self.num_received += 1
        return message, None

    def forget(self, peer: Peer) -> None:
        """The peer is gone; if it comes back it has to say hello."""
        self.peers.pop(peer, None)

    def statistics(self) -> ChannelStatistics:
        """A snapshot."""
        return ChannelStatistics(
            peers=MappingProxyType(dict(self.peers)),
            num_received=self.num_received,
            num_sent=self.num_sent,
            num_refused=self.num_refused,
            faults=MappingProxyType(dict(self.faults)),
        )

    def _receive_hello(self, peer: Peer, hello: Hello) -> tuple[Message | None, Message | None]:
        reason = self._why_refused(hello)
        if reason:
            self.num_refused += 1
            return None, Refusal(reason=reason)
        self.peers[peer] = hello
        self.num_received += 1
        return hello, None

    def _why_refused(self, hello: Hello) -> str:
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
        return ""

    def _count_fault(self, peer: Peer, sentence: str) -> None:
        if peer not in self.faults and len(self.faults) >= MAX_COUNTED_PEERS:
            peer = "others"
        count = self.faults[peer].count if peer in self.faults else 0
        self.faults[peer] = Faults(count + 1, sentence)
