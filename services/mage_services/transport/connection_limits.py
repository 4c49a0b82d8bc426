"""Which connections to end: those that say nothing, and those whose message never ends.

Decisions only; both classes know connections by descriptor, and `connections.py` feeds them.

A connection costs a descriptor before its handshake, so a host that can reach the port could use up
those the journal needs. `SilentConnections` lets at most `MAX_SILENT` wait; a further one ends the
oldest. A peer of ours says hello within milliseconds, and comes again if it was ended in a flood.

zmq keeps the frames of a message until the last one is there, and bounds neither their number nor
their sum. So a peer with a known key could fill the learner's memory with one message that goes on.
The kernel knows how much a connection has brought; when nothing waits to be received, what it has
brought since its last whole message is the message under way, which `UnfinishedMessages` bounds.
"""

from dataclasses import dataclass, field

MAX_SILENT = 64
PATIENCE_S = 10.0
MAX_BYTES = 64 * 2**20
"""Far above the largest message, and above what the kernel holds for zmq to read."""


@dataclass(slots=True)
class SilentConnections:
    """Connections by descriptor, oldest first."""

    num_ended: int = 0
    """Connections ended because they were too many, or silent for too long."""
    _since: dict[int, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._since)

    def arrived(self, connection: int, *, now: float) -> list[int]:
        """A connection was made; which ones to end."""
        self._since.pop(connection, None)
        self._since[connection] = now
        return self._end(list(self._since)[:-MAX_SILENT])

    def spoke(self, connection: int) -> None:
        """A message of it has arrived: it waits no longer."""
        self._since.pop(connection, None)

    def left(self, connection: int) -> None:
        """The connection has ended."""
        self._since.pop(connection, None)

    def overdue(self, *, now: float) -> list[int]:
        """Which ones to end for having said nothing."""
        late = [one for one, since in self._since.items() if now - since > PATIENCE_S]
        return self._end(late)

    def _end(self, connections: list[int]) -> list[int]:
        for connection in connections:
            del self._since[connection]
        self.num_ended += len(connections)
        return connections


@dataclass(slots=True)
class UnfinishedMessages:
    """What connections have brought, by descriptor, in bytes."""

    num_ended: int = 0
    _at_last: dict[int, int | None] = field(default_factory=dict)
    """Brought when the last whole message was seen to have come; None: one has come since."""

    def connections(self) -> list[int]:
        """Connections that are watched."""
        return list(self._at_last)

    def arrived(self, connection: int) -> None:
        """A connection was made."""
        self._at_last[connection] = 0

    def finished(self, connection: int) -> None:
        """A whole message of it was received."""
        if connection in self._at_last:
            self._at_last[connection] = None

    def left(self, connection: int) -> None:
        """The connection has ended."""
        self._at_last.pop(connection, None)

    def brought(self, connection: int, num_bytes: int) -> bool:
        """Take the bytes brought so far, while nothing waits; whether to end the connection."""
        before = self._at_last.get(connection, num_bytes)
        if before is None:
            self._at_last[connection] = before = num_bytes
        if num_bytes - before <= MAX_BYTES:
            return False
        self.left(connection)
        self.num_ended += 1
        return True
