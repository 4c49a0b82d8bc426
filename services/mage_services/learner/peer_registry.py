"""The peers that a coordinator let in: when they spoke last, and what they said."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mage_async.protocol.messages import Heartbeat, Hello
from mage_services.transport.access import Peer

SILENCE_S = 4.0
"""An actor that has not spoken for so long is away: noticed within a tick more."""
FIRST_BEAT_S = 60.0
"""From its welcome to its first heartbeat, while it makes its engine."""

LOST = 30
"""Times its patience: an actor silent for so long is taken for lost. Two minutes, by when the
supervisor has ended a local one; half an hour for one that makes its engine."""


@dataclass(slots=True)
class RegisteredPeer:
    """A peer that was let in."""

    hello: Hello
    last_heard: float
    beat: Heartbeat | None = None
    is_away: bool = False
    """Silent for too long: it is granted nothing until it speaks again."""

    def patience_s(self) -> float:
        """How long it may say nothing."""
        return FIRST_BEAT_S if self.beat is None else SILENCE_S

    def is_silent(self, now: float) -> bool:
        """An actor that has said nothing for too long, and nobody has noticed yet."""
        is_expected = self.hello.role == "actor" and not self.is_away
        return is_expected and now - self.last_heard > self.patience_s()

    def is_lost(self, now: float) -> bool:
        """An actor that is away, for so long that nobody waits for it."""
        return self.is_away and now - self.last_heard > LOST * self.patience_s()


def freest(peers: Mapping[Peer, RegisteredPeer], num_playing: Callable[[Peer], int]) -> Peer | None:
    """The actor that can take on the most groups more, if any can."""
    free = {
        peer: known.hello.credits - num_playing(peer)
        for peer, known in peers.items()
        if known.hello.role == "actor" and not known.is_away
    }
    best = max(free, key=lambda peer: free[peer], default=None)
    return best if best is not None and free[best] > 0 else None


def shares(peers: Mapping[Peer, RegisteredPeer]) -> dict[str, dict[str, float]]:
    """Seconds by state of each actor, as it last said."""
    return {
        known.hello.name: dict(known.beat.blocked_s)
        for known in peers.values()
        if known.beat is not None
    }
