"""Decide when a silent actor is given up: first its groups are granted again, then it is forgotten.

The coordinator asks this at each of its ticks, and acts on the answer. Other silences are those of
a process (`supervision.silence_s`, in `processes/supervised_process.py`) and of a connection
(`CONNECTION_SILENCE_MS`, in `transport/sockets.py`).
"""

from dataclasses import dataclass

from mage_async.protocol.messages import Heartbeat, Hello

SILENCE_S = 4.0
"""An actor that sends nothing for so long is away: its groups are granted again."""
FIRST_HEARTBEAT_S = 60.0
"""The same before an actor's first heartbeat: it loads its engine first."""
LOST_INTERVALS = 30
"""An actor is forgotten after this multiple of its patience: after 2 minutes, by when the
supervisor has ended a local actor; or after 30 minutes if it never sent a heartbeat."""


@dataclass(slots=True)
class KnownPeer:
    """A peer that has said Hello."""

    hello: Hello
    last_heard: float
    """When its last message came, by the coordinator's clock."""
    heartbeat: Heartbeat | None = None
    """The last heartbeat; None before the first."""
    is_away: bool = False
    """Whether it was silent for too long: it is granted nothing until it sends a message."""

    @property
    def is_actor(self) -> bool:
        """Whether the peer plays groups; otherwise it is the evaluator."""
        return self.hello.role == "actor"

    def patience_s(self) -> float:
        """Return the seconds for which the peer may be silent."""
        return FIRST_HEARTBEAT_S if self.heartbeat is None else SILENCE_S

    def is_newly_silent(self, now: float) -> bool:
        """Return whether an actor has been silent for too long and is not marked as away yet."""
        is_expected = self.is_actor and not self.is_away
        return is_expected and now - self.last_heard > self.patience_s()

    def is_lost(self, now: float) -> bool:
        """Return whether an actor has been away for so long that it is forgotten."""
        return self.is_away and now - self.last_heard > LOST_INTERVALS * self.patience_s()
