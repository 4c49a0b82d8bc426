"""What `mage ablate` and `mage sweep` have in common: how the runs of a matrix are started."""

import argparse
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mage_async.config.methods import METHODS
from mage_async.errors import ConfigError

if TYPE_CHECKING:
    from mage_async.results.matrices.ablation import Cell
    from mage_async.results.matrices.matrix import Matrix, Subject

FINAL_TRIALS = 512
"""Tasks of a final set: a return within ± 0.03, and a tenth of a run's time."""


def add_run_arguments(parser: argparse.ArgumentParser, run_dir: str) -> None:
    """Declare the configuration, and how many runs there are at once, where and for how long."""
    parser.add_argument("--config", help="a TOML file, or the name of a shipped one (quickstart)")
    parser.add_argument(
        "--run-dir", type=Path, default=Path(run_dir), metavar="DIR", help="(%(default)s)"
    )
    parser.add_argument(
        "--method", choices=METHODS, metavar="NAME", help="a method in every run, before --set"
    )
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="in every run")
    trials = f"tasks of each final set ({FINAL_TRIALS})"
    parser.add_argument("--trials", type=int, default=FINAL_TRIALS, metavar="N", help=trials)
    parser.add_argument("--actors", type=int, default=1, metavar="N", help="actors of a run (1)")
    parallel = "runs side by side (the number of CPU cores; a run with one actor fills one core)"
    parser.add_argument("--parallel", type=int, default=_num_cores(), metavar="N", help=parallel)
    for_s = "begin no run later than so many seconds from now"
    parser.add_argument("--for-s", type=float, default=math.inf, metavar="S", help=for_s)


def matrix_of(
    given: argparse.Namespace, wanted: Iterable["Cell"], subject: "Subject", said: Sequence[str]
) -> "Matrix":
    """The matrix of some cells, with a title that has the configuration and what is `said`.

    Raises: ConfigError: a cell of it is no run; the sentence says which and why.
    """
    from mage_async.config import config_file
    from mage_async.results.matrices.matrix import Matrix, checked_configs

    if given.parallel < 1 or given.actors < 1:
        raise ConfigError("--parallel and --actors must be at least 1")
    file = config_file.find(given.config)
    cheap = ["evaluation.every=0", f"evaluation.final_trials={given.trials}"]
    configs = checked_configs(file, wanted, [*cheap, *given.set], given.method)
    method = [] if given.method is None else [given.method]
    title = " · ".join([file.stem, *method, *said, *given.set])
    return Matrix(given.run_dir, title, configs, given.actors, given.parallel, given.for_s, subject)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
