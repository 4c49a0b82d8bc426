"""Connections, as zmq's monitors tell of them: made, ended, failed in the handshake.

A monitor is a queue of zmq's own. Its events are read between messages and while there are none,
never waited for alone; an unread monitor holds up new connections only.
"""

import time

import zmq
from zmq.utils.monitor import parse_monitor_message

from mage_async.errors import PeerRefused
from mage_services.transport.access import AccessControl
from mage_services.transport.connection_limits import SilentConnections, UnfinishedMessages
from mage_services.transport.sockets import Line, bytes_brought, cut, take_now

_EVERY_MESSAGES = 32
"""How often to look at events under a flood of messages."""
_COUNT_S = 0.5
"""Seconds between two counts of the bytes that connections have brought."""
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_WAIT_S, _NUM_WAITS = 0.25, 4
"""zmq says within a millisecond of the end of a connection that it tries again."""
MAX_FAILED_HANDSHAKES = 20
"""Failed handshakes in a row until a peer gives up: a learner that starts anew ends none."""


class LearnerLinks:
    """The connections of the learner's socket; on TCP those that say nothing are ended."""

    def __init__(self, made: Line, access: AccessControl, silent: SilentConnections) -> None:
        self._socket, self._access, self._silent = made, access, silent
        self._countdown, self._next_count = 0, 0.0
        self._unfinished = UnfinishedMessages()
        self.monitor = _monitor(made, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILED)

    def look(self) -> None:
        """Take what has happened, every so often."""
        self._countdown -= 1
        if self._countdown > 0:
            return
        self._countdown = _EVERY_MESSAGES
        now = time.monotonic()
        while (event := _next(self.monitor)) is not None:
            self._take(*event, now)
        for connection in self._silent.overdue(now=now):
            cut(connection)

    def spoke(self, identity: zmq.Frame) -> None:
        """A message has come, with the frame that names its sender."""
        connection = identity.get(zmq.SRCFD)
        self._silent.spoke(connection)
        self._unfinished.finished(connection)

    def cut(self, identity: zmq.Frame, *, now: float) -> None:
        """End the connection that a message came from, and bar its key."""
        address = str(identity.get("Peer-Address"))
        if self._access.known_keys:
            self._access.bar(str(identity.get("User-Id")).encode(), address, now=now)
        cut(identity.get(zmq.SRCFD))

    def close(self) -> None:
        """Before the socket is closed."""
        _close(self._socket, self.monitor)

    def look_at_once(self) -> None:
        """Something has happened."""
        self._countdown = 0

    def idle(self) -> None:
        """Nothing is there to receive: count what is under way, now and then."""
        now = time.monotonic()
        if now < self._next_count:
            return
        self._next_count = now + _COUNT_S
        for connection in self._unfinished.connections():
            if self._unfinished.brought(connection, bytes_brought(connection)):
                cut(connection)
                self._access.turned_away("a message that did not end")

    def _take(self, kind: int, value: int, address: str, now: float) -> None:
        if kind == zmq.EVENT_ACCEPTED and address.startswith("tcp://"):
            self._unfinished.arrived(value)
            for connection in self._silent.arrived(value, now=now):
                cut(connection)
        elif kind == zmq.EVENT_DISCONNECTED:
            self._silent.left(value)
            self._unfinished.left(value)
        elif kind & _FAILED and kind != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # the gate counts those
            self._access.turned_away(
                "a handshake that failed: no keys, or those of another learner"
            )


class PeerLink:
    """The one connection of a peer's socket.

    zmq makes a broken connection anew by itself, and says at once that it will try; but not after
    bytes that are no message of its own, or a message over the limit: then the socket would stay
    unconnected for ever without a sign. So where zmq does not say that it tries, the link asks for
    a connection again.
    """

    def __init__(self, made: Line, address: str) -> None:
        self._socket, self._address = made, address
        self._num_made = self._num_failed = 0
        self._num_waits: int | None = None
        """Waits in vain for zmq to say that it tries again; None where that is not in doubt."""
        self._is_over = False
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        events |= _FAILED
        self.monitor = _monitor(made, events)

    def look(self) -> bool:
        """Take what has happened; whether a broken TCP link was made anew.

        (A unix socket breaks with its process alone, and a new learner asks for a hello.)

        Raises:
            PeerRefused: the learner does not let this key in, or this is not its address.
        """
        is_anew = False
        while (event := _next(self.monitor)) is not None:
            is_anew |= self._take(event[0])
        return is_anew

    def patience_s(self) -> float | None:
        """How long to wait for news; None: for ever."""
        return None if self._num_waits is None else _WAIT_S

    def has_ended(self) -> bool:
        """There was no news for `patience_s`: whether zmq has given the connection up.

        Then it is the caller's to connect again. (Waits are counted, and not the time, in which
        this process may have stood still.)
        """
        if self._num_waits is None:
            return False
        self._num_waits += 1
        if self._num_waits < _NUM_WAITS:
            return False
        self._num_waits, self._is_over = None, True
        return True

    def close(self) -> None:
        """Before the socket is closed."""
        _close(self._socket, self.monitor)

    def _take(self, kind: int) -> bool:
        if kind == zmq.EVENT_CONNECT_RETRIED:
            self._num_waits = None
            return False
        if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_failed, self._num_waits = 0, None
            self._num_made += 1
            was_over, self._is_over = self._is_over, False
            return was_over or (self._num_made > 1 and self._address.startswith("tcp://"))
        if kind == zmq.EVENT_DISCONNECTED:
            self._num_waits = 0
        if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise PeerRefused(
                f"the learner at {self._address} does not let this actor's key in: it has another "
                "`actor.key`, or has just refused this actor for its rate"
            )
        self._num_failed += kind != zmq.EVENT_DISCONNECTED
        is_stranger = kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # trying again is no use
        if is_stranger or self._num_failed >= MAX_FAILED_HANDSHAKES:
            raise PeerRefused(
                f"{self._address} ends every connection in the handshake: no mage learner listens "
                "there, it has another `learner.key`, or only one side has keys"
            )
        return False


def _monitor(made: Line, events: int) -> Line:
    """A socket that gets the events of another.

    It stays registered with the loop while it lives; a blocking one would be registered anew for
    every wait.
    """
    address = f"inproc://monitor.{id(made)}"
    made.monitor(address, events)
    monitor = made.context.socket(zmq.PAIR, Line)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(address)
    return monitor


def _next(monitor: Line) -> tuple[int, int, str] | None:
    """Kind, value and address of the next event, if there is one."""
    frames = take_now(monitor)
    if frames is None:
        return None
    event = parse_monitor_message([frame.bytes for frame in frames])
    return int(event["event"]), int(event["value"]), event["endpoint"].decode()


def _close(made: Line, monitor: Line) -> None:
    if not monitor.closed:
        made.disable_monitor()
        monitor.close()
