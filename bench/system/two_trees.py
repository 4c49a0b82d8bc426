"""Compare the speed of this checkout with another one, by pairs of whole runs.

    git worktree add --detach /tmp/before COMMIT
    python -m bench.system.two_trees /tmp/before --set-here sampling.restricted=false

Both checkouts run with this Python and its packages. The same configuration is trained here, there,
there, here, ..., so the runs of a pair follow each other. The program prints the ratio of trials
per second, this checkout over the other: the median of the pairs, and the mean with its 95 %
interval (Student's t of the logarithms). It prints the same of the CPU seconds of whole runs, which
other load disturbs less. The baseline is written after each pair; with `--add` its pairs count too.
The last line is the verdict; the exit status is 1 if the median of trials per second is below the
bound.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.lib.baseline import FOLDER, ROOT, machine, write_baseline
from bench.lib.options import option_parser
from bench.lib.short_run import timed
from mage_async.results.intervals import interval

WANTED = 0.98
"""Least median ratio of trials per second."""
PARTS = ("", "services", "kernels")
"""Folders of a checkout that are on `PYTHONPATH` of its processes."""


def main() -> None:
    """Run the pairs, and print the ratios."""
    parser = option_parser(__doc__)
    parser.add_argument("other", type=Path, help="a checkout")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    parser.add_argument(
        "--set-here", action="append", default=[], metavar="A.B=C", help="in this checkout alone"
    )
    parser.add_argument("--add", action="store_true", help="to the pairs of the baseline")
    parser.add_argument("--name", help="write the figures as this baseline")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mage-two-trees-"))
    trees = {"here": (ROOT, given.set + given.set_here), "there": (given.other, given.set)}
    baseline = FOLDER / f"{given.name}_{machine()}.json"
    pairs = json.loads(baseline.read_text())["pairs"] if given.add else []
    commit = ["git", "-C", str(given.other), "rev-parse", "HEAD"]
    other = subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()
    for number in range(given.pairs):
        pair = {}
        for name in ("there", "here") if number % 2 else ("here", "there"):
            tree, settings = trees[name]
            path = os.pathsep.join(str((tree / part).resolve()) for part in PARTS)
            pair[name] = timed(
                folder / f"{number}-{name}",
                given.steps,
                *settings,
                config=given.config,
                variables={"PYTHONPATH": path},
                folder=tree,
            )
        pairs.append(pair)
        rates = {name: f"{run['trials_per_s']:.0f} trials/s" for name, run in pair.items()}
        print(f"pair {len(pairs)}: {rates}", flush=True)
        ratios = {key: _ratio(pairs, key) for key in ("trials_per_s", "processor_s")}
        if given.name:  # after each pair, so that nothing is lost if this is interrupted
            shape = {"config": given.config, "steps": given.steps, "other_git": other}
            changes = {each: assignments for each, (_, assignments) in trees.items()}
            report = {**shape, "settings": changes, "ratios": ratios, "pairs": pairs}
            write_baseline(given.name, report)
    is_kept = ratios["trials_per_s"]["median"] >= WANTED
    print(f"at least {WANTED:g} of the trials per second: {'yes' if is_kept else 'NO'}")
    sys.exit(0 if is_kept else 1)


def _ratio(pairs: list[dict[str, dict[str, float]]], key: str) -> dict[str, float]:
    """Return the ratio of a figure, this checkout over the other, and print it."""
    found = [pair["here"][key] / pair["there"][key] for pair in pairs]
    middle, half = interval([math.log(ratio) for ratio in found])
    mean, low, high = (math.exp(middle + side * half) for side in (0, -1, 1))
    median = statistics.median(found)
    print(
        f"{key}, here over there: median {median:.3f}, mean {mean:.3f} ({low:.3f} … {high:.3f}), "
        f"{len(found)} pairs, {min(found):.2f} … {max(found):.2f}"
    )
    return {"median": median, "mean": mean, "low": low, "high": high}


if __name__ == "__main__":
    main()
