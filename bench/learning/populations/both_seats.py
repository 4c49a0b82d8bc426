"""Train on both seats of self-play in Kuhn poker: is the policy nearer to an equilibrium, and
weaker against scripts?

The arms train against scripts only, with a third of the groups in self-play, and with all of them.

    python -m bench.learning.populations.both_seats [--run-dir DIR] [--seeds 0 1 2] [--parallel 1]
        [--only-report]

All arms have the same number of steps and of trials. They change `kuhn.toml`: every episode has
fresh deals and its own reward, so that the first hand of a trial is plain Kuhn poker. Fresh deals
reveal less of the opponent, so the warm start is longer. The entropy bonus does not decay, because
two learners of one game circle around its equilibrium. Each run is on-policy in one process
(`mage_async/algorithm.py`); arms of a seed share their warm start, so differences are taken seed by
seed. *Exploitability*, by OpenSpiel, is that of the policy's first hand of a trial, in chips per
hand; the *average* policy is that of all versions of the second half of training. Returns are
against held-out scripts. With a DIR, a run that was measured is not made again.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec

from bench.learning.populations.first_hand import (
    NASH_VALUE,
    Hand,
    average,
    exploitability,
    first_hand,
    value,
)
from bench.learning.populations.rows import Found, rows_of, runs_by_name, show
from bench.lib.arms import Job, arguments, results, run_missing
from bench.lib.baseline import ROOT, write_baseline
from mage_async.algorithm import InProcessRun, prepare
from mage_async.assembly import environment_of, trial_config_of
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.inference.chat_files import load_chat

CONFIG = ROOT / "configs/kuhn.toml"
STEPS, TRIALS = 60, 1024
"""Steps of a run, and trials of an evaluation."""
SETTING = (
    *("warm_start.steps=1000", "warm_start.max_steps=2000", "learner.final_entropy=0.05"),
    # As in `kuhn.toml`, but with fresh deals.
    'environment.options={hands = 2, opponents = "contrasts", redeals = true}',
    "credit.kind=single_episode",
    # The default, and "seat" in both: a hand's two seats earn opposite amounts, so a mean over both
    # is zero, and each seat is compared with itself only.
    'advantage.baseline=["group", "seat", "kind", "episode", "index"]',
    'advantage.scale=["member", "seat"]',
)
CONTROL = "scripts"
ARMS = {
    CONTROL: (),
    "a third in both seats": ("methods.both_seats.share=0.33",),
    "all in both seats": ("methods.both_seats.share=1.0",),
}
MEASURES = (
    "exploitability at first",
    "exploitability at last",
    "exploitability of the average",
    "value of the average minus Nash",
    "episode 1",
    "episode 2",
    "episode 3",
)


def main() -> int:
    """Run the arms that have no results yet, then report all results."""
    given = arguments(__doc__, "both_seats", ARMS)
    run_missing(given, run, lambda job, folder: prepare(_config(*job), folder))
    return _report(results(given, ARMS))


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Train one arm with one seed; return how its versions play the first hand, and its returns."""
    config = _config(*job)
    policy = prepare(config, folder)
    training, chat = InProcessRun(config, policy), load_chat(policy)
    rules = trial_config_of(config, environment_of(config), chat, config.trial.episodes)
    hands = [first_hand(training.model, chat, rules)]
    for _ in range(STEPS):
        training.step()
        hands.append(first_hand(training.model, chat, rules))
    heldout = training.evaluate("heldout", TRIALS)
    return {
        **{f"episode {n + 1}": each for n, each in enumerate(heldout.return_by_episode)},
        **measured(hands),
        "invalid actions a trial": heldout.invalid_actions_per_trial,
        "population": msgspec.to_builtins(training.league.state()),
        "exploitability by version": [exploitability(hand) for hand in hands],
        "first hand at last": dict(hands[-1]),
    }


def measured(hands: list[Hand]) -> dict[str, float]:
    """Return exploitability and value of a run's versions, of which the first is the warm start."""
    mean = average(hands[len(hands) // 2 :])
    return {
        "exploitability at first": exploitability(hands[0]),
        "exploitability at last": exploitability(hands[-1]),
        "exploitability of the average": exploitability(mean),
        "value of the average minus Nash": value(mean) - NASH_VALUE,
    }


def _report(found: Found) -> int:
    rows = rows_of(found, MEASURES, CONTROL)
    show(rows, "chips a hand, by seed; then minus scripts only, 95 % over seeds")
    arms = {arm: list(changes) for arm, changes in ARMS.items()}
    setting = {"setting": list(SETTING), "steps": STEPS, "trials": TRIALS}
    figures = {"rows": rows, "runs": runs_by_name(found)}
    write_baseline("both_seats", {"arms": arms, **setting, **figures})
    return 0


def _config(arm: str, seed: int) -> Config:
    changes = [*SETTING, *ARMS[arm], f"learner.steps={STEPS}", f"seed={seed}"]
    return config_file.load(CONFIG, changes)


if __name__ == "__main__":
    sys.exit(main())
