"""What trackers cost a whole run.

    python -m bench.system.tracking_cost [--pairs 5]          8 minutes on an idle machine

Pairs of runs of the quickstart, one with every tracker whose package is installed and one with
none, in turn off on on off off …, from neighbours in time. All keep what they are told on this
machine. Printed are the mean ratio of trials a second, tracked over not tracked, with its 95 %
interval (Student's t of the logarithms). The last line is the verdict; the exit status is 1 where
the ratio's mean is below the bound.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from bench.lib.short_run import command
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
    folder, rates = Path(tempfile.mkdtemp(prefix="mage-tracking-")), {True: [], False: []}
    for number in range(given.pairs):
        for is_tracked in (True, False) if number % 2 else (False, True):
            run = RunDirectory(folder / f"{number}-{is_tracked}")
            rates[is_tracked].append(_rate(run, given.steps, names if is_tracked else [], folder))
    ratios = [one / other for one, other in zip(rates[True], rates[False], strict=True)]
    middle, half = interval([math.log(ratio) for ratio in ratios])
    mean, low, high = (math.exp(middle + side * half) for side in (0, -1, 1))
    print(f"tracked over not tracked: {mean:.3f} ({low:.3f} … {high:.3f}, {len(ratios)} pairs)")
    figures = {"trackers": names, "ratio": [mean, low, high]}
    write_baseline("tracking_cost", figures | {"tracked": rates[True], "not_tracked": rates[False]})
    print(f"at least {LEAST:.0%}: {'yes' if mean >= LEAST else 'NO'}")
    sys.exit(0 if mean >= LEAST else 1)


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
