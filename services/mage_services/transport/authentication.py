"""Authenticate peers on other machines by CURVE keys.

A directory of keys, as `mage keys new` makes it, in pyzmq's format:

    learner.key         the learner's public key, which every peer needs
    learner.key_secret  the learner's key pair
    actor.key           public key that the learner accepts; so is every further `*.key`
    actor.key_secret    the actors' key pair

An actor's machine needs `learner.key` and `actor.key_secret`. A peer without them is refused in the
handshake, before it reaches any of our code. A secret key is never printed, not even by `repr`. In
memory and in files keys are in Z85, ZeroMQ's text encoding: 40 characters for 32 bytes.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import zmq
import zmq.asyncio
from zmq.auth import create_certificates, load_certificate
from zmq.auth.asyncio import AsyncioAuthenticator

from mage_async.errors import ConfigError

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


def make_keys(directory: Path) -> list[Path]:
    """Make a learner's and an actor's key pair; return their files, each with mode 0600.

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
            files = [create_certificates(directory, name) for name in (LEARNER, ACTOR)]
        finally:
            os.umask(before)
    except OSError as fault:
        raise ConfigError(f"{directory}: no keys can be written: {fault.strerror}") from fault
    return [Path(file) for pair in files for file in pair]


def learner_keys(directory: Path) -> LearnerKeys:
    """Read the learner's keys from a directory.

    Raises:
        ConfigError: the learner's secret key or every actor's public key is missing, others can
            read a secret key or write a public one, or a file holds another key than its name says.
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
