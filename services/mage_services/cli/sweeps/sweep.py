"""`mage sweep`: whole runs over the values of any keys, and their results on one page.

Every combination with every seed is a run in a folder of its own under `--run-dir`, started,
resumed and read as those of `mage ablate` are.
"""

import argparse
from typing import TYPE_CHECKING

from mage_async.errors import ConfigError
from mage_services.cli.sweeps.matrix_arguments import add_run_arguments, matrix_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mage_async.results.matrices.matrix import Matrix
    from mage_async.results.matrices.sweep import Axis, Combination

HELP = "Compare values of any keys: whole runs by combination and seed, and one page of results."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which keys are varied, and how values are combined."""
    parser.epilog = (
        "Without --random and --search every combination is run. The same command again goes on "
        "where it stopped. `mage config` explains the keys."
    )
    add_run_arguments(parser, "runs/sweep")
    over = "values of a key, or a range: KEY=LOW..HIGH, KEY=LOW..HIGH:log; may be given again"
    parser.add_argument("--over", action="append", default=[], metavar="KEY=V1,V2", help=over)
    seeds = "seeds of the runs, by commas or spaces (0)"
    parser.add_argument("--seeds", nargs="+", default=["0"], metavar="N", help=seeds)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--random", type=int, metavar="N", help="N combinations drawn at random")
    search = "N combinations, each chosen by what the ones before reached (extra `search`: Optuna)"
    ways.add_argument("--search", type=int, metavar="N", help=search)
    draw = "seed of --random and --search (0)"
    parser.add_argument("--draw-seed", type=int, default=0, metavar="N", help=draw)


def run(given: argparse.Namespace) -> int:
    """Check every configuration, run what is missing, and write the report.

    Returns: 1 where a run failed.
    """
    from mage_services.cli.sweeps.runs import run_matrix
    from mage_services.cli.sweeps.search import search

    if given.search is None:
        return run_matrix(sweep_of(given))
    axes, seeds = _axes(given), _seeds(given)

    def matrix(found: "Sequence[Combination]") -> "Matrix":
        return _matrix(given, axes, found, seeds)

    return search(axes, given.search, given.draw_seed, matrix)


def sweep_of(given: argparse.Namespace) -> "Matrix":
    """The matrix that a command line without --search asks for.

    Raises: ConfigError: a combination of it is no run, or cannot be made.
    """
    from mage_async.results.matrices.sweep import drawn, grid

    axes = _axes(given)
    found = grid(axes) if given.random is None else drawn(axes, given.random, given.draw_seed)
    return _matrix(given, axes, found, _seeds(given))


def _matrix(
    given: argparse.Namespace,
    axes: "Sequence[Axis]",
    found: "Sequence[Combination]",
    seeds: "Sequence[int]",
) -> "Matrix":
    from mage_async.results.matrices.matrix import Subject
    from mage_async.results.matrices.sweep import sweep_cells

    subject = Subject(", ".join(axis.key for axis in axes), axes[0].key)
    return matrix_of(given, sweep_cells(found, seeds), subject, given.over)


def _axes(given: argparse.Namespace) -> "list[Axis]":
    """The keys that are varied.

    Raises: ConfigError: there is none, or one is named twice.
    """
    from mage_async.results.matrices.sweep import axis_of

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


def _seeds(given: argparse.Namespace) -> list[int]:
    try:
        return [int(part) for text in given.seeds for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds takes whole numbers, got {' '.join(given.seeds)!r}") from None
