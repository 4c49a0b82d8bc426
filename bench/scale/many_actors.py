"""Simulate runs of up to 4,096 actors: how many can one learner serve, and how stale do groups
become?

    python -m bench.scale.many_actors [--actors 1 4 16 64 256 1024 4096] [--rules overtake slots]
                                      [--bounds 2 4] [--add]

Actors, training steps and publications take simulated time; every message goes through the real
access control, decoder, coordinator and ledger, whose processor time is measured (not the socket's,
the disk's and the model's). A step trains as many groups as all actors play concurrently, and takes
as long as they take to play them. Neither side has slack, which is the hardest case for an
admission rule (`slots`, `overtake`). Each simulated run is a row; some of its columns:

    of_ideal      trials per second over the ideal: the smaller rate of a learner that never waits,
                  and of actors that always play
    inbox_most    largest number of messages, and of bytes, that waited for the learner
    us_per_grant  CPU microseconds of the learner for all its work, per granted group
    of_core       CPU seconds of the learner's event loop per second of the run; above 1 it cannot
                  keep up
    limit_actors  number of actors divided by that share: how many one core could serve
    idle          (below the row) share of the time in which the learner did not train and actors
                  did not play, by reason (`bench/scale/idleness.py`)

The ideal ignores the bound on staleness. No rule reaches it if the longest of a version's groups
takes longer than the steps that may pass meanwhile, as with 1,024 actors and a bound of 2 or 4;
the last rows have these bounds. `--add` keeps rows of the baseline that are not measured again. The
exit status is 1 if a group is over the bound, or if 1,024 actors under the rule `overtake` with a
bound of 8 were simulated and reached less than 0.95 of the ideal.
"""

import json
import sys
from dataclasses import asdict, replace
from itertools import product
from statistics import fmean
from typing import Any

from bench.lib.baseline import FOLDER, machine, write_baseline
from bench.lib.options import option_parser
from bench.scale.simulation import Simulation
from bench.scale.workload import Workload

# Numbers of actors, and the workload that they share.
ACTORS = (1, 4, 16, 64, 256, 1024, 4096)
BASE = Workload(trials_per_group=4, max_staleness=8)
JUDGED, WANTED = (1024, 8, "overtake"), 0.95
"""Actors, bound and rule of the row that has a least share of the ideal, and that share."""
# Further bounds on staleness, and admission rules.
BOUNDS = (2, 4)
RULES = ("overtake", "slots")
VARIED = (64, 1024)
"""Numbers of actors that are also simulated with each of `BOUNDS`, with fewer heartbeats."""
NAME = "scale"
# Columns of the printed table, with their formats.
COLUMNS = {
    "actors": "d",
    "bound": "d",
    "rule": "s",
    "trials_per_s": ".1f",
    "of_ideal": ".3f",
    "staleness_mean": ".2f",
    "staleness_max": "d",
    "inbox_most": "d",
    "inbox_most_bytes": "d",
    "messages_per_s": ".0f",
    "grants_per_s": ".1f",
    "us_per_message": ".0f",
    "us_per_grant": ".0f",
    "of_core": ".4f",
    "limit_actors": "d",
}


def workload(actors: int, max_staleness: int, rule: str) -> Workload:
    """Return the workload of a run in which neither the learner nor the actors have slack."""
    # The time to simulate a run grows with actors times steps.
    steps = max(8 if actors > 1024 else 24, min(200, 768 // actors))
    work = replace(
        BASE,
        num_actors=actors,
        groups_per_step=actors * BASE.groups_per_actor,
        max_staleness=max_staleness,
        rule=rule,
        steps=steps,
        settle=steps // 2,
        heartbeat_s=BASE.heartbeat_s if max_staleness == BASE.max_staleness else 3.0,
    )
    # A step takes as long as all actors take to play its groups.
    return replace(work, step_s=work.groups_per_step * work.mean_group_s() / work.places())


def figures(work: Workload) -> dict[str, Any]:
    """Simulate a workload, and return its row."""
    simulation = Simulation(work)
    simulation.run()
    measured, costs = simulation.measured, simulation.site.costs
    seconds = measured.ended - measured.began
    rate = (work.steps - work.settle) * work.trials_per_step() / seconds
    rates_without_waiting = work.learner_bound(), work.actors_bound(fmean(measured.lives_s))
    busy = sum(costs.seconds.values())
    messages = sum(costs.calls[name] for name in costs.calls if name in MESSAGES)
    of_message = sum(costs.seconds[name] for name in costs.calls if name in MESSAGES)
    return {
        "actors": work.num_actors,
        "bound": work.max_staleness,
        "rule": work.rule,
        "trials_per_s": rate,
        "of_ideal": rate / min(rates_without_waiting),
        "idle": measured.idle.shares(seconds),
        "staleness_mean": _mean(measured.token_ages),
        "staleness_max": max(measured.group_ages),
        "groups_by_staleness": _shares(measured.group_ages),
        "tokens_by_staleness": _shares(measured.token_ages),
        "inbox_most": simulation.inbox.most,
        "inbox_most_bytes": simulation.inbox.most_bytes,
        "messages_per_s": messages / seconds,
        "grants_per_s": measured.num_grants / seconds,
        "us_per_message": of_message / messages * 1e6,
        "us_per_grant": busy / max(1, measured.num_grants) * 1e6,
        "us_by_call": {n: costs.seconds[n] / costs.calls[n] * 1e6 for n in sorted(costs.calls)},
        "of_core": busy / seconds,
        "limit_actors": round(work.num_actors * seconds / busy),
        "num_refused": simulation.site.num_refused,
        "workload": asdict(work),
    }


MESSAGES = ("hello", "heartbeat", "loaded", "trialresult")
"""Calls of the learner that handle a peer's message: the message's class in lower case."""


def _mean(ages: dict[int, int]) -> float:
    return sum(age * count for age, count in ages.items()) / sum(ages.values())


def _shares(ages: dict[int, int]) -> dict[str, float]:
    total = sum(ages.values())
    return {str(age): ages[age] / total for age in sorted(ages)}


def kept_beside(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the new rows together with the baseline's rows that were not measured again."""
    file = FOLDER / f"{NAME}_{machine()}.json"
    earlier = json.loads(file.read_text())["rows"] if file.exists() else []
    cases = {_case(row) for row in rows}
    every = rows + [row for row in earlier if _case(row) not in cases]
    every.sort(key=lambda row: (-row["bound"], row["rule"], row["actors"]))
    return {"rows": every, "faults": faults(every)}


def _case(row: dict[str, Any]) -> tuple[int, int, str]:
    return row["actors"], row["bound"], row["rule"]


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """Return the bounds that were missed, as sentences."""
    found = [
        f"{row['actors']} actors: a group of staleness {row['staleness_max']}, the bound is "
        f"{row['bound']}"
        for row in rows
        if row["staleness_max"] > row["bound"]
    ]
    return found + [
        f"{row['actors']} actors have {row['of_ideal']:.3f} of the ideal, wanted {WANTED}"
        for row in rows
        if _case(row) == JUDGED and row["of_ideal"] < WANTED
    ]


def main() -> int:
    """Simulate every number of actors; return 1 if a bound was missed."""
    parser = option_parser(__doc__)
    parser.add_argument("--actors", type=int, nargs="+", default=ACTORS, metavar="N")
    parser.add_argument("--rules", nargs="+", default=RULES, metavar="RULE")
    parser.add_argument("--bounds", type=int, nargs="*", default=BOUNDS, metavar="S")
    parser.add_argument("--add", action="store_true", help="keep the baseline's other rows")
    given = parser.parse_args()
    cases = [(actors, BASE.max_staleness) for actors in given.actors]
    cases += [(n, bound) for n in VARIED if n in given.actors for bound in given.bounds]
    print(" ".join(f"{name:>16}" for name in COLUMNS))
    rows = []
    for (actors, bound), rule in product(cases, given.rules):
        row = figures(workload(actors, bound, rule))
        print(" ".join(f"{row[name]:>16{form}}" for name, form in COLUMNS.items()))
        print("    idle: " + ", ".join(f"{k} {v:.3f}" for k, v in row["idle"].items()), flush=True)
        rows.append(row)
    found = faults(rows)
    write_baseline(NAME, kept_beside(rows) if given.add else {"rows": rows, "faults": found})
    print("verdict: " + ("; ".join(found) or "no group over the bound, and the ideal as wanted"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
