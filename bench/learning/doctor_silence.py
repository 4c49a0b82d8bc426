"""Check that the doctor (`mage doctor`) finds nothing in healthy runs.

    python -m bench.learning.doctor_silence [--configs quickstart scout kuhn] [--seeds 0 1 2 3 4]
        [--run-dir DIR] [--actors 4] [--only-report]

Every run is `python -m mage_async.launch` in a process of its own. A run that has ended in DIR is
not made again, an interrupted one is resumed, and `--only-report` makes none. The program prints a
line for each run, then its findings, and writes a baseline. The exit status is 1 if there is a
finding, or no run at all.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.doctor import examine
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_records


def ran(config: str, seed: int, folder: Path, actors: int) -> RunDirectory:
    """Make a run, or resume it if it was interrupted, or do nothing if it has ended; return its
    directory.
    """
    run = RunDirectory(folder / f"{config}-{seed}")
    if not _has_ended(run):
        command = [sys.executable, "-m", "mage_async.launch", "--run-dir", str(run.root)]
        begun = ["--config", config, "--seed", str(seed), "--actors", str(actors)]
        command += ["--resume"] if run.config.is_file() else begun
        # Warm starts are cached beside the runs, not in the user's cache.
        own_cache = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=own_cache)
    return run


def main() -> None:
    """Examine all runs, and print the findings."""
    given = _arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.run_dir or Path(temporary)
        rows = [
            _row(config, seed, ran(config, seed, folder, given.actors))
            for config in given.configs
            for seed in given.seeds
            if not given.only_report or _has_ended(RunDirectory(folder / f"{config}-{seed}"))
        ]
    num_findings = sum(len(row["findings"]) for row in rows)
    is_ok = bool(rows) and not num_findings
    print(f"{len(rows)} runs, {num_findings} findings: {'ok' if is_ok else 'MISSED'}")
    write_baseline("doctor_silence", {"rows": rows})
    sys.exit(not is_ok)


def _row(config: str, seed: int, run: RunDirectory) -> dict[str, Any]:
    """Print and return the findings of a run."""
    records = read_records(run)
    sentences = [finding.sentence() for finding in examine(records)]
    print(f"{config:12} seed {seed}  {len(records.metrics)} steps  {len(sentences)} findings")
    for sentence in sentences:
        print(f"    {sentence}")
    steps = len(records.metrics)
    return {"config": config, "seed": seed, "steps": steps, "findings": sentences}


def _has_ended(run: RunDirectory) -> bool:
    return run.evaluation.exists()


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--configs", nargs="+", default=["quickstart", "scout", "kuhn"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--run-dir", type=Path, help="where the runs stay, and are found again")
    parser.add_argument("--actors", type=int, default=4, help="of each run")
    parser.add_argument("--only-report", action="store_true", help="of the runs there are")
    return parser.parse_args()


if __name__ == "__main__":
    main()
