"""Does a real language model learn to adapt? Runs of SmolLM2 and of single-episode RL beside them.

    python -m bench.models.real_model MODEL_DIR [--seeds 0 1 2] [--run-dir DIR] [--parallel 1]
        [--only-report]

MODEL_DIR holds SmolLM2-135M-Instruct. Every run is `mage train` with one actor; its control has the
same warm start and number of episodes, each a trial of its own. Prints the held-out return of every
episode beside its controls, seed by seed, then what must hold. A run that has been measured is not
run again; `--only-report` runs none. Exits with status 1 where a threshold is missed.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.learning.cases import Case, Summary
from bench.learning.shipped import is_measured, run, run_dir_of
from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.results.intervals import interval

TASK, TURNS = "boxes", 10
"""What is learned, and the actions of a trial in the evaluation."""
MOST_MINUTES, LEAST_RETURN = 45, 0.8
SETS = ("train", "heldout", "heldout_blind", "heldout_swapped")


def main() -> None:
    """Run the tasks, print what each seed showed, and what had to be shown."""
    given = _arguments()
    jobs = [
        (_case(control, given.model), seed) for seed in given.seeds for control in (False, True)
    ]
    jobs = [
        job for job in jobs if not given.only_report or is_measured(run_dir_of(*job, given.run_dir))
    ]
    if not jobs:
        sys.exit(f"no run has ended in {given.run_dir}: leave --only-report out")
    with ThreadPoolExecutor(given.parallel) as pool:
        ended = pool.map(lambda job: run(*job, given.run_dir, actors=1), jobs)
        summaries = {
            (case.name, seed): summary for (case, seed), summary in zip(jobs, ended, strict=True)
        }
    for (name, seed), summary in summaries.items():
        _print_run(name, seed, summary)
    rows = _rows(summaries)
    for row in rows:
        values = "  ".join(f"{value:8.4g}" for value in row["values"])
        print(f"{row['check']:40} {values}  {'ok' if row['ok'] else 'MISSED'}")
    by_run = {f"{name}, seed {seed}": summary for (name, seed), summary in summaries.items()}
    write_baseline("real_model", {"rows": rows, "summaries": by_run})
    sys.exit(not all(row["ok"] for row in rows))


def _case(is_control: bool, model: Path) -> Case:
    name = f"{TASK}_single_episode" if is_control else TASK
    return Case(name, f"smollm2_{name}", (f"policy.source={model.resolve()}",), {})


def _print_run(name: str, seed: int, summary: Summary) -> None:
    print(f"{name}, seed {seed}: {summary['wall_s'] / 60:.1f} min")
    for split in SETS:
        evaluation = summary["evaluation"][split]
        pairs = zip(evaluation["return_by_episode"], evaluation["ci95_by_episode"], strict=True)
        said = "  ".join(f"{value:+.2f} ± {width:.2f}" for value, width in pairs)
        print(f"    {split:16} {said}")


def _rows(summaries: dict[tuple[str, int], Summary]) -> list[dict[str, Any]]:
    runs = {seed: each for (name, seed), each in summaries.items() if name == TASK}
    controls = {seed: each for (name, seed), each in summaries.items() if name != TASK}
    last = [_last(each) for each in runs.values()]
    swapped = [_last(each, "heldout_swapped") for each in runs.values()]
    valid = [_valid(each) for each in runs.values()]
    walls = [each["wall_s"] / 60 for each in runs.values()]
    rows = [
        _row(f"held-out, last episode >= {LEAST_RETURN}", last, min(last) >= LEAST_RETURN),
        _row("the same, swapped <= 0.5", swapped, max(swapped) <= 0.5),
        _row("valid actions >= 0.99", valid, min(valid) >= 0.99),
        _row(f"minutes <= {MOST_MINUTES}", walls, max(walls) <= MOST_MINUTES),
    ]
    gaps = [_last(runs[seed]) - _last(controls[seed]) for seed in runs if seed in controls]
    if len(gaps) > 1:
        mean, width = interval(gaps)
        rows += [
            _row("above single-episode RL", gaps, min(gaps) > 0),
            _row("the same: mean, 95 % over seeds", [mean, width], mean > width),
        ]
    return rows


def _row(check: str, values: list[float], is_ok: bool) -> dict[str, Any]:
    return {"check": check, "values": values, "ok": is_ok}


def _last(summary: Summary, split: str = "heldout") -> float:
    return summary["evaluation"][split]["return_by_episode"][-1]


def _valid(summary: Summary) -> float:
    return 1 - summary["evaluation"]["heldout"]["invalid_actions_per_trial"] / TURNS


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="SmolLM2-135M-Instruct")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/real_model"), metavar="DIR")
    parser.add_argument("--parallel", type=int, default=1, help="runs side by side")
    parser.add_argument("--only-report", action="store_true", help="of the runs there are")
    return parser.parse_args()


if __name__ == "__main__":
    main()
