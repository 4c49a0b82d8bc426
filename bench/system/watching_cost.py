"""What it costs a whole run to be watched: by an open page of `mage view`, and by trackers.

    python -m bench.system.watching_cost [--pairs 5]          8 minutes on an idle machine

Pairs of runs of the quickstart, one watched and one not, in turn off on on off off …, from
neighbours in time. The watched one has every tracker whose package is installed, all of which keep
what they are told on this machine, and a page that is asked for again whenever the run changes.
Printed are the mean ratio of trials a second, watched over not watched, with its 95 % interval
(Student's t of the logarithms). The last line is the verdict; the exit status is 1 where the
ratio's mean is below the bound.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from bench.lib.short_run import command
from bench.system.view_pages import Pages, viewed
from mage_async.results.intervals import interval
from mage_async.results.run_directory import RunDirectory
from mage_services.tracking.position import read_position
from mage_services.tracking.tracker import TRACKERS

LEAST = 0.97
LOCAL = (
    "WANDB_MODE=offline",
    "MLFLOW_TRACKING_URI=sqlite:///{}/mlflow.db",
    "TRACKIO_DIR={}/trackio",
)


def main() -> None:
    """Run pairs, and say the ratio."""
    parser = option_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    names = [name for name in TRACKERS if find_spec(name) is not None]
    if not names:
        sys.exit(f"none of {', '.join(TRACKERS)} is installed")
    folder, rates = Path(tempfile.mkdtemp(prefix="mage-watching-")), {True: [], False: []}
    for number in range(given.pairs):
        for is_watched in (True, False) if number % 2 else (False, True):
            run = RunDirectory(folder / f"{number}-{is_watched}")
            if is_watched:
                rates[True].append(_watched(run, given.steps, names, folder))
            else:
                rates[False].append(_rate(run, given.steps, [], folder))
    ratios = [one / other for one, other in zip(rates[True], rates[False], strict=True)]
    middle, half = interval([math.log(ratio) for ratio in ratios])
    mean, low, high = (math.exp(middle + side * half) for side in (0, -1, 1))
    print(f"watched over not watched: {mean:.3f} ({low:.3f} … {high:.3f}, {len(ratios)} pairs)")
    figures = {"trackers": names, "ratio": [mean, low, high]}
    write_baseline("watching_cost", figures | {"watched": rates[True], "alone": rates[False]})
    print(f"at least {LEAST:.0%}: {'yes' if mean >= LEAST else 'NO'}")
    sys.exit(0 if mean >= LEAST else 1)


def _watched(run: RunDirectory, steps: int, names: list[str], folder: Path) -> float:
    """Trials a second of one run beside a page that follows it."""
    with ThreadPoolExecutor(1) as client:
        with viewed(folder) as (address, _):
            looking = client.submit(_look, address, run.root.name)
            rate = _rate(run, steps, names, folder)
        print(f"{run.root.name}: the page was asked for {looking.result()} times")
    return rate


def _look(address: str, name: str) -> int:
    """Ask for a run's page whenever the view tells that a run has changed, until the server ends;
    how often the page was there.
    """
    events, pages, asked = Pages(address).events(run=""), Pages(address), 0
    with suppress(HTTPException, ConnectionError):
        while line := events.readline():
            if line.startswith(b"data:"):
                asked += pages.answered(f"runs/{name}/") is not None
    return asked


def _rate(run: RunDirectory, steps: int, names: list[str], folder: Path) -> float:
    """Trials a second of one run; every tracker has to have been told of all its steps."""
    keys = [f"tracking.{name}={'true' if name == 'tensorboard' else 'mage'}" for name in names]
    local = dict(variable.format(folder).split("=", 1) for variable in LOCAL)
    asked = command(run.root, steps, "tracking.wait_s=60", *keys)
    subprocess.run(asked, check=True, stdout=subprocess.DEVNULL, env=os.environ | local)
    for name in names:
        told = read_position(run, name)
        if told is None or told.step < steps:
            sys.exit(f"{name} was not told of the whole run: {run.log_of(f'tracker-{name}')}")
    return json.loads(run.summary.read_text())["throughput"]["trials_per_s"]


if __name__ == "__main__":
    main()
