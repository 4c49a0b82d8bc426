"""`mage sweep`: whole runs over the values of any keys, and their results on one page.

A *setting* is one combination of values. A *cell* is one run: a setting with a seed, in a folder of
its own under `--run-dir`. The *matrix* is all cells of a sweep. `sweep_runs.py` runs them;
`sweep_search.py` chooses settings for `--search`.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mage_async.errors import ConfigError
from mage_services.cli.options import add_config, add_number, add_set
from mage_services.processes.cores_and_memory import num_cores

if TYPE_CHECKING:
    from mage_async.results.sweep import Axis, Cell, Matrix, Setting, Subject

HELP = "Compare values of any keys: whole runs by combination and seed, and one page of results."
FINAL_TRIALS = 512
"""Number of tasks in each set of a run's final evaluation, by default: few enough for a tenth of
the run's time, and enough for an interval of ± 0.03.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the keys to vary, and how their values are combined."""
    parser.epilog = (
        "Without --random and --search every combination is run. The same command again goes on "
        "where it stopped. `mage config` explains the keys."
    )
    add_run_arguments(parser, "runs/sweep")
    over = "values of a key, or a range: KEY=LOW..HIGH, KEY=LOW..HIGH:log; once for each key"
    parser.add_argument("--over", action="append", default=[], metavar="KEY=V1,V2", help=over)
    seeds = "seeds of the runs, by commas or spaces (default: 0)"
    parser.add_argument("--seeds", nargs="+", default=["0"], metavar="N", help=seeds)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--random", type=int, metavar="N", help="N combinations drawn at random")
    search = (
        "N combinations: drawn at random until ten are done, then chosen by the results so far "
        "(extra `search`: Optuna)"
    )
    ways.add_argument("--search", type=int, metavar="N", help=search)
    draw = "seed of --random and --search (default: 0)"
    add_number(parser, "--draw-seed", draw, 0)


def run(given: argparse.Namespace) -> int:
    """Check every configuration, run the missing cells, and write the report.

    Returns:
        1 if a run failed, 128 + N if signal N ended the runs, else 0.

    Raises:
        ConfigError: a configuration is wrong, or `--search` continues a search over other keys.
        RunError: as `run_matrix`.
    """
    from mage_services.cli.sweep_runs import run_matrix
    from mage_services.cli.sweep_search import search

    if given.search is None:
        return run_matrix(sweep_of(given))
    axes = _axes(given)
    matrix_of_settings = partial(_matrix, given, axes, seeds=whole_numbers(given, "seeds"))
    return search(axes, given.search, given.draw_seed, matrix_of_settings)


def sweep_of(given: argparse.Namespace) -> "Matrix":
    """Return the matrix that a command line without --search asks for.

    Raises:
        ConfigError: a combination is no valid configuration.
    """
    from mage_async.results.sweep import drawn, grid

    axes = _axes(given)
    settings = grid(axes) if given.random is None else drawn(axes, given.random, given.draw_seed)
    return _matrix(given, axes, settings, whole_numbers(given, "seeds"))


def _matrix(
    given: argparse.Namespace,
    axes: Sequence["Axis"],
    settings: Sequence["Setting"],
    seeds: Sequence[int],
) -> "Matrix":
    """Return the matrix of the settings, each with each seed."""
    from mage_async.results.sweep import Subject, sweep_cells

    subject = Subject(heading=", ".join(axis.key for axis in axes), axis=axes[0].key)
    return matrix_of(given, sweep_cells(settings, seeds), subject, given.over)


def _axes(given: argparse.Namespace) -> "list[Axis]":
    """Return the keys to vary, with their values; check the counts of combinations too.

    Raises:
        ConfigError: there is no key, one is named twice or is `seed`, or a count is below 1.
    """
    from mage_async.results.sweep import axis_of

    axes = [axis_of(text) for text in given.over]
    keys = [axis.key for axis in axes]
    if not axes:
        raise ConfigError("--over KEY=V1,V2 is missing: which key is varied?")
    if len(set(keys)) < len(keys):
        raise ConfigError(f"--over names a key twice: {', '.join(keys)}")
    if "seed" in keys:
        raise ConfigError("--over seed: seeds are given by --seeds, and means are taken over them")
    for count in (given.random, given.search):
        if count is not None and count < 1:
            raise ConfigError(f"--random and --search must be at least 1, got {count}")
    return axes


# `mage ablate` uses the functions below too.


def whole_numbers(given: argparse.Namespace, name: str) -> list[int]:
    """Return the numbers of an option, which are separated by commas or spaces.

    Raises:
        ConfigError: a part is no whole number.
    """
    texts: list[str] = getattr(given, name)
    try:
        return [int(part) for text in texts for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--{name} takes whole numbers, got {' '.join(texts)!r}") from None


def add_run_arguments(parser: argparse.ArgumentParser, run_dir: str) -> None:
    """Declare the configuration, the folder, and how many runs go on at once and for how long."""
    add_config(parser)
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path(run_dir),
        metavar="DIR",
        help="folder of the runs (default: %(default)s)",
    )
    parser.add_argument(
        "--method", metavar="NAME", help="a method for every run; --set overrides its keys"
    )
    add_set(parser, "change a key in every run")
    trials = f"tasks of each final set (default: {FINAL_TRIALS})"
    add_number(parser, "--trials", trials, FINAL_TRIALS)
    add_number(parser, "--actors", "actors of a run (default: 1)", 1)
    parallel = (
        "runs side by side (default: the number of CPU cores; a run with one actor fills one core)"
    )
    add_number(parser, "--parallel", parallel, num_cores())
    for_s = "begin no run later than S seconds from now"
    add_number(parser, "--for-s", for_s, math.inf, type=float, metavar="S")


def matrix_of(
    given: argparse.Namespace, to_run: Iterable["Cell"], subject: "Subject", varied: Sequence[str]
) -> "Matrix":
    """Return the matrix of some cells, after a check of every configuration.

    Args:
        to_run: The cells of the matrix.
        subject: What the runs compare, for the report.
        varied: Words for the report's title, which also names configuration, method and `--set`.

    Raises:
        ConfigError: a cell is no valid configuration, or an option is wrong; the sentence says
            which and why.
    """
    from mage_async.config import config_file
    from mage_async.results.sweep import Matrix, checked_configs

    if given.parallel < 1 or given.actors < 1:
        raise ConfigError("--parallel and --actors must be at least 1")
    if not given.for_s >= 0:
        raise ConfigError(f"--for-s must be a number from 0, got {given.for_s:g}")
    cells = list(to_run)
    own = {_key(text) for cell in cells for text in cell.assignments()}
    if both := own.intersection(map(_key, given.set)):
        raise ConfigError(
            f"--set {min(both)}: `{given.parser.prog}` itself sets this key in every run, so --set "
            "has no effect on it: leave it out, and name the values by the option for them (--help)"
        )
    file = config_file.find(given.config)
    # No evaluation while a run trains, and a smaller one than usual at its end.
    cheap = ["evaluation.every=0", f"evaluation.final_trials={given.trials}"]
    configs = checked_configs(file, cells, [*cheap, *given.set], given.method)
    notes = {config_file.note_on_staleness(config, given.method) for config in configs.values()}
    # A matrix that compares corrections, as an ablation does, shows what each does.
    note = "" if "learner.correction" in own else max(notes, default="")
    method = [] if given.method is None else [given.method]
    title = " · ".join([file.stem, *method, *varied, *given.set])
    limits = given.actors, given.parallel, given.for_s
    return Matrix(given.run_dir, title, configs, *limits, subject, note)


def _key(assignment: str) -> str:
    """Return the key of an assignment `key=value`."""
    return assignment.partition("=")[0].strip()
