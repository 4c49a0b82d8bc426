"""Check that the algorithm in one process learns what asynchronous runs learn, by their returns.

    python -m bench.learning.in_process [--run-dir DIR] [--seeds 0 1 2] [--only-report]

It trains the quickstart by `mage_async/algorithm.py`, with one process and one core for each seed
(two minutes), and prints the held-out return of each episode beside the asynchronous runs of
`baselines/learning_cpu2.json`. The asynchronous runs train on data up to one step old, so the two
agree within their spread over seeds, but not bit by bit. Under `admission.rule = "sync"` with exact
arithmetic they agree bit by bit (`tests/end_to_end/test_algorithm.py`).
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.lib.arms import Job, arguments, results, run_missing
from bench.lib.baseline import FOLDER, write_baseline
from mage_async.algorithm import InProcessRun, prepare
from mage_async.config import config_file
from mage_async.config.schema import Config

ARM, TRIALS = "in process", 1024
"""Name of the only arm, and trials of an evaluation."""
SETS = ("heldout", "heldout_swapped")
"""Sets of the evaluation; "swapped" meets another opponent in the last episode."""


def main() -> int:
    """Run the arms that have no results yet, then report all results."""
    given = arguments(__doc__, "in_process", [ARM])
    run_missing(given, run, lambda job, folder: prepare(_config(job), folder))
    return _report(results(given, [ARM])[ARM])


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Train with one seed; return the mean returns, float [episodes], by evaluation set."""
    config, began = _config(job), time.monotonic()
    alone = InProcessRun(config, prepare(config, folder))
    alone.train()
    sets = {
        name: alone.evaluate("heldout", TRIALS, swap="swapped" in name).return_by_episode
        for name in SETS
    }
    return sets | {"wall_s": time.monotonic() - began}


def _config(job: Job) -> Config:
    return config_file.load(config_file.find(None), [f"seed={job.seed}"])


def _report(found: dict[int, dict[str, Any]]) -> int:
    known = json.loads((FOLDER / "learning_cpu2.json").read_text())["summaries"]["quickstart"]
    for name in SETS:
        for seed, sets in found.items():
            print(f"{name:16} in process,   seed {seed}  {_text_of(sets[name])}")
        for summary in known:
            sets = summary["evaluation"]
            values = _text_of(sets[name]["return_by_episode"])
            print(f"{name:16} asynchronous, seed {summary['seed']}  {values}")
    write_baseline("in_process", {"seeds": list(found), "trials": TRIALS, "runs": found})
    return 0


def _text_of(returns: list[float]) -> str:
    return "  ".join(f"{value:+.3f}" for value in returns)


if __name__ == "__main__":
    sys.exit(main())
