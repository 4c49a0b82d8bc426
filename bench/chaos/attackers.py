"""The hostile peers that `bench.chaos.peers` starts.

Each line of this program's input begins an attack, the next line ends the attack. A line names the
kind and, after a tab, the directory of the keys. An attack is a child process, forked before zmq
has started any thread.
"""

import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from mage_async.protocol.codec import encode
from mage_async.protocol.messages import Heartbeat, Hello
from mage_async.protocol.trial_header import DEFAULT_LIMITS, Frame
from mage_services.transport.authentication import actor_keys

NUM_HALF_OPEN = 1000
FLOOD, SILENT, NOBODY = "too many", "sends nothing", "no attacker"
HELLO = Hello(role="actor", name="flood", build="b", config_digest="c", credits=1)
BEAT = Heartbeat(name="flood", counters={}, blocked_s={})


def dealer(address: str, keys: Path | None, server: bytes = b"") -> zmq.Socket[bytes]:
    """A socket that keeps no rule of the protocol, with or without keys."""
    made = zmq.Context.instance().socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.SNDTIMEO, 50)
    made.setsockopt(zmq.SNDHWM, 16)
    if keys is not None:
        pair = actor_keys(keys)
        made.curve_publickey, made.curve_secretkey = pair.public, pair.secret
        made.curve_serverkey = server or pair.learner
    made.setsockopt(zmq.ROUTING_ID, f"flood/{secrets.token_hex(4)}".encode())
    made.connect(address)
    return made


def flood(
    address: str, keys: Path | None, frames: Sequence[Frame | zmq.Frame], server: bytes = b""
) -> None:
    """Send the same message for ever; a socket that stays stuck is made anew."""
    made, stuck = dealer(address, keys, server), 0
    made.send_multipart(encode(HELLO))
    while True:
        try:
            made.send_multipart(frames)
            stuck = 0
        except zmq.Again:
            stuck += 1
        if stuck >= 4:
            made.close()
            made, stuck = dealer(address, keys, server), 0


def hold_half_open(address: str) -> None:
    """Open raw connections that say nothing, and a tenth of them anew ten times a second."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    held: list[socket.socket] = []
    while True:
        for one in held[: len(held) // 10]:
            one.close()
        del held[: len(held) // 10]
        while len(held) < NUM_HALF_OPEN:
            one = socket.socket()
            one.settimeout(1.0)
            with contextlib.suppress(OSError):
                one.connect((host, int(port)))
            held.append(one)
        time.sleep(0.1)


def without_keys(address: str, keys: Path) -> None:
    """A peer without keys."""
    flood(address, None, encode(BEAT))


def with_wrong_keys(address: str, keys: Path) -> None:
    """A peer whose key is not known."""
    flood(address, keys.parent / "stranger", encode(BEAT), actor_keys(keys).learner)


def with_garbage(address: str, keys: Path) -> None:
    """A known key, and what is no message."""
    flood(address, keys, [b"garbage" * 100])


def with_oversize(address: str, keys: Path) -> None:
    """A known key, and frames over the limit, which take no copying to send."""
    flood(address, keys, [zmq.Frame(bytes(DEFAULT_LIMITS.max_frame_bytes() + 1), copy=False)])


def with_too_many(address: str, keys: Path) -> None:
    """A known key, and sound messages, too many."""
    flood(address, keys, encode(BEAT))


def half_open(address: str, keys: Path) -> None:
    """A thousand raw connections that say nothing."""
    hold_half_open(address)


def sends_nothing(address: str, keys: Path) -> None:
    """Keeps the processor as busy as an attack does, and sends nothing."""
    while True:
        encode(BEAT)


def no_attacker(address: str, keys: Path) -> None:
    """Leaves the processor idle."""
    signal.pause()


WAYS: dict[str, Callable[[str, Path], None]] = {
    "no keys": without_keys,
    "wrong keys": with_wrong_keys,
    "garbage": with_garbage,
    "oversize": with_oversize,
    FLOOD: with_too_many,
    f"half-open x {NUM_HALF_OPEN:,}": half_open,
    SILENT: sends_nothing,
    NOBODY: no_attacker,
}


def main() -> None:
    """Attack the address given as the input says."""
    address = sys.argv[1]
    print("ready", flush=True)
    for line in sys.stdin:
        kind, _, keys = line.rstrip("\n").partition("\t")
        child = os.fork()
        if child == 0:
            WAYS[kind](address, Path(keys))
        sys.stdin.readline()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print("over", flush=True)


if __name__ == "__main__":
    main()
