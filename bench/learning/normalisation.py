"""Compare scales of the advantage in Kuhn poker with stakes from 1 to 50 chips.

    python -m bench.learning.normalisation [--run-dir DIR] [--seeds 0 1 2] [--parallel 2]
        [--only-report]

Each opponent plays for chips worth 1 to 50, which no prompt says. Advantages are divided by their
standard deviation over the batch (`advantage.scale = []`), over the group, or over all trials
against the same opponent (`["member"]`), with equal numbers of steps and trials. Each run is
on-policy in one process (`mage_async/algorithm.py`). Runs of the same seed share warm start and
tasks, so differences are taken seed by seed. Returns are in chips per hand, divided by the stake.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

from bench.lib.arms import Job, arguments, results, run_missing
from bench.lib.baseline import ROOT, write_baseline
from mage_async.algorithm import InProcessRun, prepare
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.environments.games.kuhn import Kuhn
from mage_async.results.intervals import interval, paired
from mage_async.results.score import Score

CONFIG = ROOT / "configs/kuhn.toml"
STEPS, TRIALS, STAKES = 40, 1024, 50.0
"""Steps of a run, trials of an evaluation, and the largest stake, in chips."""
# Values of `advantage.scale` by name of an arm.
SCALES = {"batch": "[]", "group": '["group"]', "member": '["member"]'}


def main() -> int:
    """Run the arms that have no results yet, then report all results."""
    given = arguments(__doc__, "normalisation", SCALES)
    run_missing(given, run, lambda job, folder: prepare(_config(*job), folder))
    return _report(results(given, SCALES))


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Train one arm with one seed; return the last episode's returns by opponent, in chips."""
    config = _config(*job)
    training = InProcessRun(config, prepare(config, folder))
    training.train()
    kuhn = Kuhn(**config.environment.options)
    return {
        split: _in_chips(training.evaluate(split, TRIALS), kuhn) for split in ("train", "heldout")
    }


def _config(scale: str, seed: int) -> Config:
    options = f'{{opponents="contrasts", hands=2, redeals=false, stakes={STAKES}}}'
    changes = [
        f"environment.options={options}",
        f"advantage.scale={SCALES[scale]}",
        f"learner.steps={STEPS}",
        f"seed={seed}",
    ]
    return config_file.load(CONFIG, changes)


def _in_chips(score: Score, kuhn: Kuhn) -> dict[str, float]:
    """Return the last episode's return by opponent, in chips."""
    return {name: each[-1] / kuhn.stake(name) for name, each in score.by_member.items()}


def _report(found: dict[str, dict[int, dict[str, dict[str, float]]]]) -> int:
    """Print the last episode's returns by split and by half of the stakes; write the baseline."""
    kuhn = Kuhn("contrasts", stakes=STAKES)
    rows = []
    for split, half in itertools.product(("train", "heldout"), ("all", "cheap", "dear")):
        values = {
            scale: {seed: _mean(each[split], kuhn, half) for seed, each in runs.items()}
            for scale, runs in found.items()
        }
        shown = {scale: list(each.values()) for scale, each in values.items()}
        rows.append({"split": split, "stakes": half, "values": shown, "gains": _gains(values)})
    print(f"{'':16} episode 3, chips a hand, by seed; then member minus other, 95 % over seeds")
    for row in rows:
        shown = "  ".join(
            f"{scale} " + " ".join(f"{value:+.2f}" for value in values)
            for scale, values in row["values"].items()
        )
        gains = "  ".join(f"{n} {g[0]:+.3f} ± {g[1]:.3f}" for n, g in row["gains"].items())
        print(f"{row['split']:8} {row['stakes']:6}  {shown}   {gains}")
    write_baseline("normalisation", {"steps": STEPS, "stakes": STAKES, "rows": rows})
    return 0


def _gains(values: dict[str, dict[int, float]]) -> dict[str, tuple[float, float]]:
    """Return the gains of the scale by opponent over the other scales, seed by seed."""
    pairs = {other: paired(values["member"], values[other]) for other in ("batch", "group")}
    return {other: interval(each) for other, each in pairs.items() if len(each) > 1}


def _mean(by_member: dict[str, float], kuhn: Kuhn, half: str) -> float:
    """Return the mean over all opponents, or over the half with cheap or with dear chips."""
    middle = STAKES**0.5  # stakes rise in geometric steps from 1 to `STAKES`
    wanted = {"all": (0.0, STAKES), "cheap": (0.0, middle), "dear": (middle, STAKES)}
    low, high = wanted[half]
    chosen = [value for name, value in by_member.items() if low <= kuhn.stake(name) <= high]
    return sum(chosen) / len(chosen)


if __name__ == "__main__":
    sys.exit(main())
