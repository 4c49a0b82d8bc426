"""Find the discount at which probing begins in Scout, under two credits and several prices.

    python -m bench.learning.scout_sweep [--run-dir DIR] [--parallel 2] [--only-report]

In Scout an agent can pay to probe, which shows what earns most in the later episodes only. The
discount between episodes above which probing pays is known exactly for each credit and price
(`mage_async/environments/games/scout.py`). Every cell is a short on-policy run in one process
(`mage_async/algorithm.py`), all from one warm start; a cell whose file exists is not run again. The
program prints a table, and writes the baseline and `scout_sweep.svg`. The exit status is 1 if a
policy probes, or does not, more than 0.05 on the wrong side of a threshold.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.learning.scout_picture import draw
from bench.lib.baseline import ROOT, write_baseline
from bench.lib.options import option_parser
from mage_async.algorithm import InProcessRun, prepare
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.environments.games.scout import Payoffs
from tests.helpers.game_values import cumulative_threshold, differential_threshold

STEPS, GROUPS, TRIALS = 14, 32, 128
"""Steps of a cell, groups of a step, and trials of an evaluation."""
TOLERANCE = 0.05
"""Distance from the exact threshold within which a policy may probe or not."""
CONFIG = ROOT / "configs/scout.toml"
DISCOUNTS = {
    ("differential", 2.0): (0.5, 0.7, 0.72, 0.82, 1.0),
    ("differential", 0.7): (0.5, 0.54, 0.64, 1.0),
    ("cumulative_paper", 2.0): (0.6, 1.0),
    ("cumulative_paper", 0.7): (0.6, 0.745, 0.845, 1.0),
}
"""Discounts by credit and price of probing: close together near the threshold, coarse elsewhere."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A run of the sweep: its credit, price of probing, discount and seed."""

    credit: str
    cost: float
    discount: float
    seed: int

    def file(self, folder: Path) -> Path:
        """Return the file of its result."""
        return folder / f"{self.credit}-{self.cost}-{self.discount}-{self.seed}.json"

    def distance(self) -> float:
        """Return the distance from the threshold; the nearest cells run first."""
        limit = threshold(self.credit, self.cost)
        return 1.0 if limit is None else abs(self.discount - limit)


def main() -> int:
    """Run the arms that have no results yet, then report all results."""
    given = _arguments()
    given.run_dir.mkdir(parents=True, exist_ok=True)
    cells = [
        Cell(*arm, discount, seed)
        for seed in given.seeds
        for arm, discounts in DISCOUNTS.items()
        for discount in discounts
    ]
    cells.sort(key=Cell.distance)
    missing = [cell for cell in cells if not cell.file(given.run_dir).exists()]
    if missing and not given.only_report:
        policy = prepare(config_file.load(CONFIG, []), given.run_dir)
        with ProcessPoolExecutor(given.parallel, mp_context=get_context("spawn")) as pool:
            for cell in pool.map(run, missing, itertools.repeat(policy)):
                print(cell, flush=True)
    return _report([cell for cell in cells if cell.file(given.run_dir).exists()], given.run_dir)


def run(cell: Cell, policy: Path) -> Cell:
    """Train one cell, and write what it does on held-out codes."""
    config = config_of(cell.credit, cell.cost, cell.discount, cell.seed, GROUPS)
    training = InProcessRun(config, policy)
    training.train()
    found = training.evaluate("heldout", TRIALS)
    result = {
        "returns": found.return_by_episode,
        "probes": found.probes_by_episode,
        "probing": sum(found.probes_by_episode[:2]),
        "total": sum(found.return_by_episode),
        "last": found.return_by_episode[-1],
    }
    cell.file(policy.parent).write_text(json.dumps(asdict(cell) | result))
    return cell


def config_of(credit: str, cost: float, discount: float, seed: int, groups: int) -> Config:
    """Return `scout.toml` with fewer steps and the cell's keys."""
    return config_file.load(
        CONFIG,
        [
            f"environment.options={{cost={cost}}}",
            f"credit.kind={credit}",
            f"credit.episode_discount={discount}",
            f"learner.steps={STEPS}",
            f"admission.groups_per_step={groups}",
            f"seed={seed}",
        ],
    )


def threshold(credit: str, cost: float) -> float | None:
    """Return the exact discount above which probing pays; None if it never does."""
    payoffs = Payoffs(cost=cost)
    if credit == "differential":
        return differential_threshold(payoffs)
    return cumulative_threshold(payoffs, 3)


def _report(cells: Sequence[Cell], folder: Path) -> int:
    """Print the table and the verdict, write baseline and picture; return the exit status."""
    found = [json.loads(cell.file(folder).read_text()) for cell in cells]
    rows, faults = [], []
    for (credit, cost), discounts in DISCOUNTS.items():
        limit = threshold(credit, cost)
        for discount in discounts:
            same = [
                each
                for each in found
                if (each["credit"], each["cost"], each["discount"]) == (credit, cost, discount)
            ]
            if not same:
                continue
            row = _row(credit, cost, discount, limit, same)
            rows.append(row)
            if not row["ok"]:
                faults.append(f"{credit} {cost} at {discount}")
    print(f"{'credit':18} cost discount exact   probing      last         total")
    for row in rows:
        exact = "never" if row["threshold"] is None else f"{row['threshold']:.3f}"
        spans = "  ".join(
            f"{min(row[k]):5.2f}…{max(row[k]):5.2f}" for k in ("probing", "last", "total")
        )
        verdict = "" if row["ok"] else "  MISSED"
        print(f"{row['credit']:18} {row['cost']:4} {row['discount']:6}   {exact}  {spans}{verdict}")
    print("verdict: " + ("; ".join(faults) or f"flips within {TOLERANCE} of every threshold"))
    write_baseline(
        "scout_sweep",
        {"steps": STEPS, "groups": GROUPS, "trials": TRIALS, "rows": rows, "faults": faults},
    )
    (ROOT / "bench" / "scout_sweep.svg").write_text(draw(rows))
    return 1 if faults else 0


def _row(
    credit: str, cost: float, discount: float, limit: float | None, same: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the row of one discount. Within the tolerance of the threshold it has no bound."""
    values = {key: [each[key] for each in same] for key in ("probing", "last", "total")}
    mean = fmean(values["probing"])
    # 0.005: the discounts at the edge of the tolerance are rounded.
    pays = limit is not None and discount >= limit + TOLERANCE - 0.005
    does_not = limit is None or discount <= limit - TOLERANCE + 0.005
    ok = (not pays or mean >= 0.5) and (not does_not or mean < 0.5)
    identity = {"credit": credit, "cost": cost, "discount": discount, "threshold": limit}
    return identity | {"seeds": len(same), "ok": ok} | values


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/scout_sweep"))
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only-report", action="store_true", help="of the cells there are")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
