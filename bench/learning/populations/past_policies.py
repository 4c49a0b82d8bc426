"""Measure whether past policies among the opponents help in Kuhn poker.

The arms train against scripts only, with past policies among the opponents, and with the newest
policy among them (self-play). All are evaluated against the same held-out scripts.

    python -m bench.learning.populations.past_policies [--run-dir DIR] [--seeds 0 1 2]
        [--parallel 1] [--only-report]

All arms have the same number of steps and trials of `kuhn.toml`; in some, a share of the groups
meets a version of the policy instead of a script. Each run is on-policy in one process
(`mage_async/algorithm.py`). Runs of the same seed share warm start and tasks, so differences are
taken seed by seed. Returns are in chips per hand. *Exploitability* is what a best response earns,
in chips per hand, against the policy's first hand of a first episode, before either player knows
the other (0 is an equilibrium). *Swapped* is a control of adaptation: the last episode is against
another script than the first two. With a DIR, a run that was measured is not made again.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec

from bench.learning.populations.first_hand import exploitability, first_hand
from bench.learning.populations.rows import Found, rows_of, runs_by_name, show
from bench.lib.arms import Job, arguments, results, run_missing
from bench.lib.baseline import ROOT, write_baseline
from mage_async.algorithm import InProcessRun, prepare
from mage_async.assembly import environment_of, trial_config_of
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.inference.chat_files import load_chat

CONFIG = ROOT / "configs/kuhn.toml"
STEPS, TRIALS = 30, 1024
"""Steps, half of those of `kuhn.toml`, and trials of an evaluation."""
CONTROL = "scripts"
ARMS = {
    CONTROL: (),
    "past policies": ("population.rivals=0.33", "population.every=5", "population.kept=6"),
    "self-play": ("population.rivals=0.33", "population.every=0"),
}
MEASURES = ("episode 1", "episode 2", "episode 3", "swapped episode 3", "exploitability")


def main() -> int:
    """Run the arms that have no results yet, then report all results."""
    given = arguments(__doc__, "population", ARMS)
    run_missing(given, run, lambda job, folder: prepare(_config(*job), folder))
    return _report(results(given, ARMS))


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Train one arm with one seed; return its returns and its exploitability."""
    config = _config(*job)
    policy = prepare(config, folder)
    training, chat = InProcessRun(config, policy), load_chat(policy)
    rules = trial_config_of(config, environment_of(config), chat, config.trial.episodes)
    before = exploitability(first_hand(training.model, chat, rules))
    curve = training.train()
    heldout, swap = (
        training.evaluate("heldout", TRIALS),
        training.evaluate("heldout", TRIALS, swap=True),
    )
    return {
        **{f"episode {n + 1}": each for n, each in enumerate(heldout.return_by_episode)},
        "swapped episode 3": swap.return_by_episode[-1],
        "train episode 3": training.evaluate("train", TRIALS).return_by_episode[-1],
        "exploitability": exploitability(first_hand(training.model, chat, rules)),
        "exploitability before": before,
        "invalid actions a trial": heldout.invalid_actions_per_trial,
        "population": msgspec.to_builtins(training.league.state()),
        "curve": curve,
    }


def _report(found: Found) -> int:
    rows = rows_of(found, MEASURES, CONTROL)
    show(rows, "held-out scripts, chips a hand, by seed; then minus scripts only, 95 % over seeds")
    arms = {arm: list(changes) for arm, changes in ARMS.items()}
    figures = {"rows": rows, "runs": runs_by_name(found)}
    write_baseline("population", {"arms": arms, "steps": STEPS, "trials": TRIALS, **figures})
    return 0


def _config(arm: str, seed: int) -> Config:
    return config_file.load(CONFIG, [*ARMS[arm], f"learner.steps={STEPS}", f"seed={seed}"])


if __name__ == "__main__":
    sys.exit(main())
