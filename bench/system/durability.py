"""Measure by how much syncing the journal to disk slows a whole run down.

    python -m bench.system.durability [--add]          4 minutes on an idle machine

In one quickstart, `fsync` and `fdatasync` are switched on and off while it trains: a small library,
loaded before libc in the run's processes only, checks a shared byte (this needs a C compiler).
Blocks of `BLOCK` steps alternate (off on on off off …), so each pair is measured at about the same
time, without imports and warm start. The first step of each block does not count.

With `--add` the pairs of the baseline count too, for several short measurements on a machine that
is idle for minutes at a time. The program prints the mean ratio of a step's time with syncing over
that without, with its 95 % interval (Student's t of the logarithms), and the share of the learner's
time that it spends on syncing. The last line is the verdict; the exit status is 1 if the interval
is not below the bound.
"""

import json
import math
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.lib.baseline import FOLDER, machine, write_baseline
from bench.lib.options import option_parser
from bench.lib.preload import preloaded
from bench.lib.short_run import command
from mage_async.results.intervals import interval
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines

MOST = 0.05
"""Largest allowed share of additional time."""
BLOCK, WARM = 8, 4
"""Number of steps of a block, and of steps before the first block."""
LOOK_S = 0.01
"""Seconds between two looks at the run's metrics."""
# The library that replaces both functions of libc. `MAGE_SYNC_SWITCH` names the file with the byte.
SOURCE = """
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
static volatile const char *is_on;
__attribute__((constructor)) static void look(void) {
    int file = open(getenv("MAGE_SYNC_SWITCH"), O_RDONLY);
    is_on = mmap(0, 1, PROT_READ, MAP_SHARED, file, 0);
    close(file);
}
int fsync(int file) { return *is_on ? syscall(SYS_fsync, file) : 0; }
int fdatasync(int file) { return *is_on ? syscall(SYS_fdatasync, file) : 0; }
"""


class SwitchedRun:
    """Run a quickstart, and switch its syncing on and off."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        self.run = RunDirectory((folder / "run").resolve())
        switch = folder / "switch"
        switch.write_bytes(b"\1")
        with switch.open("r+b") as file:
            self._switch = mmap.mmap(file.fileno(), 1)
        # Checkpoints are synced too, and would fall into some blocks only, so there are none.
        train = command(self.run.root, num_steps, "learner.checkpoint_every=100000")
        own = preloaded(folder, "sync", SOURCE) | {"MAGE_SYNC_SWITCH": str(switch)}
        self._process = subprocess.Popen(train, stdout=subprocess.DEVNULL, env=os.environ | own)

    def step(self) -> int:
        """Return the last step in the run's metrics."""
        return len(read_lines(self.run.metrics))

    def wait_for(self, step: int) -> None:
        """Wait until the run has trained a step."""
        while self.step() < step:
            if self._process.poll() is not None:
                sys.exit("the run ended before the measurement did")
            time.sleep(LOOK_S)

    def block(self, *, is_synced: bool) -> tuple[int, int]:
        """Switch syncing, and wait for `BLOCK` steps; return the first and the last that count."""
        self._switch[0] = int(is_synced)
        first = self.step() + 1
        self.wait_for(first + BLOCK - 1)
        return first, first + BLOCK - 1

    def end(self) -> None:
        """Wait for the end of the run."""
        self._switch[0] = 1
        self._process.wait()

    def seconds(self, block: tuple[int, int]) -> float:
        """Return the mean seconds of a step of a block."""
        times = {line["step"]: line["time_s"] for line in read_lines(self.run.metrics)}
        first, last = block
        return (times[last] - times[first]) / (last - first)

    def sync_share(self) -> float:
        """Return the share of the learner's time that is spent on syncing the journal."""
        booked: dict[str, Any] = json.loads(self.run.learner.read_text())["blocked_s"]["learner"]
        return booked.get("journal sync", 0.0) / sum(booked.values())


def main() -> None:
    """Measure the pairs, and print the ratio."""
    parser = option_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--add", action="store_true", help="to the pairs of the baseline")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mage-durability-"))
    subject = SwitchedRun(folder, WARM + 2 * given.pairs * BLOCK + 2)
    subject.wait_for(WARM)
    blocks = []
    for number in range(given.pairs):
        ways = (True, False) if number % 2 else (False, True)  # is it synced?
        blocks.append({way: subject.block(is_synced=way) for way in ways})
    subject.end()
    pairs = [{way: subject.seconds(block) for way, block in pair.items()} for pair in blocks]
    synced, not_synced = ([pair[way] for pair in pairs] for way in (True, False))
    if given.add:
        before = json.loads((FOLDER / f"durability_{machine()}.json").read_text())
        synced, not_synced = before["synced_s"] + synced, before["not_synced_s"] + not_synced
    ratios = [one / other for one, other in zip(synced, not_synced, strict=True)]
    middle, half = interval([math.log(ratio) for ratio in ratios])
    mean, low, high = (math.exp(middle + side * half) for side in (0, -1, 1))
    share = subject.sync_share()
    print(f"synced over not synced: {mean:.3f} ({low:.3f} … {high:.3f}, {len(ratios)} pairs)")
    print(f"booked on the journal's sync, in either way: {share:.2%} of the learner's life")
    figures = {"ratio": [mean, low, high], "sync_share": share, "steps_a_block": BLOCK}
    write_baseline("durability", figures | {"synced_s": synced, "not_synced_s": not_synced})
    print(f"at most {MOST:.0%}: {'yes' if high <= 1 + MOST else 'NO'}")
    sys.exit(0 if high <= 1 + MOST else 1)


if __name__ == "__main__":
    main()
