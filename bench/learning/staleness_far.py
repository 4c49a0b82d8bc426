"""Train on data that is up to 256 steps old: which corrections still learn?

    python -m bench.learning.staleness_far [--run-dir DIR] [--seeds 0 1 2] [--arms "vcpo, lag 256"]

It trains the quickstart in one process (`mage_async/algorithm.py`) with `STEPS` steps of 4 groups
instead of 60 steps of 18. The weights of `admission.lag` steps ago play each batch; until step
`lag` those are the warm start's. It prints the held-out return of the last episode every `EVERY`
steps and after the last step (1,024 trials), and draws `docs/images/staleness_far.svg`.
"""

import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.lib.arms import Job, arguments, results, run_missing
from bench.lib.baseline import ROOT, write_baseline
from mage_async.algorithm import InProcessRun, prepare
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.pages.charts import Series, line_chart
from mage_async.pages.templating import fill, svg
from mage_async.results.intervals import interval

FILE = ROOT / "docs" / "images" / "staleness_far.svg"
STEPS, EVERY, TRIALS, TRIALS_BETWEEN = 320, 32, 1024, 128
"""Steps of a run; steps between two evaluations; trials of the last one and of those before."""
CORRECTIONS = ("decoupled", "none", "m2po", "kpop", "ppo", "vcpo")
ARMS = [
    "decoupled, lag 256",
    "decoupled, lag 0",
    *(f"{name}, lag 256" for name in CORRECTIONS[1:]),
    "decoupled, lag 64",
    *(f"{name}, lag 64" for name in CORRECTIONS[1:]),
    *(f"decoupled, lag {lag}" for lag in (16, 8, 4)),
]


def main() -> int:
    """Run the arms that have no results yet, then report all results."""
    given = arguments(__doc__, "staleness_far", ARMS)
    run_missing(given, run, lambda job, folder: prepare(_config(job), folder))
    return _report(results(given, ARMS))


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Train one arm with one seed, and return the evaluations by step."""
    config, began = _config(job), time.monotonic()
    training = InProcessRun(config, prepare(config, folder))
    curve = {0: training.evaluate("heldout", TRIALS_BETWEEN).return_by_episode}
    for step in range(1, STEPS + 1):
        training.step()
        if step % EVERY == 0:
            trials = TRIALS if step == STEPS else TRIALS_BETWEEN
            curve[step] = training.evaluate("heldout", trials).return_by_episode
    return {"heldout_return_by_episode": curve, "wall_s": time.monotonic() - began}


def _config(job: Job) -> Config:
    correction, lag = job.arm.split(", lag ")
    settings = [
        f"seed={job.seed}",
        f"learner.steps={STEPS}",
        f"learner.correction={correction}",
        f"admission.lag={lag}",
        "admission.groups_per_step=4",
        "learner.minibatches=2",
    ]
    return config_file.load(config_file.find(None), settings)


def _report(found: dict[str, dict[int, Any]]) -> int:
    """Print the learning curves, write the baseline, and draw the picture."""
    last = {
        arm: {
            seed: [episodes[-1] for episodes in run["heldout_return_by_episode"].values()]
            for seed, run in by_seed.items()
        }
        for arm, by_seed in found.items()
        if by_seed
    }
    for arm, by_seed in last.items():
        mean, half = interval([curve[-1] for curve in by_seed.values()])
        text = "; ".join(" ".join(f"{value:+.2f}" for value in curve) for curve in by_seed.values())
        print(f"{arm:20} {mean:+.3f} ± {half:.3f}   {text}")
    write_baseline(
        "staleness_far",
        {"steps": STEPS, "trials": TRIALS, "evaluated_every": EVERY, "runs": found},
    )
    FILE.write_text(_picture(last))
    return 0


def _picture(last: dict[str, dict[int, list[float]]]) -> str:
    """Return an SVG: the last episode's mean return over seeds by step, with a line for each
    arm."""
    series = []
    for number, (arm, by_seed) in enumerate(last.items()):
        means = [fmean(values) for values in zip(*by_seed.values(), strict=True)]
        points = [(float(EVERY * place), mean) for place, mean in enumerate(means)]
        # The style sheet has nine colours, s0 to s8.
        series.append(Series(arm, points, f"s{number % 9}"))
    chart = line_chart(series, alt_text="Held-out return of the last episode, by step")
    style = f"{fill('style.css')} #all {{ background: var(--card); }}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 400" id="all"><style>{style}'
        f"</style>{svg(chart)}</svg>\n"
    )


if __name__ == "__main__":
    sys.exit(main())
