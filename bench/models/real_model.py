"""Does a real language model learn to adapt? Runs of SmolLM2 and of single-episode RL beside them.

    python -m bench.models.real_model MODEL_DIR [--seeds 0 1 2] [--only boxes rps]
        [--run-dir DIR] [--parallel 1] [--only-report]

MODEL_DIR holds SmolLM2-135M-Instruct. Every run is `mage train` with one actor; its control has the
same warm start and number of episodes, each a trial of its own. Prints the held-out return of every
episode beside its controls, seed by seed, then what must hold. A run that has been measured is not
run again; `--only-report` runs none. Exits with status 1 where a threshold is missed.
"""

import argparse
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.learning.cases import Case, Summary
from bench.learning.shipped import is_measured, run, run_dir_of
from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.results.intervals import interval

TURNS = {"boxes": 10, "rps": 12}
"""Actions of a trial in the evaluation."""
SETS = ("train", "heldout", "heldout_blind", "heldout_swapped")


def main() -> None:
    """Run the tasks, print what each seed showed, and what had to be shown."""
    given = _arguments()
    jobs = [
        (_case(task, control, given.model), seed)
        for task in given.only
        for seed in given.seeds
        for control in (False, True)
    ]
    jobs = [
        job for job in jobs if not given.only_report or is_measured(run_dir_of(*job, given.run_dir))
    ]
    with ThreadPoolExecutor(given.parallel) as pool:
        ended = pool.map(lambda job: run(*job, given.run_dir, actors=1), jobs)
        summaries = {
            (case.name, seed): summary for (case, seed), summary in zip(jobs, ended, strict=True)
        }
    for (name, seed), summary in summaries.items():
        _print_run(name, seed, summary)
    rows = [row for task in given.only for row in _rows(task, summaries)]
    for row in rows:
        values = "  ".join(f"{value:8.4g}" for value in row["values"])
        print(f"{row['case']:6} {row['check']:58} {values}  {'ok' if row['ok'] else 'MISSED'}")
    by_run = {f"{name}, seed {seed}": summary for (name, seed), summary in summaries.items()}
    write_baseline("_".join(["real_model", *given.only]), {"rows": rows, "summaries": by_run})
    sys.exit(not all(row["ok"] for row in rows))


def _case(task: str, is_control: bool, model: Path) -> Case:
    suffix = "_single_episode" if is_control else ""
    return Case(
        f"{task}{suffix}", f"smollm2_{task}{suffix}", (f"policy.source={model.resolve()}",), {}
    )


def _print_run(name: str, seed: int, summary: Summary) -> None:
    print(f"{name}, seed {seed}: {summary['wall_s'] / 60:.1f} min")
    for split in SETS:
        evaluation = summary["evaluation"][split]
        pairs = zip(evaluation["return_by_episode"], evaluation["ci95_by_episode"], strict=True)
        said = "  ".join(f"{value:+.2f} ± {width:.2f}" for value, width in pairs)
        print(f"    {split:16} {said}")


def _rows(task: str, summaries: dict[tuple[str, int], Summary]) -> list[dict[str, Any]]:
    runs = {seed: each for (name, seed), each in summaries.items() if name == task}
    controls = {
        seed: each for (name, seed), each in summaries.items() if name == f"{task}_single_episode"
    }
    last = [_last(each) for each in runs.values()]
    minutes, least = {"boxes": (45, 0.8), "rps": (90, -math.inf)}[task]
    swapped = [_last(each, "heldout_swapped") for each in runs.values()]
    valid = [_valid(task, each) for each in runs.values()]
    walls = [each["wall_s"] / 60 for each in runs.values()]
    rows = [
        _row(task, "held-out, last episode", last, all(value >= least for value in last)),
        _row(task, "the same, swapped <= 0.5", swapped, all(value <= 0.5 for value in swapped)),
        _row(task, "valid actions >= 0.99", valid, all(value >= 0.99 for value in valid)),
        _row(task, f"minutes <= {minutes}", walls, all(value <= minutes for value in walls)),
    ]
    gaps = [_last(runs[seed]) - _last(controls[seed]) for seed in runs if seed in controls]
    if len(gaps) > 1:
        mean, width = interval(gaps)
        rows += [
            _row(task, "above single-episode RL", gaps, min(gaps) > 0),
            _row(task, "the same: mean, 95 % over seeds", [mean, width], mean > width),
        ]
    return rows


def _row(task: str, check: str, values: list[float], is_ok: bool) -> dict[str, Any]:
    return {"case": task, "check": check, "values": values, "ok": is_ok}


def _last(summary: Summary, split: str = "heldout") -> float:
    return summary["evaluation"][split]["return_by_episode"][-1]


def _valid(task: str, summary: Summary) -> float:
    return 1 - summary["evaluation"]["heldout"]["invalid_actions_per_trial"] / TURNS[task]


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="SmolLM2-135M-Instruct")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(TURNS), default=["boxes"])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/real_model"), metavar="DIR")
    parser.add_argument("--parallel", type=int, default=1, help="runs side by side")
    parser.add_argument("--only-report", action="store_true", help="of the runs there are")
    return parser.parse_args()


if __name__ == "__main__":
    main()
