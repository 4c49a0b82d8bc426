"""What it costs a run to be watched: by an open page of `mage view`, and by trackers.

    python -m bench.system.watching_cost                             8 minutes on an idle machine
    python -m bench.system.watching_cost --parts view trackers both  24 minutes

One run of the quickstart is trained for as long as this takes. Blocks of BLOCK_S seconds with
nobody watching and blocks with a watched run take turns, so both sides of a pair lie side by side
in the same run. The trackers are all whose package is installed; all keep what they are told on
this machine. The page is the run's own. It is asked for exactly as `static/view.js` asks: after an
event, at most once in LEAST_MS. What a browser does to draw the page is not counted.

A watcher starts before its block and is given the time to import its packages and to take in what
happened meanwhile; this happens once in a run, and is printed apart, as processor seconds. The
ratio is what is left of the speed while a run goes on. (Until this was so, runs of half a minute
were compared, in which imports weigh as they do in no run that one would watch, and the page was
asked for five times as often as a browser asks.)

Printed are, of each part, the mean ratio of steps a second, watched over the mean of the blocks
before and behind, with its 95 % interval (Student's t of the logarithms), and the processor seconds
of every process. Those say the same on a machine that does something else as well, and so does
their ratio: processor seconds a step of all blocks alone over watched ones, the watchers' included,
which is what is left of the speed where every core is busy; its interval is the narrower one. The
last line is the verdict; the exit status is 1 where the ratio of the last part named, of the steps
a second, is below the bound.
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
PARTS = ("view", "trackers", "both")
LOCAL = (
    "WANDB_MODE=offline",
    "MLFLOW_TRACKING_URI=sqlite:///{}/mlflow.db",
    "TRACKIO_DIR={}/trackio",
)
MANY_STEPS = 1_000_000
Seconds = dict[str, float]
"""Of the processor, by process."""
Ratio = tuple[float, float, float]
"""Mean, and the ends of its interval."""


@dataclass(frozen=True, slots=True)
class Block:
    """What happened meanwhile."""

    num_steps: int
    rate: float
    """Steps a second."""
    used: Seconds
    """While it lasted."""
    before: Seconds
    """Of each process from its start to the start of the block."""


def main() -> None:
    """Measure the parts that were asked for, print a table, and say the verdict."""
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
    """A run of the quickstart that trains by now."""
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
    """A block without watchers, a watched one, and so on; the last has no watchers."""
    for part in parts:
        yield _block(run, "alone")
        with ExitStack() as watchers:
            if part != "trackers":
                watchers.enter_context(_viewed(run))
            if part != "view":
                watchers.enter_context(_told(run, names))
            yield _block(run, part)
    yield _block(run, "alone")


def _block(run: RunDirectory, what: str) -> Block:
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
    """Beside an open page, whose index is whole by now."""
    with viewed(run.root.parent) as (address, _):
        page = open_page(address, f"runs/{run.root.name}/")
        _until(lambda: page.asked > 2 and "in the index so far" not in page.text, "no page came")
        yield


@contextmanager
def _told(run: RunDirectory, names: list[str]) -> Iterator[None]:
    """Beside trackers that know all there is by now."""
    followers = start(run, {name: TRACKERS.load(name)() for name in names}, PATIENCE_S)
    step = last_line(run.metrics)["step"]
    try:
        _until(lambda: all(_step(run, name) > step for name in names), "a tracker was not told")
        yield
    finally:
        followers.end(PATIENCE_S)


def _step(run: RunDirectory, name: str) -> int:
    told = read_position(run, name)
    return told.step if told else 0


def _total_s(block: Block) -> float:
    """Processor seconds of all processes but this one."""
    return sum(seconds for name, seconds in block.used.items() if name != "bench")


def _ratio(values: list[float], places: range) -> Ratio:
    """Mean and interval of watched blocks' values over their neighbours'."""
    logs = [
        math.log(values[at]) - fmean(math.log(values[at + side]) for side in (-1, 1))
        for at in places
    ]
    middle, half = interval(logs)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def _shown(
    part: str, ratio: Ratio, busy: Ratio, blocks: list[Block], places: range
) -> dict[str, dict[str, float]]:
    """Print a part; milliseconds a step and seconds once a run, by process."""
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
    """Until its block began, by process that was started to watch."""
    names = sorted(watched[0].before.keys() - alone[0].before.keys())
    return {name: fmean(block.before.get(name, 0.0) for block in watched) for name in names}


def _a_step(blocks: list[Block]) -> Seconds:
    """Milliseconds a step, by process."""
    total: Seconds = defaultdict(float)
    for block in blocks:
        for name, seconds in block.used.items():
            total[name] += 1000 * seconds
    return {name: spent / sum(block.num_steps for block in blocks) for name, spent in total.items()}


if __name__ == "__main__":
    main()
