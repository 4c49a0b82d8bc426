"""Measure what notes are worth if a context has room for less than one episode.

    python -m bench.learning.notes [--arms "boxes notes"] [--seeds 0 1 2] [--name notes]

If a context has no room left, the policy writes notes, which replace it. The tiny model plays
boxes, scout and rock-paper-scissors on-policy in one process (`mage_async/algorithm.py`), with the
same number of steps and trials in every arm. `notes` writes notes and is trained on them;
`untrained` writes notes and is trained on its actions alone, from the same warm start; `truncation`
writes none and keeps the newest turns that fit into the same room; `history` has room for the whole
trial. The warm start clones scripted trials, whose notes have half or all of the facts in the
context. So it teaches to read notes; what to write is left to RL. A run whose result is in the
folder is not run again.

A line has the held-out returns of the three episodes (means over seeds; then the last one's, seed
by seed), the last episode's of the controls, how much more the arm `notes` of the same game earns,
and what a player earns that remembers everything.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from bench.lib.arms import Job, arguments, results, run_missing
from bench.lib.baseline import ROOT, write_baseline
from mage_async.algorithm import InProcessRun, prepare
from mage_async.assembly import environment_of
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.results.intervals import interval, paired
from mage_async.trajectory import Group, Kind

CONFIG = ROOT / "configs/quickstart.toml"
STEPS, TRIALS = 60, 1024
"""Steps of a run, and trials of an evaluation."""
WARM = ("warm_start.gate=1.0", "warm_start.steps=1500", "warm_start.max_steps=1500")
"""Ten times the quickstart's steps of cloning, because reading and writing notes is learned
there."""
GAMES = {
    "boxes": (
        *("environment.options={boxes=5}", "trial.room=49", "transcript.max_reflection_tokens=11"),
    ),
    "scout": (
        *("trial.room=32", "transcript.max_reflection_tokens=7", "advantage.scale=[]"),
        *("advantage.epsilon=0.001", "learner.entropy_ceiling=2.0"),
    ),
    "rps": ("trial.room=37", "transcript.max_reflection_tokens=10"),
}
"""Room for at most three turns of boxes, whose episodes have four, and for two of scout, whose
episodes have three, and of rock-paper-scissors, whose episodes have four: the last three rounds
tell most of its opponents' patterns. Notes may have as many words as it takes to say all that is
hidden in boxes and scout, and three rounds of rock-paper-scissors."""
# Settings of the arms; each arm is a game in one way.
WAYS = {
    "notes": ("trial.memory=notes",),
    "untrained": ("trial.memory=notes", "trial.train_notes=false"),
    "truncation": ("trial.memory=truncation",),
    "history": ("trial.memory=history", "trial.room=0"),
}
ARMS = [f"{game} {way}" for game in GAMES for way in WAYS]
BEST = {"boxes": "with_memory", "scout": "best_final", "rps": "bayes"}
"""Name of the reference return of a player that remembers everything and infers exactly."""


def main() -> int:
    """Run the arms that have no results yet, then report all results."""
    given = arguments(__doc__, "notes", ARMS, named=True)
    run_missing(given, run, _prepared)
    return _report(results(given, ARMS), given)


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Train one arm with one seed, and evaluate it with both controls."""
    began, policy = time.monotonic(), _prepared(job, folder)
    config = config_of(*job)
    training = InProcessRun(config, policy)
    before = training.evaluate("heldout", TRIALS)
    notes: list[str] = []

    def keep(groups: list[Group]) -> None:
        """Keep the notes of the newest batch's first trial."""
        turns = groups[0].trials[0].turns
        notes[:] = [turn.action for turn in turns if turn.kind is Kind.NOTES]

    curve = training.train(keep)
    sets = {
        "before": before,
        "heldout": training.evaluate("heldout", TRIALS),
        "blind": training.evaluate("heldout", TRIALS, blind=True),
        "swapped": training.evaluate("heldout", TRIALS, swap=True),
    }
    built = {name: msgspec.to_builtins(value) for name, value in sets.items()}
    return built | {
        "curve": curve,
        "notes": notes,
        "references": environment_of(config).references("heldout", config.evaluation.episodes),
        "wall_s": time.monotonic() - began,
    }


def _prepared(job: Job, folder: Path) -> Path:
    """Return the directory of the warm-started policy, which arms with equal prompts share."""
    memory = config_of(*job).trial.memory
    game, _ = job.arm.split()
    warm = folder / f"{game}-{memory}"
    warm.mkdir(parents=True, exist_ok=True)
    return prepare(config_of(*job), warm)


def config_of(arm: str, seed: int) -> Config:
    """Return the configuration of an arm with a seed."""
    game, way = arm.split()
    changes = (
        f"environment.name={game}",
        f"learner.steps={STEPS}",
        *WARM,
        *GAMES[game],
        *WAYS[way],
        f"seed={seed}",
    )
    return config_file.load(CONFIG, list(changes), None)


def _report(found: dict[str, dict[int, Any]], given: argparse.Namespace) -> int:
    """Print a line for each arm, and write the baseline."""
    rows = []
    print(
        f"{'':18} {'held-out, by episode':36} {'last: blind':>12} {'swapped':>8} {'notes gain':>16}"
    )
    for arm in (arm for arm in given.arms if found[arm]):
        game, way = arm.split()
        runs = found[arm]
        row: dict[str, Any] = {"arm": arm, "runs": {seed: _figures(runs[seed]) for seed in runs}}
        lasts = {seed: run["heldout"]["return_by_episode"][-1] for seed, run in runs.items()}
        own = {
            seed: run["heldout"]["return_by_episode"][-1]
            for seed, run in found[f"{game} notes"].items()
        }
        gains = paired(own, lasts)
        row["gain_of_notes"] = interval(gains) if way != "notes" and len(gains) > 1 else None
        rows.append(row)
        print(_line(arm, list(runs.values()), row["gain_of_notes"]))
    if given.name:
        configured = {game: [*WARM, *changes] for game, changes in GAMES.items()}
        write_baseline(
            given.name,
            {
                "steps": STEPS,
                "trials": TRIALS,
                "seeds": given.seeds,
                "configured": configured,
                "rows": rows,
            },
        )
    return 0


def _figures(run: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a run for the baseline."""
    sets = ("before", "heldout", "blind", "swapped")
    return {name: run[name]["return_by_episode"] for name in sets} | {
        key: run[key] for key in ("curve", "notes", "references", "wall_s")
    }


def _line(arm: str, runs: list[dict[str, Any]], gain: tuple[float, float] | None) -> str:
    def mean(name: str, episode: int) -> float:
        return sum(run[name]["return_by_episode"][episode] for run in runs) / len(runs)

    returns = [f"{mean('heldout', episode):+.3f}" for episode in range(3)]
    seeds = "/".join(f"{run['heldout']['return_by_episode'][-1]:.2f}" for run in runs)
    shown = "" if gain is None else f"{gain[0]:+.3f} ± {gain[1]:.3f}"
    game, _ = arm.split()
    best = runs[0]["references"][BEST[game]][-1]
    return (
        f"{arm:18} {' '.join(returns)} ({seeds}) {mean('blind', -1):+12.3f} "
        f"{mean('swapped', -1):+8.3f} {shown:>16}   best {best:+.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
