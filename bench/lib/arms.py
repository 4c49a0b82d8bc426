"""Run the arms of a study once for each seed, each run in a process of its own.

An arm is a named setting that a study compares with others. Each run leaves a JSON file, and is not
repeated if its file is there.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from bench.lib.options import option_parser


class Job(NamedTuple):
    """A run of a study."""

    arm: str
    """Name of the arm."""
    seed: int


Run = Callable[[Job, Path], dict[str, Any]]
"""Runs a job and returns its result. The folder is for what arms share, such as warm starts."""


def arguments(
    documentation: str | None, folder: str, arms: Iterable[str], *, named: bool = False
) -> argparse.Namespace:
    """Parse the options that every study has: `run_dir`, `seeds`, `arms`, `parallel`,
    `only_report`.

    Args:
        folder: Default folder of results, below `runs/`.
        named: Whether to add `name`, the name of the baseline; "" writes none.
    """
    names = list(arms)
    parser = option_parser(documentation)
    parser.add_argument("--run-dir", type=Path, default=Path("runs") / folder, metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=names, default=names, help="these alone")
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time")
    parser.add_argument("--only-report", action="store_true", help="run nothing")
    if named:
        parser.add_argument(
            "--name", default="", help="of the baseline; without it none is written"
        )
    return parser.parse_args()


def run_missing(
    given: argparse.Namespace,
    run: Run,
    prepare: Callable[[Job, Path], object],
) -> None:
    """Run the jobs that have no result file: all arms of a seed, then those of the next one.

    Args:
        run: Called in a process of its own, which also writes the result.
        prepare: Called in this process before each job, to make what arms share only once.
    """
    given.run_dir.mkdir(parents=True, exist_ok=True)
    jobs = [Job(arm, seed) for seed in given.seeds for arm in given.arms]
    missing = [job for job in jobs if not _file(job, given.run_dir).exists()]
    if not missing or given.only_report:
        return
    for job in missing:
        prepare(job, given.run_dir)
    with ProcessPoolExecutor(given.parallel, mp_context=get_context("spawn")) as pool:
        for job in pool.map(
            _run_one, itertools.repeat(run), missing, itertools.repeat(given.run_dir)
        ):
            print(f"{job.arm}, seed {job.seed}", flush=True)


def _run_one(run: Run, job: Job, folder: Path) -> Job:
    """Run a job and write its result; return the job, to be printed."""
    _file(job, folder).write_text(json.dumps(run(job, folder)))
    return job


def results(given: argparse.Namespace, arms: Iterable[str]) -> dict[str, dict[int, Any]]:
    """Return the results that exist of the chosen seeds, by arm and seed."""
    return {
        arm: {
            seed: json.loads(file.read_text()) for seed, file in _files(arm, given) if file.exists()
        }
        for arm in arms
    }


def _files(arm: str, given: argparse.Namespace) -> Sequence[tuple[int, Path]]:
    return [(seed, _file(Job(arm, seed), given.run_dir)) for seed in given.seeds]


def _file(job: Job, folder: Path) -> Path:
    return folder / f"{job.arm.replace(' ', '-')}-{job.seed}.json"
