"""What hostile peers cost an honest one: `python bench/peers.py` (3 min), from a checkout's root.

A learner's channel on TCP with keys answers one honest actor, in a process of its own, that sends
trials of 2,048 tokens with 16 credits as fast as they are acknowledged. Windows without and with an
attack alternate. What is compared is the work that an attack makes for the learner, and not the
processor that it burns, which is another machine's where it matters: so the learner has a processor
for itself, and an attack has what the honest actor leaves of the others (where other programs run
too, begin it with `nice -n -15`). The flooding ones have a known key, a new one a window: the one
before is barred. Measured are the honest actor's trials a second in an attack's window over the
mean of the windows before and after it, the median of the rounds, and what the learner's channel
took from the attackers.

The last line is the verdict, and the exit status 1 where an attack costs 5 % or more, the honest
actor is refused, a peer without a known key gets a message in, or a flood is not refused in every
window (as where other programs leave the attackers no processor).
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
from mage_async.trajectory import Segment, Task, Trial
from mage_async.wire import Acknowledge, Heartbeat, Hello, TrialResult, encode
from mage_services.channel import LearnerChannel, PeerChannel
from mage_services.curve import actor_keys, learner_keys, make_keys

NUM_ROUNDS, WINDOW_S, SETTLE_S = 5, 2.4, 0.3
NUM_TOKENS, CREDITS = 2048, 16
NICENESS = 15
"""Of attackers, more than the honest actor's."""
FIRST_PROCESSOR, *others = sorted(os.sched_getaffinity(0))
OTHER_PROCESSORS = others or [FIRST_PROCESSOR]
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
    os.nice(NICENESS)
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

    async def attacked(self, kind: str, number: int) -> tuple[float, float, int, int]:
        """A quiet window, one under attack; how many hostile messages came in, and how many peers
        were refused."""
        keys = self.folder / f"attack{number}"  # known, and not barred yet
        process = begin("--attack", kind, self.channel.address, str(keys))
        assert process.stdout is not None
        assert process.stdin is not None
        await asyncio.to_thread(process.stdout.readline)
        quiet, before = await self.window(), self.num_hostile
        num_refused = self.channel.statistics().num_refused
        process.stdin.write("go\n")
        process.stdin.flush()
        attacked = await self.window()
        process.kill()
        await asyncio.to_thread(process.wait)
        await asyncio.sleep(SETTLE_S)
        num_refused = self.channel.statistics().num_refused - num_refused
        return quiet, attacked, self.num_hostile - before, num_refused


def begin(*arguments: str) -> subprocess.Popen[str]:
    """Start a process of this script, on the processors that the learner leaves."""
    command = [sys.executable, __file__, *arguments]
    begun = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(begun.pid, OTHER_PROCESSORS)
    return begun


def prepare(folder: Path) -> Path:
    """Keys of the learner, of an honest actor, of each attack, and of a stranger."""
    keys = folder / "keys"
    make_keys(keys)
    make_keys(folder / "stranger")
    for number in range(NUM_ROUNDS * len(KINDS)):
        own = folder / f"attack{number}"
        make_keys(own)
        shutil.copy2(own / "actor.key", keys / f"attack{number}.key")
        shutil.copy2(keys / "learner.key", own / "learner.key")
        (own / "learner.key_secret").unlink()
    return keys


async def measure(folder: Path) -> dict[str, Any]:
    """All attacks in turn; figures by attack."""
    os.sched_setaffinity(0, [FIRST_PROCESSOR])
    keys = prepare(folder)
    rows: dict[str, Any] = {kind: {"windows": [], "messages_in": 0, "refused": 0} for kind in KINDS}
    with LearnerChannel(
        "tcp://127.0.0.1:0",
        build="b",
        config_digest="c",
        keys=learner_keys(keys),
    ) as channel:
        bench = Bench(channel, folder)
        honest = begin("--honest", channel.address, str(keys))
        serving = asyncio.create_task(bench.serve())
        await bench.has_begun.wait()
        await bench.window()  # warm
        windows = [
            (kind, *await bench.attacked(kind, number))
            for number, kind in enumerate(KINDS * NUM_ROUNDS)
        ]
        quiets = [quiet for _, quiet, *_ in windows] + [await bench.window()]
        for (kind, before, attacked, num, num_refused), after in zip(
            windows, quiets[1:], strict=True
        ):
            rows[kind]["windows"].append((before, attacked, after))
            rows[kind]["messages_in"] += num
            rows[kind]["refused"] += num_refused
        statistics_ = channel.statistics()
        is_served = any(peer.startswith("honest/") for peer in statistics_.peers)
        serving.cancel()
        honest.kill()
        honest.wait()
    return {
        "attacks": rows,
        "honest_is_served": is_served,
        "turned_away": statistics_.num_turned_away,
        "malformed": statistics_.num_malformed(),
        "notes": channel.take_notes(),
    }


def conclude(figures: dict[str, Any]) -> bool:
    """Print the table, write the figures; whether every attack was kept out."""
    print(
        f"{'attack':<20} {'quiet/s':>8} {'attacked/s':>10} {'ratio':>6}  least … most   "
        "messages in, peers refused"
    )
    is_good = figures["honest_is_served"]
    for kind, row in figures["attacks"].items():
        ratios = [2 * attacked / (before + after) for before, attacked, after in row["windows"]]
        quiet, attacked, _ = (statistics.median(one) for one in zip(*row["windows"], strict=True))
        row |= {"ratio": statistics.median(ratios), "ratios": ratios}
        spread = f"{min(ratios):.3f} … {max(ratios):.3f}"
        print(
            f"{kind:<20} {quiet:>8,.0f} {attacked:>10,.0f} {row['ratio']:>6.3f}  {spread}  "
            f"{row['messages_in']:,}, {row['refused']}"
        )
        is_good &= row["ratio"] > LEAST_RATIO
        is_good &= not (kind in ("no keys", "wrong keys") and row["messages_in"])
        is_good &= kind not in ("garbage", "too many") or row["refused"] == NUM_ROUNDS
    print(f"turned away {figures['turned_away']:,}, malformed {figures['malformed']:,}")
    sizes = {"window_s": WINDOW_S, "credits": CREDITS, "num_tokens": NUM_TOKENS}
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
