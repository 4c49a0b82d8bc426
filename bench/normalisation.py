"""Does a scale per opponent help where rewards differ in size? Kuhn poker with stakes from 1 to 50.

    python bench/normalisation.py [--run-dir DIR] [--seeds 0 1 2] [--parallel 2] [--only-report]

Members of a split play for chips worth 1 to 50 (the text never says it). Three scales of the
advantage are compared at equal budget: pooled over the batch (`[]`), over the group, and over all
that face one member (`["member"]`, agent-specific). Each run is on-policy in one process
(`in_process.py`); seeds share their warm start and tasks, so differences are taken seed by seed.
Returns are in chips per hand, each divided by its stake.
"""

import argparse
import itertools
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from baseline import write_baseline
from in_process import InProcess, prepare

from mage_async import config_file
from mage_async.config import Config
from mage_async.environments.kuhn import Kuhn
from mage_async.intervals import interval
from mage_async.score import Score

CONFIG = Path(__file__).parents[1] / "configs/kuhn.toml"
STEPS, TRIALS, STAKES = 40, 1024, 50.0
SCALES = {"batch": "[]", "group": '["group"]', "member": '["member"]'}
Job = tuple[str, int]


def main() -> int:
    """Run what is missing, then report what there is."""
    given = _arguments()
    given.run_dir.mkdir(parents=True, exist_ok=True)
    jobs: list[Job] = [(scale, seed) for seed in given.seeds for scale in SCALES]
    missing = [job for job in jobs if not _file(job, given.run_dir).exists()]
    if missing and not given.only_report:
        for seed in sorted({seed for _, seed in missing}):
            prepare(_config("batch", seed), given.run_dir)
        with ProcessPoolExecutor(given.parallel, mp_context=get_context("spawn")) as pool:
            for job in pool.map(run, missing, itertools.repeat(given.run_dir)):
                print(job, flush=True)
    found = {
        job: json.loads(_file(job, given.run_dir).read_text())
        for job in jobs
        if _file(job, given.run_dir).exists()
    }
    return _report(found)


def run(job: Job, folder: Path) -> Job:
    """Train one arm with one seed, and write down its last episode by member."""
    config = _config(*job)
    lab = InProcess(config, prepare(config, folder))
    lab.train()
    kuhn = Kuhn(**config.environment.options)
    sets = {split: _in_chips(lab.evaluate(split, TRIALS), kuhn) for split in ("train", "heldout")}
    _file(job, folder).write_text(json.dumps(sets))
    return job


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
    """Last episode's return by member, in chips."""
    return {name: each[-1] / kuhn.stake(name) for name, each in score.by_member.items()}


def _report(found: dict[Job, dict[str, dict[str, float]]]) -> int:
    seeds = sorted({seed for _, seed in found})
    kuhn = Kuhn("contrasts", stakes=STAKES)
    rows = []
    for split, half in itertools.product(("train", "heldout"), ("all", "cheap", "dear")):
        values = {
            scale: [
                _mean(found[scale, seed][split], kuhn, half)
                for seed in seeds
                if (scale, seed) in found
            ]
            for scale in SCALES
        }
        rows.append({"split": split, "stakes": half, "values": values, "gains": _gains(values)})
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


def _gains(values: dict[str, list[float]]) -> dict[str, tuple[float, float]]:
    """How much better the scale per member does than the others, seed by seed."""
    member = values["member"]
    return {
        other: interval([one - two for one, two in zip(member, values[other], strict=False)])
        for other in ("batch", "group")
        if min(len(member), len(values[other])) > 1
    }


def _mean(by_member: dict[str, float], kuhn: Kuhn, half: str) -> float:
    middle = STAKES**0.5
    wanted = {"all": (0.0, STAKES), "cheap": (0.0, middle), "dear": (middle, STAKES)}
    low, high = wanted[half]
    chosen = [value for name, value in by_member.items() if low <= kuhn.stake(name) <= high]
    return sum(chosen) / len(chosen)


def _file(job: Job, folder: Path) -> Path:
    return folder / f"{job[0]}-{job[1]}.json"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/normalisation"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--only-report", action="store_true", help="of the runs there are")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
