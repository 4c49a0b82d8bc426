"""Does a policy learn the same if its proximal log-probs are estimated without a forward?

    python -m bench.learning.proximal [--run-dir DIR] [--seeds 0 1 2 3 4 5] [--only-report]

The quickstart is trained in one process (`mage_async/algorithm.py`) on data that is 1 or 4 steps
old (`admission.lag`), with `learner.proximal` "computed" and "interpolated" (A-3PO). On fresh data
both are the same. Runs of a seed share warm start, tasks and evaluation, so differences are taken
seed by seed. The program prints the held-out returns of the last episode, the differences with
their 95 % intervals over seeds, and the learner's processor seconds, interpolated over computed.
A run whose result is in the folder is not run again.
"""

import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

from bench.lib.arms import Job, arguments, results, run_missing
from bench.lib.baseline import ROOT, write_baseline
from mage_async.algorithm import InProcessRun, prepare
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.results.intervals import interval, paired

CONFIG = ROOT / "configs/quickstart.toml"
STEPS, TRIALS = 60, 1024
"""Steps of a run, the quickstart's own; trials of an evaluation."""
LAGS = (1, 4)
KINDS = ("computed", "interpolated")
ARMS = [f"{kind} lag {lag}" for lag in LAGS for kind in KINDS]


def main() -> int:
    """Run the arms that have no results yet, then report all results."""
    given = arguments(__doc__, "proximal", ARMS, named=True)
    run_missing(given, run, lambda job, folder: prepare(config_of(*job), folder))
    return report(results(given, ARMS), given.name)


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Train one arm with one seed, and evaluate it."""
    config = config_of(*job)
    training = InProcessRun(config, prepare(config, folder))
    began = time.process_time()
    training.train()
    return {
        "processor_s": time.process_time() - began,
        "last_episode": training.evaluate("heldout", TRIALS).return_by_episode[-1],
    }


def config_of(arm: str, seed: int) -> Config:
    """Return the configuration of an arm with a seed."""
    kind, _, lag = arm.split()
    changes = [f"learner.proximal={kind}", f"admission.lag={lag}", f"learner.steps={STEPS}"]
    return config_file.load(CONFIG, [*changes, f"seed={seed}"])


def report(found: dict[str, dict[int, Any]], name: str) -> int:
    """Print the returns and the differences; write the baseline."""
    returns = {
        arm: {seed: each["last_episode"] for seed, each in runs.items()}
        for arm, runs in found.items()
    }
    rows: dict[str, Any] = {"returns": returns}
    for arm, by_seed in returns.items():
        print(f"{arm:20} " + " ".join(f"{value:+.3f}" for value in by_seed.values()))
    for lag in LAGS:
        computed, other = (f"{kind} lag {lag}" for kind in KINDS)
        gains = paired(returns[other], returns[computed])
        if len(gains) > 1:
            gain, half = interval(gains)
            seconds = [
                mean(each["processor_s"] for each in found[arm].values())
                for arm in (other, computed)
            ]
            ratio = seconds[0] / seconds[1]
            rows[f"lag {lag}"] = {"gain": (gain, half), "processor_ratio": ratio}
            print(f"lag {lag}: interpolated - computed {gain:+.3f} ± {half:.3f}, time {ratio:.2f}")
    if name:
        write_baseline(name, {"steps": STEPS, "trials": TRIALS, **rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
