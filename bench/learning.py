"""Does it learn to learn? Whole runs of the shipped configurations against their thresholds.

    python bench/learning.py [--seeds 0 1 2] [--only quickstart scout …]

Every run is `python -m mage_async.launch` in a process of its own, without the warm-start cache,
one after the other; wall time includes everything. Prints one table, writes one JSON, and exits
with status 1 where a threshold is missed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baseline import write_baseline

Summary = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration, and what each of its seeds has to show."""

    name: str
    config: str
    changes: tuple[str, ...]
    checks: dict[str, tuple[Callable[[Summary], float], Callable[[float], bool]]]


def _episode_3(split: str) -> Callable[[Summary], float]:
    return lambda summary: summary["evaluation"][split]["return_by_episode"][2]


def _probing(summary: Summary) -> float:
    """Probes per dial in episodes 1 and 2 together."""
    return sum(summary["evaluation"]["heldout"]["probes_by_episode"][:2])


def _wall(summary: Summary) -> float:
    return summary["wall_s"]


def _at_most(bound: float) -> Callable[[float], bool]:
    return lambda value: value <= bound


def _at_least(bound: float) -> Callable[[float], bool]:
    return lambda value: value >= bound


_SHORT = {"held-out episode 3 <= 0.40": (_episode_3("heldout"), _at_most(0.40))}
CASES = (
    Case(
        "quickstart",
        "quickstart",
        (),
        {
            "wall <= 120 s": (_wall, _at_most(120.0)),
            "held-out episode 3 >= 0.65": (_episode_3("heldout"), _at_least(0.65)),
            "blind <= 0.20": (_episode_3("heldout_blind"), _at_most(0.20)),
            "swapped <= 0.20": (_episode_3("heldout_swapped"), _at_most(0.20)),
            "log-prob mismatch <= 1e-3": (
                lambda summary: summary["logprob_mismatch"]["max_abs"],
                _at_most(1e-3),
            ),
            "staleness <= bound 1": (lambda summary: summary["staleness"]["max"], _at_most(1.0)),
            "prefix hit rate >= 0.95": (
                lambda summary: summary["prefix_cache"]["hit_rate"],
                _at_least(0.95),
            ),
            "prefix reuse rate >= 0.95": (
                lambda summary: summary["prefix_cache"]["reuse_rate"],
                _at_least(0.95),
            ),
            "granted - trained - dropped - in flight == 0": (
                lambda summary: (
                    summary["trials"]["granted"]
                    - sum(summary["trials"][fate] for fate in ("trained", "dropped", "in_flight"))
                ),
                _at_most(0),
            ),
        },
    ),
    Case(
        "single episode",
        "quickstart_single_episode",
        (),
        {"held-out episode 3": (_episode_3("heldout"), _at_most(1.0))},
    ),
    Case(
        "scout",
        "scout",
        (),
        {
            "wall <= 90 s": (_wall, _at_most(90.0)),
            "held-out episode 3 >= 0.85": (_episode_3("heldout"), _at_least(0.85)),
            "probing in episodes 1 + 2 >= 0.8": (_probing, _at_least(0.8)),
            "swapped <= 0": (_episode_3("heldout_swapped"), _at_most(0.0)),
        },
    ),
    Case("scout, differential 0.6", "scout", ("credit.episode_discount=0.6",), _SHORT),
    Case(
        "scout, cumulative 0.6",
        "scout",
        ("credit.kind=cumulative_paper", "credit.episode_discount=0.6"),
        _SHORT,
    ),
    Case("scout, single episode", "scout", ("credit.kind=single_episode",), _SHORT),
)


def run(case: Case, seed: int, folder: Path) -> Summary:
    """One whole run; its summary."""
    run_dir = folder / f"{case.name}-{seed}".replace(" ", "_").replace(",", "")
    command = [sys.executable, "-m", "mage_async.launch", "--config", case.config]
    command += ["--seed", str(seed), "--run-dir", str(run_dir), "--set", "warm_start.cache=false"]
    for change in case.changes:
        command += ["--set", change]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((run_dir / "summary.json").read_text())


def main() -> None:
    """Run the cases and print what each seed showed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="cases whose name begins so")
    given = parser.parse_args()
    cases = [case for case in CASES if not given.only or case.name.startswith(tuple(given.only))]
    with tempfile.TemporaryDirectory() as folder:
        summaries = {
            case.name: [run(case, seed, Path(folder)) for seed in given.seeds] for case in cases
        }
    rows = [row for case in cases for row in _rows(case, summaries[case.name])]
    rows += _gap(summaries)
    for row in rows:
        values = "  ".join(f"{value:8.4g}" for value in row["values"])
        print(f"{row['case']:26} {row['check']:46} {values}  {'ok' if row['ok'] else 'MISSED'}")
    write_baseline("learning", {"seeds": given.seeds, "rows": rows, "summaries": summaries})
    sys.exit(not all(row["ok"] for row in rows))


def _rows(case: Case, summaries: list[Summary]) -> list[dict[str, Any]]:
    made = []
    for check, (measure, holds) in case.checks.items():
        values = [measure(summary) for summary in summaries]
        made.append(
            {"case": case.name, "check": check, "values": values, "ok": all(map(holds, values))}
        )
    return made


def _gap(summaries: dict[str, list[Summary]]) -> list[dict[str, Any]]:
    """How far single-episode RL stays below, seed by seed."""
    if not {"quickstart", "single episode"} <= summaries.keys():
        return []
    measure = _episode_3("heldout")
    pairs = zip(summaries["quickstart"], summaries["single episode"], strict=True)
    values = [measure(meta) - measure(single) for meta, single in pairs]
    check = "held-out episode 3 below the quickstart >= 0.30"
    return [{"case": "single episode", "check": check, "values": values, "ok": min(values) >= 0.30}]


if __name__ == "__main__":
    main()
