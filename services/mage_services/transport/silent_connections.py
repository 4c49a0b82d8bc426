"""Connections that have been made and have not said anything: decisions only.

A connection costs a descriptor before its handshake, so whoever can reach the port could use up
those the journal needs. Here at most `MAX_STRANGERS` wait; a further one ends the oldest. A peer of
ours says hello within milliseconds, and comes again if it was ended among a flood.
"""

from dataclasses import dataclass, field

MAX_STRANGERS = 64
PATIENCE_S = 10.0


@dataclass(slots=True)
class Lobby:
    """Connections by descriptor, oldest first."""

    num_ended: int = 0
    """For being too many, or silent for too long."""
    _since: dict[int, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._since)

    def arrived(self, connection: int, *, now: float) -> list[int]:
        """A connection was made; which ones to end."""
        self._since.pop(connection, None)
        self._since[connection] = now
        return self._end(list(self._since)[:-MAX_STRANGERS])

    def spoke(self, connection: int) -> None:
        """A message of it has arrived: it waits no longer."""
        self._since.pop(connection, None)

    def left(self, connection: int) -> None:
        """It has ended."""
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
