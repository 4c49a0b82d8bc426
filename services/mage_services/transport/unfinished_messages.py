"""Messages that begin and never end: decisions only.

zmq keeps the frames of a message until the last one is there, and bounds neither their number nor
their sum. So a peer with a known key could fill the learner's memory with one message that goes on.
The kernel knows how much a connection has brought; when nothing waits to be received, what it has
brought since its last whole message is the message that is under way.
"""

from dataclasses import dataclass, field

MAX_BYTES = 64 * 2**20
"""Far above the largest message, and above what the kernel holds for zmq to read."""


@dataclass(slots=True)
class Unfinished:
    """What connections have brought, by descriptor, in bytes."""

    num_ended: int = 0
    _at_last: dict[int, int | None] = field(default_factory=dict)
    """Brought when the last whole message was seen to have come; None: one has come since."""

    def connections(self) -> list[int]:
        """Those that are watched."""
        return list(self._at_last)

    def arrived(self, connection: int) -> None:
        """A connection was made."""
        self._at_last[connection] = 0

    def finished(self, connection: int) -> None:
        """A whole message of it was received."""
        if connection in self._at_last:
            self._at_last[connection] = None

    def left(self, connection: int) -> None:
        """It has ended."""
        self._at_last.pop(connection, None)

    def brought(self, connection: int, num_bytes: int) -> bool:
        """While nothing waits: what it has brought so far; whether to end it."""
        before = self._at_last.get(connection, num_bytes)
        if before is None:
            self._at_last[connection] = before = num_bytes
        if num_bytes - before <= MAX_BYTES:
            return False
        self.left(connection)
        self.num_ended += 1
        return True
