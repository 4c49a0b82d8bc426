"""What hostile peers cost an honest one: `python bench/peers.py` (3 min), from a checkout's root.

A learner's channel on TCP with keys answers one honest actor, in a process of its own, that sends
trials of 2,048 tokens with 16 credits as fast as they are acknowledged. Windows without and with an
attack alternate; an attack runs in a process of low priority, so that what is compared is the work
it makes and not the processor it burns. The flooding ones have a known key, a new one a window: the
one before is barred. Measured are the honest actor's trials a second with the attack over those
without, the median of the pairs, and what the learner's channel took from the attackers.

The last line is the verdict, and the exit status 1 where an attack costs 5 % or more, the honest
actor is refused, or a peer without a known key gets a message in.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import zmq
from baseline import write_baseline

from mage_async.policy_version import VersionRun
from mage_async.rates import Allowance, Rate
from mage_async.trajectory import Segment, Task, Trial
from mage_async.wire import Acknowledge, Heartbeat, Hello, TrialResult, encode
from mage_services.channel import LearnerChannel, PeerChannel
from mage_services.curve import actor_keys, learner_keys, make_keys

NUM_PAIRS, WINDOW_S, SETTLE_S = 5, 1.6, 0.3
NUM_TOKENS, CREDITS = 2048, 16
NICENESS = 5
"""Of attackers; the learner and the honest actor run at -10 where that is allowed. What is measured
is the work that they make for others, and not the processor they burn."""
ALLOWANCE = Allowance(messages=Rate(5_000, 6_000))
"""The default rate with less at once, so that a flood is over it within a window."""
LEAST_RATIO = 0.95
NUM_HALF_OPEN = 1000
HELLO = Hello(role="actor", name="honest", build="b", config_digest="c", credits=CREDITS)
BEAT = Heartbeat(name="flood", counters={}, blocked_s={})


def example(index: int) -> TrialResult:
    """A trial of one segment."""
    source = np.random.default_rng(0)
    segment = Segment(
        source.integers(0, 50_000, NUM_TOKENS, dtype=np.int32),
        np.ones(NUM_TOKENS, bool),
        -source.random(NUM_TOKENS, dtype=np.float32),
        (VersionRun(0, 0, 0),),
    )
    return TrialResult(1, 0, Trial(Task("rps", "cycle-1", 5), index, 1, (segment,), ()))


async def be_honest(address: str, keys: Path) -> None:
    """Send trials for as long as they are acknowledged."""
    result = example(0)
    with PeerChannel(address, HELLO, keys=actor_keys(keys)) as channel:
        for _ in range(CREDITS):
            await channel.send(result)
        while True:
            await channel.receive()
            await channel.send(result)


def dealer(address: str, keys: Path | None, server: bytes = b"") -> zmq.Socket:
    """A socket that does as it likes, with or without keys."""
    made = zmq.Context.instance().socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.SNDTIMEO, 50)
    if keys is not None:
        pair = actor_keys(keys)
        made.curve_publickey, made.curve_secretkey = pair.public, pair.secret
        made.curve_serverkey = server or pair.learner
    made.setsockopt(zmq.ROUTING_ID, f"flood/{secrets.token_hex(4)}".encode())
    made.connect(address)
    return made


def flood(address: str, keys: Path | None, server: bytes, frames: list[bytes]) -> None:
    """Send the same message for ever; a socket that stays stuck is made anew."""
    made, stuck = dealer(address, keys, server), 0
    made.send_multipart(encode(HELLO_OF_FLOOD))
    while True:
        try:
            made.send_multipart(frames)
            stuck = 0
        except zmq.Again:
            stuck += 1
        if stuck >= 4:
            made.close()
            made, stuck = dealer(address, keys, server), 0


HELLO_OF_FLOOD = Hello(role="actor", name="flood", build="b", config_digest="c", credits=1)


def hold_half_open(address: str) -> None:
    """Open raw connections that say nothing, and again those that were ended, for ever."""
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


def attack(kind: str, address: str, keys: Path) -> None:
    """Never returns."""
    beat, oversize = [bytes(f) for f in encode(BEAT)], [bytes(3 * 2**20)]
    learner = actor_keys(keys).learner
    stranger = keys.parent / "stranger"
    ways = {
        "no keys": lambda: flood(address, None, b"", beat),
        "wrong keys": lambda: flood(address, stranger, learner, beat),
        "garbage": lambda: flood(address, keys, b"", [b"garbage" * 100]),
        "oversize": lambda: flood(address, keys, b"", oversize),
        "too many": lambda: flood(address, keys, b"", beat),
        f"half-open x {NUM_HALF_OPEN:,}": lambda: hold_half_open(address),
    }
    print("ready", flush=True)
    sys.stdin.readline()
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    ways[kind]()


KINDS = (
    "no keys",
    "wrong keys",
    "garbage",
    "oversize",
    "too many",
    f"half-open x {NUM_HALF_OPEN:,}",
)


class Bench:
    """The learner's side: takes, acknowledges and counts."""

    def __init__(self, channel: LearnerChannel, folder: Path) -> None:
        self.channel, self.folder = channel, folder
        self.num_honest = self.num_hostile = 0
        self.has_begun = asyncio.Event()

    async def serve(self) -> None:
        """Acknowledge honest trials for ever."""
        answer = Acknowledge(grant=1, epoch=0, trial=0, is_duplicate=False)
        while True:
            peer, message = await self.channel.receive()
            if not peer.startswith("honest/"):
                self.num_hostile += 1
            elif isinstance(message, TrialResult):
                self.num_honest += 1
                self.has_begun.set()
                self.channel.send(peer, answer)

    async def window(self) -> float:
        """Honest trials a second, over a window."""
        before, began = self.num_honest, time.perf_counter()
        await asyncio.sleep(WINDOW_S)
        return (self.num_honest - before) / (time.perf_counter() - began)

    async def pair(self, kind: str, number: int) -> tuple[float, float, int]:
        """A quiet window, one under attack, and how many hostile messages came in."""
        keys = self.folder / f"pair{number}"  # known, and not barred yet
        process = begin("--attack", kind, self.channel.address, str(keys))
        assert process.stdout is not None
        assert process.stdin is not None
        await asyncio.to_thread(process.stdout.readline)
        quiet, before = await self.window(), self.num_hostile
        process.stdin.write("go\n")
        process.stdin.flush()
        attacked = await self.window()
        process.kill()
        process.wait()
        await asyncio.sleep(SETTLE_S)
        return quiet, attacked, self.num_hostile - before


def begin(*arguments: str) -> subprocess.Popen[str]:
    """Start a process of this script."""
    command = [sys.executable, __file__, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def prepare(folder: Path) -> tuple[Path, int]:
    """Keys of the learner, of an honest actor, of each attack, and of a stranger."""
    keys, count = folder / "keys", NUM_PAIRS * len(KINDS)
    make_keys(keys)
    make_keys(folder / "stranger")
    for number in range(count):
        pair = folder / f"pair{number}"
        make_keys(pair)
        shutil.copy2(pair / "actor.key", keys / f"pair{number}.key")
        shutil.copy2(keys / "learner.key", pair / "learner.key")
        (pair / "learner.key_secret").unlink()
    return keys, count


async def measure(folder: Path) -> dict[str, Any]:
    """All attacks in turn; figures by attack."""
    keys, _ = prepare(folder)
    rows: dict[str, Any] = {kind: {"pairs": [], "messages_in": 0} for kind in KINDS}
    with LearnerChannel(
        "tcp://127.0.0.1:0",
        build="b",
        config_digest="c",
        keys=learner_keys(keys),
        allowance=ALLOWANCE,
    ) as channel:
        bench = Bench(channel, folder)
        honest = begin("--honest", channel.address, str(keys))
        serving = asyncio.create_task(bench.serve())
        await bench.has_begun.wait()
        await bench.window()  # warm
        for round_ in range(NUM_PAIRS):
            for number, kind in enumerate(KINDS):
                quiet, attacked, num = await bench.pair(kind, round_ * len(KINDS) + number)
                rows[kind]["pairs"].append((quiet, attacked))
                rows[kind]["messages_in"] += num
        statistics_ = channel.statistics()
        is_served = any(peer.startswith("honest/") for peer in statistics_.peers)
        serving.cancel()
        honest.kill()
        honest.wait()
    return {
        "attacks": rows,
        "honest_is_served": is_served,
        "turned_away": statistics_.num_turned_away,
        "refused": statistics_.num_refused,
        "malformed": statistics_.num_malformed(),
        "notes": channel.take_notes(),
    }


def conclude(figures: dict[str, Any]) -> bool:
    """Print the table, write the figures; whether every attack was kept out."""
    print(f"{'attack':<20} {'quiet/s':>8} {'attacked/s':>10} {'ratio':>6}  least … most   got in")
    is_good = figures["honest_is_served"]
    for kind, row in figures["attacks"].items():
        ratios = [attacked / quiet for quiet, attacked in row["pairs"]]
        quiet, attacked = (statistics.median(side) for side in zip(*row["pairs"], strict=True))
        row |= {"ratio": statistics.median(ratios), "ratios": ratios}
        spread = f"{min(ratios):.3f} … {max(ratios):.3f}"
        print(
            f"{kind:<20} {quiet:>8,.0f} {attacked:>10,.0f} {row['ratio']:>6.3f}  {spread}  "
            f"{row['messages_in']:,} messages"
        )
        is_good &= row["ratio"] > LEAST_RATIO
        is_good &= not (kind in ("no keys", "wrong keys") and row["messages_in"])
    print(
        f"turned away {figures['turned_away']:,}, refused {figures['refused']:,}, "
        f"malformed {figures['malformed']:,}"
    )
    sizes = {"window_s": WINDOW_S, "credits": CREDITS, "niceness_of_attackers": NICENESS}
    write_baseline("peers", sizes | figures)
    worst = min(row["ratio"] for row in figures["attacks"].values())
    kept = "kept out" if is_good else "NOT kept out"
    print(f"{kept}: the honest actor keeps {worst:.1%} at worst")
    return is_good


def main() -> None:
    """Measure, or be one of the processes that it starts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--attack", nargs=3, metavar=("KIND", "ADDRESS", "KEYS"))
    parser.add_argument("--honest", nargs=2, metavar=("ADDRESS", "KEYS"))
    given = parser.parse_args()
    if given.attack:
        attack(given.attack[0], given.attack[1], Path(given.attack[2]))
    elif given.honest:
        uvloop.run(be_honest(given.honest[0], Path(given.honest[1])))
    else:
        with tempfile.TemporaryDirectory() as folder:
            figures = uvloop.run(measure(Path(folder)))
        sys.exit(not conclude(figures))


if __name__ == "__main__":
    main()
