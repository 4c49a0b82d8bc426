"""Measure how much an open page of `mage view`, and trackers, slow a run down.

    python -m bench.system.watching_cost                             8 minutes on an idle machine
    python -m bench.system.watching_cost --parts view trackers both  24 minutes

One quickstart is trained for the whole time. Blocks of BLOCK_S seconds without a watcher and with
one alternate in this run. The trackers are all whose package is installed, and all write to this
machine. The page is the run's main page. It is requested as `static/view.js` does: after an event,
at most once in LEAST_MS. The browser's drawing is not counted.

A watcher starts before its block, and first imports its packages and reads what happened before.
This happens once in a run; its CPU seconds are printed separately and are not part of the ratio.

For each part the program prints the mean ratio of steps per second, watched over the mean of the
blocks before and after, with its 95 % interval (Student's t of the logarithms), and the CPU seconds
of every process. It also prints a second ratio, which other load on the machine disturbs less: CPU
seconds per step without a watcher over those with one, the watcher's included. This is what is left
of the speed if every core is busy. The last line is the verdict; the exit status is 1 if the ratio
of steps per second of the last part named is below the bound.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from bench.lib.processes import processor_s
from bench.lib.short_run import command
from bench.system.open_page import open_page
from bench.system.view_pages import viewed
from mage_async.config.components import TRACKERS
from mage_async.results.intervals import interval
from mage_async.results.run_directory import RunDirectory
from mage_services.tracking.tracker_worker import read_position, start
from mage_services.view.run_watcher import last_line

LEAST, BLOCK_S, PATIENCE_S = 0.97, 20.0, 600.0
"""Bound on the ratio of steps per second, seconds of a block, and seconds after which a run or a
watcher that has not begun is given up."""
PARTS = ("view", "trackers", "both")
# Environment variables that keep trackers on this machine; {} is a temporary folder.
LOCAL = (
    "WANDB_MODE=offline",
    "MLFLOW_TRACKING_URI=sqlite:///{}/mlflow.db",
    "TRACKIO_DIR={}/trackio",
)
MANY_STEPS = 1_000_000
"""More steps than the measurement takes; at its end the run is interrupted."""
Seconds = dict[str, float]
"""CPU seconds by process."""
Ratio = tuple[float, float, float]
"""Mean, and the bounds of its interval."""


@dataclass(frozen=True, slots=True)
class Block:
    """Hold the figures of one block."""

    num_steps: int
    rate: float
    """Steps per second."""
    used: Seconds
    """CPU seconds during the block."""
    before: Seconds
    """CPU seconds of each process from its start to the start of the block."""


def main() -> None:
    """Measure the chosen parts, print a table and the verdict."""
    parser = option_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["both"])
    parser.add_argument("--pairs", type=int, default=8)
    given = parser.parse_args()
    names = [name for name in TRACKERS if find_spec(name) is not None]
    if not names:
        sys.exit(f"none of {', '.join(TRACKERS)} is installed")
    with trained() as run:
        blocks = list(_blocks(run, names, given.parts * given.pairs))
    figures, ratio = {}, (0.0, 0.0, 0.0)
    for number, part in enumerate(given.parts):
        # Watched blocks have odd numbers, and the parts take turns.
        places = range(2 * number + 1, len(blocks), 2 * len(given.parts))
        ratio = _ratio([block.rate for block in blocks], places)
        busy = _ratio([block.num_steps / _total_s(block) for block in blocks], places)
        figures[part] = {"ratio": ratio, "processor_ratio": busy}
        figures[part] |= _shown(part, ratio, busy, blocks, places)
    write_baseline("watching_cost", {"trackers": names, "parts": figures})
    print(f"at least {LEAST:.0%}: {'yes' if ratio[0] >= LEAST else 'NO'}")
    sys.exit(0 if ratio[0] >= LEAST else 1)


@contextmanager
def trained() -> Iterator[RunDirectory]:
    """Start a quickstart, and wait until it trains."""
    folder = Path(tempfile.mkdtemp(prefix="mage-watching-"))
    os.environ.update(variable.format(folder).split("=", 1) for variable in LOCAL)
    run = RunDirectory(folder / "runs" / "run")
    process = subprocess.Popen(command(run.root, MANY_STEPS), stdout=subprocess.DEVNULL)
    try:
        _until(lambda: last_line(run.metrics).get("step", 0) >= 10, "the run did not begin")
        yield run
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def _until(is_so: Callable[[], bool], otherwise: str) -> None:
    until, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not is_so():
        if time.monotonic() > until:
            sys.exit(f"{otherwise} within {PATIENCE_S:g} s")
        pause.wait(0.2)


def _blocks(run: RunDirectory, names: list[str], parts: list[str]) -> Iterator[Block]:
    """Yield blocks without a watcher and with one, in alternation; the last has none."""
    for part in parts:
        yield _block(run, "alone")
        with ExitStack() as watchers:
            if part != "trackers":
                watchers.enter_context(_viewed(run))
            if part != "view":
                watchers.enter_context(_tracked(run, names))
            yield _block(run, part)
    yield _block(run, "alone")


def _block(run: RunDirectory, what: str) -> Block:
    """Wait for the time of a block, and return its figures."""
    began, before = last_line(run.metrics), processor_s()
    threading.Event().wait(BLOCK_S)
    ended, after = last_line(run.metrics), processor_s()
    num_steps = ended["step"] - began["step"]
    used = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
    rate = num_steps / (ended["time_s"] - began["time_s"])
    print(f"{what}: {rate:.3f} steps a second", flush=True)
    return Block(num_steps, rate, used, before)


@contextmanager
def _viewed(run: RunDirectory) -> Iterator[None]:
    """Keep a page open, whose index is complete at the start of the block."""
    with viewed(run.root.parent) as (address, _):
        page = open_page(address, f"runs/{run.root.name}/")
        _until(
            lambda: page.num_answers > 2 and "in the index so far" not in page.text, "no page came"
        )
        yield


@contextmanager
def _tracked(run: RunDirectory, names: list[str]) -> Iterator[None]:
    """Run trackers, which have read all earlier steps at the start of the block."""
    trackers = start(run, {name: TRACKERS.load(name)() for name in names}, PATIENCE_S)
    step = last_line(run.metrics)["step"]
    try:
        _until(lambda: all(_step(run, name) > step for name in names), "a tracker was not told")
        yield
    finally:
        trackers.end(PATIENCE_S)


def _step(run: RunDirectory, name: str) -> int:
    position = read_position(run, name)
    return position.step if position else 0


def _total_s(block: Block) -> float:
    """Return the CPU seconds of all processes but this one."""
    return sum(seconds for name, seconds in block.used.items() if name != "bench")


def _ratio(values: list[float], places: range) -> Ratio:
    """Return mean and interval of the ratio of watched blocks' values to their neighbours'."""
    logs = [
        math.log(values[at]) - fmean(math.log(values[at + side]) for side in (-1, 1))
        for at in places
    ]
    middle, half = interval(logs)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def _shown(
    part: str, ratio: Ratio, busy: Ratio, blocks: list[Block], places: range
) -> dict[str, dict[str, float]]:
    """Print a part; return milliseconds per step, and seconds once in a run, by process."""
    mean, low, high = ratio
    print(f"{part}: {mean:.3f} ({low:.3f} … {high:.3f}, {len(places)} pairs) of the steps a second")
    mean, low, high = busy
    print(f"  {mean:.3f} ({low:.3f} … {high:.3f}) of the steps a processor second")
    watched = [blocks[at] for at in places]
    alone = [blocks[at + side] for at in places for side in (-1, 1)]
    once, a_step, a_step_alone = _once(watched, alone), _a_step(watched), _a_step(alone)
    print(f"  {'process':<24}{'once, first':>12}{'once':>8}{'ms a step':>11}{'alone':>8}")
    for name in sorted(a_step):
        first = watched[0].before.get(name, 0.0) if name in once else 0.0
        print(
            f"  {name:<24}{first:>10.2f} s{once.get(name, 0.0):>6.2f} s"
            f"{a_step[name]:>11.1f}{a_step_alone.get(name, 0.0):>8.1f}"
        )
    extra = sum(value for name, value in a_step.items() if name in once)
    print(f"  watchers: {sum(once.values()):.1f} s once, {extra:.1f} ms a step", flush=True)
    return {"once_s": once, "ms_a_step": a_step, "ms_a_step_alone": a_step_alone}


def _once(watched: list[Block], alone: list[Block]) -> Seconds:
    """Return the CPU seconds of each watcher before its block."""
    names = sorted(watched[0].before.keys() - alone[0].before.keys())
    return {name: fmean(block.before.get(name, 0.0) for block in watched) for name in names}


def _a_step(blocks: list[Block]) -> Seconds:
    """Return CPU milliseconds per step, by process."""
    total: Seconds = defaultdict(float)
    for block in blocks:
        for name, seconds in block.used.items():
            total[name] += 1000 * seconds
    return {name: spent / sum(block.num_steps for block in blocks) for name, spent in total.items()}


if __name__ == "__main__":
    main()
