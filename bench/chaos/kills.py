"""Kill and stop processes of a run at random moments, and account for every trial afterwards.

    python -m bench.chaos.kills --kills 24         a small run, 2 minutes
    … --kills 200 --quickstart         one quickstart, which must also learn; 15 minutes
    … --kills 20 --roles learner --deterministic    the weights must be those of an undisturbed run
    … --kills 20 --roles learner follower --set learner.ranks=2    a learner of two ranks
    … --recovery 10                    time from a kill to the next committed step, by role
    … --kills 8 --frames 0.004         messages are repeated, reordered, cut, or have bits flipped
    … --kills 8 --disk 8               the journal is on a disk of 8 MiB that is full now and then
    … --kills 20 --runs 50 --run-dir DIR   a thousand kills in short runs, two minutes each

The moments, the killed processes and all other harm are functions of `--seed`. A killed supervisor
is started again with `--resume`. Before that, the journal's tail is torn as by a power cut: after
the last record that a peer was told of, the file is cut anywhere, or garbage is appended. After
about every fourth kill a process gets SIGSTOP, and SIGCONT up to `--stop-s` seconds later.
`--clock` gives all processes a wall clock that jumps by a day, back and forth. A tap on the sockets
records what peers were told (`bench/chaos/tap.py`), and `bench/chaos/account.py` compares it with
journal and summary. The last line is the verdict, with every condition that was missed; the exit
status is 1 if there is one.

With `--runs`, runs have short and long tasks (`bench/chaos/uneven.py`). The share of started groups
that are trained, long over short, then shows whether kills select what is trained. A run whose
figures are in `--run-dir` is not made again, and none is begun after `--minutes`; the figures are
those of all runs that are there.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.chaos.account import Books, account
from bench.chaos.uneven import SETTINGS as UNEVEN
from bench.chaos.verdict import shortfalls, verdict
from bench.chaos.victim import MODULES, Victim
from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.results.dropped_bias import Selection, Share, contrast, ratio_text
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines
from mage_services.journal.reader import open_journal

SHARES = {"actor": 11, "evaluator": 4, "learner": 3, "supervisor": 2}
"""Kills of each role among twenty; 3 for a role that is not here."""
# Settings of a small run, and those of its warm start and evaluation: as short as they can be.
SMALL = ("admission.groups_per_step=4", "learner.checkpoint_every=5")
QUICK = (  # 1.0 is no gate: the warm start ends after its steps
    "warm_start.steps=8",
    "warm_start.gate=1.0",
    "warm_start.max_steps=8",
    "warm_start.trials=64",
    "warm_start.threads=1",
    "admission.trials_per_group=4",
    "evaluation.every=0",
    "evaluation.final_trials=24",
)
DETERMINISTIC = ("admission.rule=sync", "admission.max_staleness=0", "engine.arithmetic=exact")
"""Keys that make a run a function of its configuration."""
RETURN = 0.65
"""Least held-out return of a quickstart."""
MOUNTS = "MAGE_CHAOS_MOUNTS"
"""Environment variable that is set in the mount namespace in which `--disk` mounts the disk."""
AHEAD = 2
"""Kills are spread over the run's steps; a kill may come so many steps before its own step."""


def deck(kills: int, roles: list[str], source: random.Random) -> list[str]:
    """Return the roles to kill, in order: shuffled, in proportion to their shares."""
    pack = [role for role in roles for _ in range(SHARES.get(role, 3))]
    cards: list[str] = []
    while len(cards) < kills:
        cards += source.sample(pack, len(pack))
    return cards[:kills]


def attack(victim: Victim, given: Any) -> None:
    """Make all kills, spread evenly over the steps of the run."""
    source, cards = victim.source, deck(given.kills, given.roles, victim.source)
    victim.wait_for(1)
    began = time.monotonic()
    for number, role in enumerate(cards):
        own_step = number * (victim.steps - 2) / len(cards)
        victim.wait_for(int(own_step) - AHEAD)
        # A kill whose step is over is made at once.
        gap_s = 0 if victim.step() > own_step else source.uniform(0, given.gap_s)
        due = time.monotonic() + gap_s
        while time.monotonic() < due:
            victim.look()
        while not victim.kill(role):
            if victim.step() >= victim.steps or victim.process.poll() is not None:
                print(f"the run was over after {number} kills: too few steps")
                return
            victim.look()  # the process is being started again
        # The disk is full after every second kill, and a process stops after one of four.
        if given.disk and number % 2:
            victim.fill(source.uniform(0.5, 3.0))
        if given.stop_s and source.random() < 0.25:
            victim.stop(source.choice(given.roles), source.uniform(0.1, given.stop_s))
        if number % 10 == 9:
            took = time.monotonic() - began
            print(f"{number + 1} kills, step {victim.step()}, {took:.0f} s", flush=True)


def recovery(victim: Victim, given: Any) -> dict[str, Any]:
    """Kill one process at a time, each after a step, and wait for the steps that follow."""
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    victim.wait_for(2)
    for number in range(given.recovery * len(given.roles)):
        role = given.roles[number % len(given.roles)]
        due = time.monotonic() + victim.source.uniform(0.0, 1.0)
        while time.monotonic() < due:
            victim.look()
        began = time.monotonic()
        while not victim.kill(role):
            victim.look()
            began = time.monotonic()
        before = victim.step()
        for name, further in (("next_s", 1), ("next_but_one_s", 2)):
            victim.wait_for(before + further)
            times[role][name].append(time.monotonic() - began)
    for role, kinds in times.items():
        for name, seconds in kinds.items():
            print(
                f"{role:<12}{name:<16}{statistics.median(seconds):>6.1f} s (median of "
                f"{len(seconds)}, {min(seconds):.1f} … {max(seconds):.1f})"
            )
    return {role: dict(kinds) for role, kinds in times.items()}


def digests(run: RunDirectory) -> dict[int, str]:
    """Return the digest of the weights of every version."""
    return Books.of(open_journal(run.journal).records(0)).digests


def settings_of(given: Any) -> list[str]:
    """Return the settings of the attacked run, which change the quickstart's."""
    own = (*UNEVEN, "evaluation.final_trials=1") if given.runs else QUICK
    settings = [] if given.quickstart else [*SMALL, *own]
    steps = given.steps or (
        0 if given.quickstart else max(40, given.kills * 2, given.recovery * 16)
    )
    settings += [f"learner.steps={steps}"] if steps else []
    if given.deterministic:
        settings += DETERMINISTIC
    return [*settings, *given.set]


def main() -> None:
    """Attack one run or many, account for the trials, and print the verdict."""
    given = _arguments()
    if given.disk and MOUNTS not in os.environ:
        # Start again in a mount namespace of its own, in which mounting needs no root.
        os.environ[MOUNTS] = "own"
        os.execvp("unshare", ["unshare", "-rm", sys.executable, *sys.orig_argv[1:]])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    report = series(given) if given.runs else attacked(given)
    if given.name:
        write_baseline(given.name, report)
    found = conclude(report, given)
    print(verdict(found, num_lost=report["figures"]["lost"]))
    sys.exit(1 if found else 0)


def attacked(given: Any) -> dict[str, Any]:
    """Attack one run; return what was done to it, and its figures."""
    folder, settings = Path(tempfile.mkdtemp(prefix="mage-chaos-")), settings_of(given)
    actors = given.actors or (4 if given.quickstart else 2)
    plain = None
    if given.deterministic:
        plain = Victim(folder / "plain" / "run", settings, actors, given)
        plain.finish()
    victim = Victim(folder / "run", settings, actors, given)
    began = time.monotonic()
    times = recovery(victim, given) if given.recovery else attack(victim, given)
    victim.finish()
    print(f"{sum(victim.kills.values())} kills; the run is in {victim.run.root}", flush=True)
    return {
        "settings": settings,
        "kills": dict(victim.kills),
        "stops": dict(victim.stops),
        "times_full": victim.num_full,
        "torn_bytes": victim.torn,
        "harmed_messages": dict(victim.tap.mischief.counts) if victim.tap.mischief else {},
        "messages": victim.tap.num_messages,
        "wall_s": time.monotonic() - began,
        "recovery_s": times or {},
        "groups": {
            share.label: (share.trained, share.started)
            for share in Selection.of(read_lines(victim.run.metrics)).by_kind()
        },
        "figures": figures_of(victim, plain),
    }


def series(given: Any) -> dict[str, Any]:
    """Attack the runs that are not in `--run-dir` yet; return the sums over all."""
    given.run_dir.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for seed in range(given.seed, given.seed + given.runs):
        file = given.run_dir / f"{seed}.json"
        if not file.exists() and time.monotonic() - began < 60 * given.minutes:
            report = attacked(argparse.Namespace(**vars(given) | {"seed": seed}))
            file.write_text(json.dumps(report))
    reports = [json.loads(file.read_text()) for file in sorted(given.run_dir.glob("*.json"))]
    if not reports:
        sys.exit(f"no run in {given.run_dir}: raise --minutes")
    total: dict[str, Any] = {"num_runs": len(reports), "settings": reports[0]["settings"]}
    for part in ("kills", "stops", "figures"):
        names = dict.fromkeys(name for report in reports for name in report[part])
        total[part] = {name: sum(report[part].get(name, 0) for report in reports) for name in names}
    total["figures"]["heldout_return"] /= len(reports)
    total["wall_s"] = sum(report["wall_s"] for report in reports)
    total["groups"] = groups = {
        # Trained and started groups.
        kind: [sum(report["groups"][kind][place] for report in reports) for place in (0, 1)]
        for kind in reports[0]["groups"]
    }
    total["ratio"] = contrast(Share("long", *groups["long"]), Share("short", *groups["short"]))
    print(
        f"{len(reports)} runs; trained of started {groups}, long over short "
        f"{ratio_text(total['ratio'])}"
    )
    return total


def figures_of(victim: Victim, plain: Victim | None) -> dict[str, Any]:
    """Return the figures of an attacked run.

    Args:
        plain: The undisturbed run whose weights are compared; None: weights are not compared.
    """
    figures: dict[str, Any] = account(victim.run, victim.tap.acknowledged, victim.tap.published)
    command = [sys.executable, "-m", "mage_async.launch", "replay", str(victim.run.root)]
    figures["replay_differs"] = int(subprocess.run(command, stdout=subprocess.PIPE).returncode != 0)
    if plain is not None:
        one, other = digests(plain.run), digests(victim.run)
        figures["versions_compared"] = len(one)
        figures["versions_differ"] = sum(one[v] != other.get(v) for v in one)
    sets = json.loads(victim.run.evaluation.read_text())["sets"]
    return figures | {"heldout_return": sets["heldout"]["return_by_episode"][-1]}


def conclude(report: dict[str, Any], given: Any) -> list[str]:
    """Print the figures; return the conditions that were missed."""
    figures, kills = report["figures"], sum(report["kills"].values())
    for name, value in figures.items():
        print(f"{name:<28}{value:>10}")
    print(f"{kills} kills {report['kills']}, stops {report['stops']}, {report['wall_s']:.0f} s")
    least = RETURN if given.quickstart and not given.set else None
    kills_asked = given.kills * report.get("num_runs", 1)
    return shortfalls(figures, kills=kills, kills_asked=kills_asked, least_return=least)


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--recovery", type=int, default=0, metavar="N", help="kills of each role")
    parser.add_argument("--roles", nargs="+", choices=MODULES, default=list(SHARES))
    parser.add_argument("--quickstart", action="store_true", help="attack a whole quickstart")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--frames", type=float, default=0.0, metavar="SHARE")
    parser.add_argument("--disk", type=int, default=0, metavar="MIB", help="of the journal")
    parser.add_argument("--clock", action="store_true")
    parser.add_argument("--stop-s", type=float, default=6.0, help="longest SIGSTOP; 0: none")
    parser.add_argument("--gap-s", type=float, default=1.5, help="longest time between two kills")
    parser.add_argument("--patience-s", type=float, default=180.0, help="for the next step")
    parser.add_argument("--steps", type=int, help="of the run")
    parser.add_argument("--actors", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--runs", type=int, default=0, metavar="N", help="short ones, in turn")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/kills"), metavar="DIR")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which none is begun")
    parser.add_argument("--name", help="write the figures as this baseline")
    return parser.parse_args()


if __name__ == "__main__":
    main()
