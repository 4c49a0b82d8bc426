"""CURVE keys: authentication of peers on other machines.

A directory of keys, as `mage keys new` makes it, in pyzmq's own format:

    learner.key         the learner's public key: for every peer that connects
    learner.key_secret  for the learner alone
    actor.key           a public key the learner lets in; every further `*.key` beside it is another
    actor.key_secret    for the actors

An actor's machine needs `learner.key` and `actor.key_secret`. A peer without them is turned away in
the handshake and reaches none of our code. A secret key is never printed, not even by `repr`.
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
_DOMAIN = "mage"
Keys = TypeVar("Keys", "LearnerKeys", "PeerKeys")


@dataclass(frozen=True, slots=True)
class LearnerKeys:
    """The learner's pair, and the public keys of those it lets in (Z85)."""

    public: bytes
    secret: bytes = field(repr=False)
    known: frozenset[bytes]

    def apply(self, made: zmq.asyncio.Socket) -> None:
        """Before the socket is bound."""
        made.setsockopt(zmq.CURVE_SERVER, 1)
        made.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        made.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)


@dataclass(frozen=True, slots=True)
class PeerKeys:
    """An actor's pair, and the learner's public key (Z85)."""

    public: bytes
    secret: bytes = field(repr=False)
    learner: bytes

    def apply(self, made: zmq.asyncio.Socket) -> None:
        """Before the socket is connected."""
        made.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        made.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        made.setsockopt(zmq.CURVE_SERVERKEY, self.learner)


class Gate(AsyncioAuthenticator):
    """Answers zmq's question whether a key may come in: ZAP, RFC 27.

    Its task lives from `start` to `stop`, on the loop that is running then.
    """

    def __init__(
        self, context: zmq.asyncio.Context, may_enter: Callable[[bytes, str], bool]
    ) -> None:
        """`may_enter(public key, address)` decides."""
        super().__init__(context)
        self._may_enter = may_enter
        self._address = ""
        self.configure_curve_callback(_DOMAIN, self)

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """One question; they are answered one after the other."""
        self._address = msg[3].decode("latin-1") if len(msg) > 3 else ""
        await super().handle_zap_message(msg)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the key may come in from where it comes."""
        return self._may_enter(key, self._address)


def keys_in(read: Callable[[Path], Keys], directory: str) -> Keys | None:
    """The keys of a configuration's `transport.keys`; None where it names no directory."""
    return read(Path(directory)) if directory else None


def make_keys(directory: Path) -> list[Path]:
    """Make a learner's and an actor's pair; the files, each with mode 0600.

    Raises:
        ConfigError: there are keys already, or the directory cannot be written.
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
    """What a learner needs of a directory of keys.

    Raises:
        ConfigError: a file is missing, can be read by others, or is another one than its name says.
    """
    public, secret = _pair(directory, LEARNER)
    others = [file for file in sorted(directory.glob("*.key")) if file.stem != LEARNER]
    known = frozenset(_public(file) for file in others)
    if not known:
        raise ConfigError(f"{directory} holds no actor's public key (`actor.key`): nobody may come")
    if public in known:
        raise ConfigError(f"{directory}: an actor's public key is the learner's own: swapped files")
    return LearnerKeys(public, secret, known)


def actor_keys(directory: Path) -> PeerKeys:
    """What an actor needs of a directory of keys.

    Raises:
        ConfigError: as `learner_keys`.
    """
    public, secret = _pair(directory, ACTOR)
    learner = _public(directory / f"{LEARNER}.key")
    if public == learner:
        raise ConfigError(f"{directory}: actor.key_secret is the learner's: swapped files")
    return PeerKeys(public, secret, learner)


def _pair(directory: Path, name: str) -> tuple[bytes, bytes]:
    file = directory / f"{name}.key_secret"
    public, secret = _read(file)
    if file.stat().st_mode & 0o077:
        raise ConfigError(f"{file} can be read by others: chmod 600 it, or make new keys")
    if secret is None:
        raise ConfigError(f"{file} holds a public key alone: the files of the pair are swapped")
    if zmq.curve_public(secret) != public:
        raise ConfigError(f"{file}: its two keys do not belong together; make new keys")
    beside = directory / f"{name}.key"
    if beside.exists() and _public(beside) != public:
        raise ConfigError(f"{file} and {beside.name} are of two pairs: make new keys")
    return public, secret


def _public(file: Path) -> bytes:
    public, secret = _read(file)
    if secret is not None:
        raise ConfigError(f"{file} holds a secret key: the files of the pair are swapped")
    if file.stat().st_mode & 0o022:
        raise ConfigError(f"{file} can be written by others: chmod 600 it")
    return public


def _read(file: Path) -> tuple[bytes, bytes | None]:
    if not file.is_file():
        raise ConfigError(f"{file} is missing: make keys with `mage keys new DIR`")
    try:
        public, secret = load_certificate(file)
    except PermissionError:
        raise ConfigError(f"{file} cannot be read: Permission denied") from None
    except ValueError:
        raise ConfigError(f"{file} is no key file: make keys with `mage keys new DIR`") from None
    if any(key is not None and not _is_key(key) for key in (public, secret)):
        raise ConfigError(f"{file} is damaged: a key has 40 characters of Z85; make new keys")
    return public, secret


def _is_key(key: bytes) -> bool:
    try:
        zmq.curve_public(key)  # reads any key that is 32 bytes in Z85
    except (ValueError, zmq.ZMQError):
        return False
    return True
