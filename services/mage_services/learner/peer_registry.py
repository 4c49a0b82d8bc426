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
"""An actor is dropped after so many silent intervals (`patience_s`): two minutes, by when the
supervisor has ended a local actor; half an hour for an actor that makes its engine."""


@dataclass(slots=True)
class RegisteredPeer:
    """A peer that was let in."""

    hello: Hello
    last_heard: float
    beat: Heartbeat | None = None
    is_away: bool = False
    """Silent for too long: it is granted nothing until it speaks again."""

    def patience_s(self) -> float:
        """Seconds that the peer may be silent: one silent interval."""
        return FIRST_BEAT_S if self.beat is None else SILENCE_S

    def is_silent(self, now: float) -> bool:
        """Whether an actor has been silent for too long and is not marked as away yet."""
        is_expected = self.hello.role == "actor" and not self.is_away
        return is_expected and now - self.last_heard > self.patience_s()

    def is_lost(self, now: float) -> bool:
        """Whether an actor has been away for `LOST` silent intervals."""
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
