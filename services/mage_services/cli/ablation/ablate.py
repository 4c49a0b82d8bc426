"""`mage ablate`: what staleness costs, by bound, rule, correction, lag and seed.

Every combination is a whole run in a folder of its own under `--run-dir`. The command resumes: what
is done is read, the rest is run, one process tree a run, as many side by side as there are CPU
cores. In the end `report.html`, `runs.csv` and `ablation.png` are there.
"""

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mage_async.admission.rules import RULES
from mage_async.errors import ConfigError

if TYPE_CHECKING:
    from mage_async.results.ablation_matrix import Ablation

HELP = "Measure what staleness costs: whole runs by bound, rule, correction, lag and seed."
FINAL_TRIALS = 512
"""Tasks of a final set: a return within ± 0.03, and a tenth of a run's time."""
BOUNDS = (0, 1, 2, 4, 8)
GRANT_RULES = ("slots", "count", "drop")
CORRECTIONS = ("decoupled", "none", "ppo")
LAGS = (0,)
SEEDS = (0, 1, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the matrix, and how its runs are started."""
    parser.epilog = (
        "Every combination is a whole run; the default matrix has 135. The same command again goes "
        "on where it stopped."
    )
    parser.add_argument("--config", help="a TOML file, or the name of a shipped one (quickstart)")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/ablation"), metavar="DIR", help="(%(default)s)"
    )
    _add_matrix(parser)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="in every run")
    trials = f"tasks of each final set ({FINAL_TRIALS})"
    parser.add_argument("--trials", type=int, default=FINAL_TRIALS, metavar="N", help=trials)
    parser.add_argument("--actors", type=int, default=1, metavar="N", help="actors of a run (1)")
    parallel = "runs side by side (the number of CPU cores; a run with one actor fills one core)"
    parser.add_argument("--parallel", type=int, default=_num_cores(), metavar="N", help=parallel)
    for_s = "begin no run later than so many seconds from now"
    parser.add_argument("--for-s", type=float, default=math.inf, metavar="S", help=for_s)


def _add_matrix(parser: argparse.ArgumentParser) -> None:
    """Declare the axes of the matrix; each help text ends with the default."""

    def axis(name: str, default: tuple[int, ...] | tuple[str, ...], text: str, **more: Any) -> None:
        shown = " ".join(map(str, default))
        parser.add_argument(
            name, nargs="+", default=list(default), help=f"{text} ({shown})", **more
        )

    axis("--bounds", BOUNDS, "largest staleness in steps", type=int, metavar="N")
    rules = f"rules of admission, of {', '.join(RULES)}"
    axis("--rules", GRANT_RULES, rules, choices=RULES, metavar="RULE")
    axis("--corrections", CORRECTIONS, "values of learner.correction", metavar="NAME")
    lag = "act with the weights of so many steps ago: age without a change of speed"
    axis("--lags", LAGS, lag, type=int, metavar="N")
    axis("--seeds", SEEDS, "seeds", type=int, metavar="N")


def run(given: argparse.Namespace) -> int:
    """Check every configuration of the matrix, run what is missing, and write the report.

    Returns: 1 where a run failed.
    """
    from mage_services.cli.ablation.runs import run_ablation

    return run_ablation(ablation_of(given))


def ablation_of(given: argparse.Namespace) -> "Ablation":
    """The matrix that a command line asks for.

    Raises: ConfigError: a cell of it is no run; the sentence says which and why.
    """
    from mage_async.config import config_file
    from mage_async.results.ablation import cells
    from mage_async.results.ablation_matrix import Ablation, checked_configs

    if given.parallel < 1 or given.actors < 1:
        raise ConfigError("--parallel and --actors must be at least 1")
    file = config_file.find(given.config)
    wanted = cells(
        bounds=given.bounds,
        rules=given.rules,
        corrections=given.corrections,
        lags=given.lags,
        seeds=given.seeds,
    )
    cheap = ["evaluation.every=0", f"evaluation.final_trials={given.trials}"]
    configs = checked_configs(file, wanted, [*cheap, *given.set])
    title = " · ".join([file.stem, *given.set])
    return Ablation(given.run_dir, title, configs, given.actors, given.parallel, given.for_s)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
