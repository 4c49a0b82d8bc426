"""The learner of `bench.chaos.peers`: it answers an honest actor while attackers come and go."""

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from mage_async.protocol.messages import Acknowledge, TrialResult
from mage_services.transport.learner_channel import LearnerChannel

SETTLE_S = 0.3
FIRST_PROCESSOR, *others = sorted(os.sched_getaffinity(0))
OTHER_PROCESSORS, NUM_PROCESSORS = others or [FIRST_PROCESSOR], 1 + len(others)
ATTACKERS = "bench.chaos.attackers"


@dataclass(frozen=True, slots=True)
class Window:
    """What happened in some seconds."""

    trials_per_s: float
    """Trials of the honest actor."""
    busy: float
    """Processor time of the learner's process, in processors."""
    stolen: float
    """Share of all processors that the machine's host kept."""
    num_messages: int = 0
    """Messages of the attacker that came in."""
    num_refused: int = 0


class AttackedLearner:
    """The learner's side of a connection: it takes, acknowledges and counts trials."""

    def __init__(self, channel: LearnerChannel, folder: Path, window_s: float) -> None:
        self.channel, self.folder, self.window_s = channel, folder, window_s
        self.attackers = begin(OTHER_PROCESSORS, ATTACKERS, channel.address)
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

    async def window(self) -> Window:
        """What happens from now on."""
        before, began = self.num_honest, time.perf_counter()
        busy_s, stolen_s = time.process_time(), host_took_s()
        await asyncio.sleep(self.window_s)
        duration_s = time.perf_counter() - began
        busy = (time.process_time() - busy_s) / duration_s
        stolen = (host_took_s() - stolen_s) / (duration_s * NUM_PROCESSORS)
        return Window((self.num_honest - before) / duration_s, busy, stolen)

    async def attacked(self, kind: str, number: int) -> Window:
        """A window in which an attack begins and goes on, or none."""
        assert self.attackers.stdin is not None
        keys = self.folder / f"attack{number}"  # known, and not barred yet
        num_messages, num_refused = self.num_hostile, self.channel.statistics().num_refused
        print(f"{kind}\t{keys}", file=self.attackers.stdin, flush=True)
        window = await self.window()
        print("stop", file=self.attackers.stdin, flush=True)
        await self.hear_of_attackers()
        await asyncio.sleep(SETTLE_S)
        return replace(
            window,
            num_messages=self.num_hostile - num_messages,
            num_refused=self.channel.statistics().num_refused - num_refused,
        )

    async def hear_of_attackers(self) -> None:
        """Wait until they are ready, or over."""
        assert self.attackers.stdout is not None
        await asyncio.to_thread(self.attackers.stdout.readline)


def host_took_s() -> float:
    """Seconds of processor that the machine's host kept from it so far."""
    ticks = Path("/proc/stat").read_text().split(maxsplit=9)[8]
    return int(ticks) / os.sysconf("SC_CLK_TCK")


def begin(processors: list[int], *arguments: str) -> subprocess.Popen[str]:
    """Start a module on some processors."""
    command = [sys.executable, "-m", *arguments]
    begun = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(begun.pid, processors)
    return begun
