"""Train the shipped configurations, and check that they learn to adapt, by their thresholds.

    python -m bench.learning.shipped [--seeds 0 1 2] [--only quickstart scout kuhn …]
        [--run-dir DIR] [--parallel 1] [--actors 4] [--only-report]

Every run is `python -m mage_async.launch` in a process of its own. Warm starts are cached beside
the runs, so a control begins with the warm start of its seed, and only the first run's time
includes it. With a DIR the runs stay there, and a finished one is not run again; `--only-report`
runs none. The program prints a line for each check of `bench/learning/cases.py`, with its figure in
each seed, and writes a baseline (with `--only`, one of its own name). The exit status is 1 if a
threshold is missed."""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.learning.cases import CASES, GAPS, Case, Summary, episode_3
from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.results.intervals import interval


def run(case: Case, seed: int, folder: Path, actors: int) -> Summary:
    """Return the summary of a run, which is trained unless its results are in the folder."""
    run_dir = run_dir_of(case, seed, folder)
    if not is_measured(run_dir):
        shutil.rmtree(run_dir, ignore_errors=True)  # it was interrupted
        command = [sys.executable, "-m", "mage_async.launch", "--config", case.config]
        command += ["--actors", str(actors), "--seed", str(seed), "--run-dir", str(run_dir)]
        for change in case.changes:
            command += ["--set", change]
        own_cache = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=own_cache)
    return json.loads((run_dir / "summary.json").read_text())


def main() -> None:
    """Run the cases, and print the figures of each seed."""
    given = _arguments()
    cases = [case for case in CASES if not given.only or case.name.startswith(tuple(given.only))]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(given.parallel) as pool:
        folder = given.run_dir or Path(temporary)
        runs = {
            (case.name, seed): pool.submit(run, case, seed, folder, given.actors)
            for case in cases
            for seed in given.seeds
            if not given.only_report or is_measured(run_dir_of(case, seed, folder))
        }
        summaries: dict[str, dict[int, Summary]] = {case.name: {} for case in cases}
        for (name, seed), ended in runs.items():
            summaries[name][seed] = ended.result()
    rows = [row for case in cases for row in _rows(case, summaries[case.name])]
    rows += _gaps(summaries)
    for row in rows:
        values = "  ".join(f"{value:8.4g}" for value in row["values"])
        print(f"{row['case']:26} {row['check']:46} {values}  {'ok' if row['ok'] else 'MISSED'}")
    # For example `learning_kuhn`: a part does not replace the baseline of the whole.
    name = "_".join(["learning", *(given.only or ())])
    recorded = {
        case: {seed: without_parts(each) for seed, each in by_seed.items()}
        for case, by_seed in summaries.items()
    }
    write_baseline(name, {"seeds": given.seeds, "rows": rows, "summaries": recorded})
    sys.exit(not all(row["ok"] for row in rows))


def without_parts(summary: Summary) -> Summary:
    """Return a summary without the scores of single opponents or boards, of which there may be
    hundreds.
    """
    sets = {
        name: {key: value for key, value in score.items() if key != "parts"}
        for name, score in summary["evaluation"].items()
    }
    return summary | {"evaluation": sets}


def run_dir_of(case: Case, seed: int, folder: Path) -> Path:
    """Return the run directory of a case and seed."""
    return folder / f"{case.name}-{seed}".replace(",", "").replace(" ", "_")


def is_measured(run_dir: Path) -> bool:
    """Return whether the run has ended with its final evaluation."""
    return (run_dir / "evaluation.json").exists()


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="cases whose name begins so")
    parser.add_argument("--run-dir", type=Path, help="where the runs stay, and are found again")
    parser.add_argument("--parallel", type=int, default=1, help="runs side by side")
    parser.add_argument("--actors", type=int, default=4, help="of each run")
    parser.add_argument("--only-report", action="store_true", help="of the runs there are")
    return parser.parse_args()


def _rows(case: Case, summaries: dict[int, Summary]) -> list[dict[str, Any]]:
    made = []
    for check, (measure, holds) in case.checks.items():
        values = [measure(summary) for summary in summaries.values()]
        made.append(
            {"case": case.name, "check": check, "values": values, "ok": all(map(holds, values))}
        )
    return made


def _gaps(summaries: dict[str, dict[int, Summary]]) -> list[dict[str, Any]]:
    """Return rows of the gaps in held-out episode 3 to the controls: by seed, then their mean.

    A seed's gap has to exceed the 95 % interval of its two evaluations, and the mean that over
    seeds (Student's t)."""
    made = []
    for (name, control), least in GAPS.items():
        one, other = summaries.get(name, {}), summaries.get(control, {})
        pairs = [(one[seed], other[seed]) for seed in one if seed in other]
        if not pairs:
            continue
        measure = episode_3("heldout")
        gaps = [measure(meta) - measure(alone) for meta, alone in pairs]
        widths = [math.hypot(*(_width(summary) for summary in pair)) for pair in pairs]
        ok = min(gaps) >= least and all(gap > w for gap, w in zip(gaps, widths, strict=True))
        check = f"held-out episode 3 below {name} >= {least:.2f}"
        made.append({"case": control, "check": check, "values": gaps, "ok": ok})
        if len(gaps) > 1:
            mean, width = interval(gaps)
            check = "the same: mean, 95 % over seeds"
            made.append(
                {"case": control, "check": check, "values": [mean, width], "ok": mean > width}
            )
    return made


def _width(summary: Summary) -> float:
    """Return the half-width of the 95 % interval of held-out episode 3."""
    return summary["evaluation"]["heldout"]["ci95_by_episode"][2]


if __name__ == "__main__":
    main()
