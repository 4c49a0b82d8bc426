"""Compare the exact value of a probe in Scout with its estimate from the trials of one step.

The comparison shows why `bench.learning.scout_sweep` needs many trials near a threshold.

    python -m bench.learning.scout_noise [--groups 8] [--seeds 0 1 2] [--run-dir DIR]

In every step's batch it computes, from the learner's advantages, the advantage of a probe in the
first episode minus that of passing there, with its standard error. If that error is larger than the
exact gain, the direction of a step is mostly chance. *Trials needed* are those that would reduce
the error to half the gain, at the step's share of probes and spread.
"""

import argparse
import math
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from bench.learning.scout_sweep import CONFIG, STEPS, config_of
from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.algorithm import InProcessRun, prepare
from mage_async.config import config_file
from mage_async.config.components import CREDITS
from mage_async.credit.turn_table import build_table
from mage_async.environments.games.scout import PASS, SCOUT, Payoffs
from mage_async.learning.advantages import GroupMean
from mage_async.trajectory import Group
from tests.helpers.game_values import cumulative_weights, differential_weights, gain_of_scouting

COST = 0.7
"""Price of a probe."""
CELLS = (("cumulative_paper", 0.845), ("differential", 0.64))
"""(credit, discount), equally far above their thresholds; the first failed with 64 trials a
step."""
CELL: tuple[Any, ...] = ("group", "kind", "episode", "index")
"""The advantage's groups of compared turns in `scout.toml`."""


def main() -> int:
    """Train each cell, print a line for each step, and write the baseline."""
    given = _arguments()
    policy = prepare(config_file.load(CONFIG, []), given.run_dir)
    rows = []
    for credit, discount in CELLS:
        weights = (differential_weights if credit == "differential" else cumulative_weights)(
            3, discount
        )
        gain = gain_of_scouting(Payoffs(cost=COST), weights)
        for seed in given.seeds:
            steps = observed(credit, discount, seed, given.groups, policy)
            rows.append(_row(credit, discount, seed, gain, steps))
            print(_line(rows[-1]), flush=True)
    # The number of trials of a step: `scout.toml` has groups of eight.
    name = f"scout_noise_{given.groups * 8}"
    write_baseline(name, {"groups": given.groups, "steps": STEPS, "rows": rows})
    return 0


def observed(
    credit: str, discount: float, seed: int, groups: int, policy: Path
) -> list[dict[str, float]]:
    """Train once; return for each step the estimated value of a probe in the first episode."""
    config = config_of(credit, COST, discount, seed, groups)
    training, steps = InProcessRun(config, policy), []

    def look(batch: list[Group]) -> None:
        steps.append(estimate(batch, credit, discount))

    training.train(look)
    return steps


def estimate(batch: list[Group], credit: str, discount: float) -> dict[str, float]:
    """Return a batch's share of probes, their estimated value, and its standard error."""
    table = build_table(batch, CREDITS.load(credit)(episode_discount=discount))
    values = GroupMean(baseline=list(CELL), scale="none").estimate(table, "cpu").numpy()
    actions = np.array([u.action for group in batch for one in group.trials for u in one.turns])
    is_first = table.episode == 0
    probes, passes = (values[is_first & (actions == name)] for name in (SCOUT, PASS))
    is_known = len(probes) > 1 and len(passes) > 1
    return {
        "share": len(probes) / float(is_first.sum()),
        "difference": float(probes.mean() - passes.mean()) if is_known else math.nan,
        "error": math.sqrt(probes.var() / len(probes) + passes.var() / len(passes))
        if is_known
        else math.inf,
        "spread": float(values[is_first].std()),
        "trials": sum(len(group.trials) for group in batch),
    }


def _row(
    credit: str, discount: float, seed: int, gain: float, steps: list[dict[str, float]]
) -> dict[str, Any]:
    """Return the figures of one run; `gain` is the exact value of a probe."""
    known = [step for step in steps if math.isfinite(step["error"])]
    needed = [step["trials"] * (step["error"] / (gain / 2)) ** 2 for step in known]
    return {
        "credit": credit,
        "discount": discount,
        "seed": seed,
        "gain": gain,
        "shares": [round(step["share"], 4) for step in steps],
        "least_share": min(step["share"] for step in steps),
        "spread_first": steps[0]["spread"],
        "error_over_gain": median(step["error"] / gain for step in known),
        "trials_needed": median(needed),
        "mean_difference": fmean(step["difference"] for step in known),
    }


def _line(row: dict[str, Any]) -> str:
    shares = " ".join(f"{share:.2f}" for share in row["shares"])
    return (
        f"{row['credit']} {row['discount']} seed {row['seed']}: gain {row['gain']:+.3f}, spread "
        f"{row['spread_first']:.2f} at first, error of a step {row['error_over_gain']:.1f} gains, "
        f"needs {row['trials_needed']:.0f} trials a step\n  probes {shares}"
    )


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/scout_sweep"))
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
