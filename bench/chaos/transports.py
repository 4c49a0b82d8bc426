"""Kill processes at the same moments under three transports, and count the trials that each loses.

    ours         DEALER to ROUTER: a trial is sent again until the durable journal acknowledges it
    push/pull    PUSH to PULL: an actor forgets a trial once zmq has taken it
    pub/sub      PUB to SUB: the same, and a trial is lost if no subscriber listens

    python -m bench.chaos.transports --kills 20        2 minutes

`ACTORS` processes make one trial in each millisecond and send it; a learner appends what arrives to
a durable journal. An actor writes a trial to a file when it counts as delivered: ours when it is
acknowledged, the other two when `send` has returned, because they report nothing else. Processes
are killed with SIGKILL and started again at the same moments for all three, the learner as often as
an actor. A trial is lost if it counts as delivered and no journal has it. For each transport the
program prints the trials that count as delivered ("rid of": the actor forgets them), the trials in
the journal, and the lost ones. High-water marks are zmq's default of 1,000; ours has 16 trials in
flight.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zmq
import zmq.asyncio

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.policy_version import VersionRun
from mage_async.protocol.codec import decode, encode
from mage_async.protocol.journal_records import first_segment_header
from mage_async.protocol.messages import Acknowledge, Hello, TrialResult, Welcome
from mage_async.trajectory import Segment, Task, Trial
from mage_services.journal.reader import open_journal
from mage_services.journal.writer import JournalFile, make_durable
from mage_services.transport.channels import LearnerChannel, PeerChannel, PeerGone

ACTORS, MAX_IN_FLIGHT, TRIALS_PER_S = 4, 16, 1000.0
"""Number of actors; unacknowledged trials of an actor; trials that an actor makes in a second."""
KINDS = ("ours", "push/pull", "pub/sub")
"""Transports; the first argument of a process of this program that acts or learns."""


def trial(actor: int, life: int, number: int) -> TrialResult:
    """Return a short trial whose grant encodes actor and life, and whose index is `number`."""
    part = Segment(
        np.ones(64, np.int32), np.ones(64, bool), np.zeros(64, np.float32), (VersionRun(0, 0, 0),)
    )
    grant = actor * 1_000_000 + life
    return TrialResult(grant, 0, Trial(Task("rps", "m", 1), number, 3, (part,), ()))


async def our_actor(address: str, actor: int, life: int, delivered: Callable[[int], None]) -> None:
    """Send trials, at most `MAX_IN_FLIGHT` unacknowledged, and send these again on request."""
    hello = Hello(
        role="actor", name=f"a{actor}", build="b", config_digest="c", group_quota=MAX_IN_FLIGHT
    )
    with PeerChannel(address, hello) as channel:
        waiting: dict[int, TrialResult] = {}
        credits = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def listen() -> None:
            while True:
                match message := await channel.receive():
                    case Welcome():
                        for result in list(waiting.values()):
                            await channel.send(result)
                    case Acknowledge() if waiting.pop(message.trial, None) is not None:
                        delivered(message.trial)
                        credits.release()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(listen())
            for number in _numbers():
                await credits.acquire()
                waiting[number] = trial(actor, life, number)
                await channel.send(waiting[number])
                await _pause(number)


async def plain_actor(
    address: str, actor: int, life: int, delivered: Callable[[int], None], kind: int
) -> None:
    """Send trials, which count as delivered once zmq has taken them."""
    with zmq.asyncio.Context() as context, context.socket(kind) as made:
        made.connect(address)
        for number in _numbers():
            await made.send_multipart(encode(trial(actor, life, number)))
            delivered(number)
            await _pause(number)


def _numbers() -> range:
    """Return the numbers of an actor's trials: enough for half a minute between two kills of it."""
    return range(2**15)


async def _pause(number: int) -> None:
    if number % 10 == 9:  # the event loop cannot sleep for single milliseconds
        await asyncio.sleep(10 / TRIALS_PER_S)


async def our_learner(address: str, journal: JournalFile) -> None:
    """Receive trials, and acknowledge each when it is durable."""

    def answer(peer: str, message: Acknowledge | Welcome) -> None:
        try:
            channel.send(peer, message)
        except PeerGone:
            return  # it was killed

    with LearnerChannel(address, build="b", config_digest="c") as channel:
        while True:
            peer, message = await channel.receive()
            if isinstance(message, Hello):
                answer(peer, Welcome(version=0))
            elif isinstance(message, TrialResult):
                done = Acknowledge(
                    grant=message.grant, epoch=0, trial=message.trial.index, is_duplicate=False
                )
                journal.append(message, lambda peer=peer, done=done: answer(peer, done))


async def plain_learner(address: str, journal: JournalFile, kind: int) -> None:
    """Receive trials, and append them to the journal."""
    with zmq.asyncio.Context() as context, context.socket(kind) as made:
        made.bind(address)
        if kind == zmq.SUB:
            made.subscribe(b"")
        while True:
            message = decode(await made.recv_multipart())
            assert isinstance(message, TrialResult)
            journal.append(message)


async def act(kind: str, folder: Path, actor: int, life: int) -> None:
    """Run an actor's process."""
    out = os.open(folder / f"rid-{actor}-{life}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def delivered(number: int) -> None:
        os.write(out, b"%d\n" % number)

    address = f"ipc://{folder / 'work'}"
    if kind == "ours":
        await our_actor(address, actor, life, delivered)
    else:
        await plain_actor(
            address, actor, life, delivered, zmq.PUSH if kind == "push/pull" else zmq.PUB
        )


async def learn(kind: str, folder: Path) -> None:
    """Run the learner's process."""
    found = open_journal(folder / "journal")
    make_durable(found)
    journal = JournalFile(
        folder / "journal", found.segments, first_segment_header(0, 0), 10**11, 10**11
    )
    address = f"ipc://{folder / 'work'}"
    if kind == "ours":
        await our_learner(address, journal)
    else:
        await plain_learner(address, journal, zmq.PULL if kind == "push/pull" else zmq.SUB)


class TransportUnderAttack:
    """Run and kill the processes of one transport."""

    def __init__(self, kind: str) -> None:
        self.kind, self.folder = kind, Path(tempfile.mkdtemp(prefix="mage-transport-"))
        (self.folder / "journal").mkdir()
        # Of each actor, and last of the learner.
        self.lives = [0] * (ACTORS + 1)
        self.processes = [self._start(number) for number in range(ACTORS + 1)]

    def kill(self, number: int) -> None:
        """Kill a process with SIGKILL, and start it again; the last one is the learner."""
        self.processes[number].send_signal(signal.SIGKILL)
        self.processes[number].wait()
        self.lives[number] += 1
        self.processes[number] = self._start(number)

    def end(self) -> dict[str, int]:
        """Wait for trials on their way, end all processes, and return the counts."""
        for process in self.processes[:ACTORS]:
            process.kill()
        time.sleep(2.0)
        self.processes[-1].kill()
        for process in self.processes:
            process.wait()
        records = open_journal(self.folder / "journal").records(0)
        taken = {(r.grant, r.trial.index) for r in records if isinstance(r, TrialResult)}
        delivered = set()
        for file in self.folder.glob("rid-*"):
            actor, life = map(int, file.name.split("-")[1:])
            numbers = file.read_text().split("\n")[:-1]
            delivered |= {(actor * 1_000_000 + life, int(number)) for number in numbers}
        return {
            "rid_of": len(delivered),
            "in_the_journal": len(taken),
            "lost": len(delivered - taken),
        }

    def _start(self, number: int) -> "subprocess.Popen[bytes]":
        role = ["learner"] if number == ACTORS else [str(number), str(self.lives[number])]
        return subprocess.Popen(
            [sys.executable, "-m", "bench.chaos.transports", self.kind, str(self.folder), *role]
        )


def attack(kind: str, kills: int, seed: int, gap_s: float) -> dict[str, int]:
    """Kill processes at moments that depend on the seed alone; return the counts."""
    source, site = random.Random(seed), TransportUnderAttack(kind)
    time.sleep(4.0)  # until all processes have started
    for _ in range(kills):
        time.sleep(source.uniform(0.5, 2 * gap_s - 0.5))
        site.kill(ACTORS if source.random() < 0.5 else source.randrange(ACTORS))
    time.sleep(4.0)  # until the last one has started again
    return site.end()


def main() -> None:
    """Attack each transport, and print what was lost."""
    if len(sys.argv) > 1 and sys.argv[1] in KINDS:
        kind, folder, *role = sys.argv[1:]
        is_learner = role == ["learner"]
        actor = () if is_learner else map(int, role)
        asyncio.run((learn if is_learner else act)(kind, Path(folder), *actor))
        return
    parser = option_parser(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gap-s", type=float, default=1.5, help="mean time between kills")
    given = parser.parse_args()
    figures = {kind: attack(kind, given.kills, given.seed, given.gap_s) for kind in KINDS}
    print(f"{given.kills} kills each{'rid of':>14}{'in the journal':>16}{'lost':>8}")
    for kind, row in figures.items():
        print(f"{kind:<13}{row['rid_of']:>14}{row['in_the_journal']:>16}{row['lost']:>8}")
    write_baseline("chaos_transports", {"kills": given.kills, "transports": figures})
    is_whole = figures["ours"]["lost"] == 0
    print("ours lost nothing" if is_whole else "LOST")
    sys.exit(0 if is_whole else 1)


if __name__ == "__main__":
    main()
