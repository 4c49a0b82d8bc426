"""Measure how much faster whole runs are if playing and training overlap, on this machine.

    python -m bench.system.overlap [--rounds 4]        4 minutes on an idle machine

The same configuration is trained in three ways, in alternation: under `sync` (grant, wait, train,
publish, repeat); as shipped, where actors have a lower priority than the learner; and as shipped
with actors of the learner's priority ("eager actors": `setpriority` does nothing). The time is that
from the fifth to the last commit, without imports and warm start. The program prints the ratios of
trials per second over those under `sync`: medians and ranges over rounds.
"""

import statistics
import tempfile
from pathlib import Path

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from bench.lib.preload import preloaded
from bench.lib.short_run import timed

WAYS = ("sync", "shipped", "eager actors")
# The library that replaces libc's function.
SOURCE = "int setpriority(int which, unsigned who, int nice) { return 0; }\n"


def run_once(
    root: Path, way: str, steps: int, config: str, eager: dict[str, str]
) -> dict[str, float]:
    """Train a few steps; return trials per second, and seconds of a step in the trainer."""
    rule = ["admission.rule=sync"] if way == "sync" else []
    variables = eager if way == "eager actors" else None
    return timed(root, steps, *rule, config=config, variables=variables)


def main() -> None:
    """Run the rounds, and print the ratios."""
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--config", default="quickstart")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mage-overlap-"))
    eager = preloaded(folder, "eager", SOURCE)
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(given.rounds):
        order = WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]
        rounds.append(
            {
                way: run_once(folder / f"{number}-{way[:5]}", way, given.steps, given.config, eager)
                for way in order
            }
        )
        rates = {way: f"{rounds[-1][way]['trials_per_s']:.0f} trials/s" for way in WAYS}
        print(f"round {number + 1}: {rates}", flush=True)
    write_baseline(
        "overlap",
        {"config": given.config, "steps": given.steps, "rounds": rounds} | ratios_of(rounds),
    )


def ratios_of(rounds: list[dict[str, dict[str, float]]]) -> dict[str, list[float]]:
    """Return the ratios of each round, and print their medians and ranges."""
    ratios = {
        f"{way} over sync": [
            row[way]["trials_per_s"] / row["sync"]["trials_per_s"] for row in rounds
        ]
        for way in WAYS[1:]
    }
    for name, found in ratios.items():
        middle = statistics.median(found)
        print(f"{name}: {middle:.2f} (median of {len(found)}, {min(found):.2f} … {max(found):.2f})")
    return ratios


if __name__ == "__main__":
    main()
