"""`mage ablate`: what staleness costs, by bound, rule, correction, lag and seed, over any
configuration.

Every combination is a whole run in a folder of its own under `--run-dir`. It resumes: what is done
is read, the rest is run, one process tree a run, as many side by side as there are processors. Left
there in the end: `report.html`, `runs.csv`, `ablation.png`.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mage_async.admission.rules import RULES
from mage_async.assembly import check
from mage_async.config import config_file
from mage_async.config.policy_source import check_source
from mage_async.config.schema import Config
from mage_async.errors import ConfigError, MageError
from mage_async.launch import EXIT_USAGE, become
from mage_async.results.ablation import Cell, cells

FINAL_TRIALS = 512
"""Tasks of a final set: a return within ± 0.03, and a tenth of a run's time."""


@dataclass(frozen=True, slots=True)
class Ablation:
    """What is to be run, checked."""

    root: Path
    title: str
    configs: dict[Cell, Config]
    num_actors: int
    parallel: int
    for_s: float


def main() -> None:
    """Check every configuration of the matrix, then become what runs it."""
    try:
        read_ablation(sys.argv[1:])
    except MageError as error:
        print(f"mage ablate: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    become("mage_services.cli.ablate", *sys.argv[1:])


def read_ablation(arguments: Sequence[str]) -> Ablation:
    """The matrix that a command line asks for.

    Raises: ConfigError: a cell of it is no run; the sentence says which and why.
    """
    given = _parser().parse_args(arguments)
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
    configs = {cell: _config(file, [*cheap, *given.set, *cell.assignments()]) for cell in wanted}
    title = " · ".join([file.stem, *given.set])
    return Ablation(given.run_dir, title, configs, given.actors, given.parallel, given.for_s)


def _config(file: Path, assignments: list[str]) -> Config:
    config = config_file.load(file, assignments)
    check(config)
    check_source(config.policy)
    return config


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mage ablate",
        description="Learning under staleness: whole runs by bound, rule of admission, correction, "
        "lag and seed. Run it again to go on where it stopped.",
    )
    parser.add_argument("--config", help="a TOML file, or the name of a shipped one (quickstart)")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/ablation"), metavar="DIR")
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4, 8], metavar="N")
    rules = ["slots", "count", "drop"]
    parser.add_argument("--rules", nargs="+", choices=RULES, default=rules, metavar="RULE")
    corrections = ["decoupled", "none", "ppo"]
    parser.add_argument("--corrections", nargs="+", default=corrections, metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    lag = "act with the weights of so many steps ago: age without a change of speed"
    parser.add_argument("--lags", type=int, nargs="+", default=[0], metavar="N", help=lag)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="in every run")
    trials = f"of each final set ({FINAL_TRIALS})"
    parser.add_argument("--trials", type=int, default=FINAL_TRIALS, metavar="N", help=trials)
    parser.add_argument("--actors", type=int, default=1, metavar="N", help="of each run (1)")
    parallel = "runs side by side (a run with one actor fills one processor)"
    parser.add_argument("--parallel", type=int, default=_processors(), metavar="N", help=parallel)
    for_s = "begin no run later than so many seconds from now"
    parser.add_argument("--for-s", type=float, default=math.inf, metavar="S", help=for_s)
    return parser


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    main()
