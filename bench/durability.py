"""What durability costs a whole run: `python bench/durability.py`, 4 minutes on an idle machine.

Quickstarts of a few steps in pairs, one as shipped and one whose `fsync` and `fdatasync` do nothing
(a small library loaded before libc, for these processes alone; needs a C compiler), in turn. The
time is that of training, from the second to the last commit, so neither imports nor the warm start
dilute it. Beside the ratio: the share of the learner's life that is booked on the journal's sync.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from baseline import write_baseline

from mage_async.run_directory import RunDirectory
from mage_async.run_records import read_lines

SETTINGS = (
    "evaluation.every=0",
    "evaluation.final_trials=24",
    "warm_start.steps=20",
    "warm_start.gate=1.0",
    "warm_start.max_steps=20",
    "warm_start.trials=200",
)
MOST = 0.05
SOURCE = "int fsync(int file) { return 0; }\nint fdatasync(int file) { return 0; }\n"


def run_once(folder: Path, steps: int, environment: dict[str, str]) -> dict[str, float]:
    """Train a few steps; seconds from the second to the last commit, and the sync's share."""
    run = RunDirectory(folder.resolve())
    settings = [*SETTINGS, f"learner.steps={steps}"]
    command = [sys.executable, "-m", "mage_async.launch", "--run-dir", str(run.root)]
    command += [part for setting in settings for part in ("--set", setting)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | environment)
    times = [line["time_s"] for line in read_lines(run.metrics)]
    booked: dict[str, Any] = json.loads(run.learner.read_text())["blocked_s"]["learner"]
    return {
        "training_s": times[-1] - times[1],
        "sync_share": booked.get("journal sync", 0.0) / sum(booked.values()),
    }


def main() -> None:
    """Run the pairs, and say the ratio."""
    parser = argparse.ArgumentParser(description="Whole runs with and without syncing.")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=14)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mage-durability-"))
    (folder / "sync.c").write_text(SOURCE)
    library = folder / "sync.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "sync.c"], check=True)
    rows: list[dict[str, dict[str, float]]] = []
    for number in range(given.pairs):
        ways = {"durable": {}, "not synced": {"LD_PRELOAD": str(library)}}
        order = list(ways)[:: 1 if number % 2 else -1]
        rows.append(
            {way: run_once(folder / f"{number}-{way[:3]}", given.steps, ways[way]) for way in order}
        )
        pair = {way: round(row["training_s"], 2) for way, row in rows[-1].items()}
        print(f"pair {number + 1}: {pair}", flush=True)
    ratios = [row["durable"]["training_s"] / row["not synced"]["training_s"] for row in rows]
    shares = [row["durable"]["sync_share"] for row in rows]
    print(
        f"durable over not synced: {statistics.median(ratios):.3f} (median of {len(ratios)}, "
        f"{min(ratios):.3f} … {max(ratios):.3f})"
    )
    print(f"booked on the journal's sync: {statistics.median(shares):.2%} of the learner's life")
    write_baseline("durability", {"steps": given.steps, "pairs": rows, "ratios": ratios})
    is_cheap = statistics.median(ratios) <= 1 + MOST
    print(f"at most {MOST:.0%}: {'yes' if is_cheap else 'NO'}")
    sys.exit(0 if is_cheap else 1)


if __name__ == "__main__":
    main()
