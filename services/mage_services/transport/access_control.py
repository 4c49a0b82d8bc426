"""Decide which peers may connect to the learner: by their CURVE keys (`Gate`), if they may be on
other machines, and by their build and configuration (`AccessControl`).

A directory of keys, as `mage keys new` makes it, in pyzmq's format:

    learner.key         the learner's public key, which every peer needs
    learner.key_secret  the learner's key pair
    actor.key           public key that the learner accepts, as it accepts every further `*.key`
    actor.key_secret    the actors' key pair

An actor's machine needs `learner.key` and `actor.key_secret`. A peer without them is refused in the
handshake, before it reaches any of our code. A secret key is never printed, not even by `repr`. In
memory and in files keys are in Z85, ZeroMQ's text encoding: 40 characters for 32 bytes.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import zmq
import zmq.asyncio
from zmq.auth import create_certificates, load_certificate
from zmq.auth.asyncio import AsyncioAuthenticator

from mage_async.errors import ConfigError, WireError
from mage_async.protocol.codec import decode
from mage_async.protocol.messages import Goodbye, Hello, Message, Refusal, WhoAreYou
from mage_async.protocol.trial_arrays import Frame

Peer = str
"""Name of one connection of one process: `actor-0/5e2c81d0`. A restarted process is a new peer."""

MAX_REMEMBERED_PEERS = 8192
"""Largest number of unknown peers, and of peers with malformed messages, that are recorded by name.
"""
LEARNER, ACTOR = "learner", "actor"
"""Names of the key files of the learner and of the actors."""
_DOMAIN = "mage"
"""Name under which zmq asks for the decision on a connection's keys."""
Keys = TypeVar("Keys", "LearnerKeys", "PeerKeys")


@dataclass(frozen=True, slots=True)
class LearnerKeys:
    """Hold the learner's key pair, and the peers' public keys that it accepts, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    known: frozenset[bytes]
    """Public keys of the peers that may connect."""

    def apply(self, socket: zmq.asyncio.Socket) -> None:
        """Set the keys on a socket; call before it is bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)


@dataclass(frozen=True, slots=True)
class PeerKeys:
    """Hold an actor's key pair, and the learner's public key, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    learner: bytes

    def apply(self, socket: zmq.asyncio.Socket) -> None:
        """Set the keys on a socket; call before it is connected."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.learner)


class Gate(AsyncioAuthenticator):
    """Answer zmq's requests whether a public key may connect (ZAP, RFC 27).

    Its task lives from `start` to `stop`, on the event loop that runs `start`.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        known: frozenset[bytes],
        turn_away: Callable[[str], None],
    ) -> None:
        """Accept the `known` keys; call `turn_away(address)` for each connection with another
        key.
        """
        super().__init__(context)
        self._known, self._turn_away = known, turn_away
        self._address = ""
        """Address of the connection whose key is being checked."""
        self.configure_curve_callback(_DOMAIN, self)  # pyzmq then calls `callback` for every key

    def start(self) -> None:
        """Begin to answer on the running event loop."""
        self._loop = asyncio.get_running_loop()
        super().start()

    def stop(self) -> None:
        """End the task, and close its socket."""
        # pyzmq closes the socket before the event loop forgets it, and libuv aborts the process if
        # it has to watch a socket that is closed.
        if self.zap_socket and not self._loop.is_closed():
            self._loop.remove_reader(self.zap_socket.FD)
        super().stop()

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """Answer one request; pyzmq handles them one after the other."""
        # Frame 3 of a ZAP request is the address of the peer.
        self._address = msg[3].decode("latin-1") if len(msg) > 3 else ""
        await super().handle_zap_message(msg)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the key may connect."""
        if key not in self._known:
            self._turn_away(self._address)
        return key in self._known


def keys_in(read: Callable[[Path], Keys], directory: str) -> Keys | None:
    """Read the keys of `transport.keys`, or return None if it names no directory."""
    return read(Path(directory)) if directory else None


def make_keys(directory: Path) -> None:
    """Make a learner's and an actor's key pair, in files with mode 0600.

    Raises:
        ConfigError: the directory holds keys already, or cannot be written.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        present = sorted(directory.glob("*.key*"))
        if present:
            raise ConfigError(
                f"{directory} holds {present[0].name} already: choose another directory, or "
                "delete its keys"
            )
        before = os.umask(0o077)
        try:
            for name in (LEARNER, ACTOR):
                create_certificates(directory, name)
        finally:
            os.umask(before)
    except OSError as fault:
        raise ConfigError(f"{directory}: no keys can be written: {fault.strerror}") from fault


def learner_keys(directory: Path) -> LearnerKeys:
    """Read the learner's keys from a directory.

    Raises:
        ConfigError: the learner's secret key is missing, there is no public key of an actor, other
            users can read a secret key or write a public one, or a file holds another key than its
            name says.
    """
    public, secret = _pair(directory, LEARNER)
    others = [file for file in sorted(directory.glob("*.key")) if file.stem != LEARNER]
    known = frozenset(_public(file) for file in others)
    if not known:
        raise ConfigError(
            f"{directory} holds no actor's public key (`actor.key`): no actor may connect"
        )
    if public in known:
        raise ConfigError(f"{directory}: an actor's public key is the learner's own: swapped files")
    return LearnerKeys(public, secret, known)


def actor_keys(directory: Path) -> PeerKeys:
    """Read an actor's keys from a directory.

    Raises:
        ConfigError: as for `learner_keys`.
    """
    public, secret = _pair(directory, ACTOR)
    learner = _public(directory / f"{LEARNER}.key")
    if public == learner:
        raise ConfigError(f"{directory}: actor.key_secret is the learner's: swapped files")
    return PeerKeys(public, secret, learner)


def _pair(directory: Path, name: str) -> tuple[bytes, bytes]:
    """Return a public and a secret key from `name.key_secret`; raise if they do not match."""
    file = directory / f"{name}.key_secret"
    public, secret = _read(file)
    if file.stat().st_mode & 0o077:
        raise ConfigError(f"{file} can be read by others: chmod 600 it, or make new keys")
    if secret is None:
        raise ConfigError(f"{file} holds a public key alone: the files of the pair are swapped")
    if zmq.curve_public(secret) != public:
        raise ConfigError(f"{file}: its two keys do not belong together; make new keys")
    public_file = directory / f"{name}.key"
    if public_file.exists() and _public(public_file) != public:
        raise ConfigError(f"{file} and {public_file.name} are of two pairs: make new keys")
    return public, secret


def _public(file: Path) -> bytes:
    """Return the public key of a file; raise if the file has a secret key or others can write
    it.
    """
    public, secret = _read(file)
    if secret is not None:
        raise ConfigError(f"{file} holds a secret key: the files of the pair are swapped")
    if file.stat().st_mode & 0o022:
        raise ConfigError(f"{file} can be written by others: chmod 600 it")
    return public


def _read(file: Path) -> tuple[bytes, bytes | None]:
    """Return the public and the secret key of a file in Z85; the second is None in a public
    file.
    """
    try:
        # Python before 3.14 raises PermissionError here if the directory cannot be entered.
        if not file.is_file():
            raise ConfigError(f"{file} is missing: make keys with `mage keys new DIR`")
        public, secret = load_certificate(file)
    except PermissionError:
        raise ConfigError(f"{file} cannot be read: Permission denied") from None
    except ValueError:
        raise ConfigError(f"{file} is no key file: make keys with `mage keys new DIR`") from None
    if any(key is not None and not _is_key(key) for key in (public, secret)):
        raise ConfigError(f"{file} is damaged: a key has 40 characters of Z85; make new keys")
    return public, secret


def _is_key(key: bytes) -> bool:
    """Return whether a key is 32 bytes in Z85."""
    try:
        zmq.curve_public(key)  # accepts every key of the right length and alphabet
    except (ValueError, zmq.ZMQError):
        return False
    return True


class Verdict(NamedTuple):
    """Say what to do with the frames of a peer; both fields are None if the frames are ignored."""

    message: Message | None = None
    """Message to deliver to the learner."""
    answer: Message | None = None
    """Message to send back to the peer."""


@dataclass(slots=True)
class AccessControl:
    """Decide which frames that arrive at the learner are delivered. Nothing here waits or sends.

    A peer is let in with a Hello of the learner's own build and configuration. An unknown peer that
    sends anything else receives one `WhoAreYou`. So a restarted learner finds its peers again: each
    answers with a Hello, and after the Welcome sends again whatever was not acknowledged.

    A malformed message is counted and ignored; the first one of each peer is reported.
    """

    build: str
    config_digest: str
    peers: dict[Peer, Hello] = field(default_factory=dict)
    """Peers that were let in."""
    faults: Counter[Peer] = field(default_factory=Counter)
    """Number of malformed messages by peer; those of peers over `MAX_REMEMBERED_PEERS` under
    "others"."""
    num_turned_away: int = 0
    """Number of connections with an unknown key."""
    _questioned: dict[Peer, None] = field(default_factory=dict)
    """Unknown peers that received a `WhoAreYou` and have not answered, oldest first."""
    _notes: list[str] = field(default_factory=list)
    """Sentences for the screen that `take_notes` has not returned yet."""

    def receive(self, peer: Peer, frames: Sequence[Frame]) -> Verdict:
        """Decide what to do with a peer's frames."""
        try:
            message = decode(frames)
        except WireError as fault:
            self._count_fault(peer, str(fault))
            return Verdict()
        if isinstance(message, Hello):
            return self._receive_hello(peer, message)
        if peer not in self.peers:
            is_ignored = peer in self._questioned or isinstance(message, Goodbye)
            return Verdict() if is_ignored else Verdict(answer=WhoAreYou())
        if isinstance(message, Goodbye):
            self.forget(peer)
        return Verdict(message)

    def turn_away(self, address: str) -> None:
        """Count a connection with an unknown key; report the 1st, 10th, 100th, …"""
        self.num_turned_away += 1
        count = str(self.num_turned_away)
        # Only 1, 10, 100, … are "1" without their zeros.
        if count.strip("0") == "1":
            self._note(
                f"{count}. connection turned away, from {address}: it has no key that this "
                "learner knows"
            )

    def sent(self, peer: Peer, message: Message) -> None:
        """Record that a message was sent: a peer that received a `WhoAreYou` gets no second one."""
        if isinstance(message, WhoAreYou):
            self._questioned[peer] = None
            if len(self._questioned) > MAX_REMEMBERED_PEERS:
                del self._questioned[next(iter(self._questioned))]

    def forget(self, peer: Peer) -> None:
        """Forget a peer: it must say hello before its next message is delivered."""
        self.peers.pop(peer, None)
        self._questioned.pop(peer, None)

    def take_notes(self) -> list[str]:
        """Return the sentences for the screen since the last call, at most the latest 20."""
        notes, self._notes = self._notes, []
        return notes

    def _receive_hello(self, peer: Peer, hello: Hello) -> Verdict:
        """Accept a peer of the same build and configuration, and refuse any other."""
        self._questioned.pop(peer, None)
        reason = ""
        if hello.build != self.build:
            reason = (
                f"is build {hello.build}, the learner {self.build}: run both from one install; if "
                "that was edited while the run goes on, undo the edit, or end the run and resume it"
            )
        elif (theirs := hello.config_digest) != (own := self.config_digest):
            reason = (
                f"has configuration {theirs}, the learner {own}: start both from one run directory"
            )
        if reason:
            return Verdict(answer=Refusal(reason=f"{hello.name} {reason}"))
        self.peers[peer] = hello
        return Verdict(hello)

    def _count_fault(self, peer: Peer, reason: str) -> None:
        """Count a malformed message, and report the first one of each peer."""
        if peer not in self.faults and len(self.faults) >= MAX_REMEMBERED_PEERS:
            peer = "others"
        if peer not in self.faults:
            self._note(f"{peer} sent a malformed message, which is ignored: {reason}"[:500])
        self.faults[peer] += 1

    def _note(self, sentence: str) -> None:
        """Add a sentence for the screen; of more than 20 the latest ones are kept."""
        self._notes = [*self._notes[-19:], sentence]
