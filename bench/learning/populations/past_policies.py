"""Do past policies among the opponents help? Kuhn poker against scripts only, with past policies,
and with the newest one (self-play), on the same held-out scripts.

    python -m bench.learning.populations.past_policies [--run-dir DIR] [--seeds 0 1 2]
        [--parallel 1] [--only-report]

Equal budget: `kuhn.toml`, of whose groups some meet a version of the policy instead of a script.
Each run is on-policy in one process (`mage_async/algorithm.py`); seeds share their warm start and
tasks, so differences are taken seed by seed. Returns are in chips a hand. *Exploitability* is what
the best answer earns, in chips a hand, against the first hand of a first episode, where neither
player knows anything of the other (0 is an equilibrium); probabilities are of the two legal words
alone. With a DIR a run that has been measured is not run again.
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
"""Half of the training of `kuhn.toml`."""
CONTROL = "scripts"
ARMS = {
    CONTROL: (),
    "past policies": ("population.rivals=0.33", "population.every=5", "population.kept=6"),
    "self-play": ("population.rivals=0.33", "population.every=0"),
}
MEASURES = ("episode 1", "episode 2", "episode 3", "swapped episode 3", "exploitability")


def main() -> int:
    """Run what is missing, then report what there is."""
    given = arguments(__doc__, "population", ARMS)
    run_missing(given, run, lambda job, folder: prepare(_config(*job), folder))
    return _report(results(given, ARMS))


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Train one arm with one seed: what it earns."""
    config = _config(*job)
    policy = prepare(config, folder)
    lab, chat = InProcessRun(config, policy), load_chat(policy)
    rules = trial_config_of(config, environment_of(config), chat, config.trial.episodes)
    before = exploitability(first_hand(lab.model, chat, rules))
    curve = lab.train()
    heldout, swap = lab.evaluate("heldout", TRIALS), lab.evaluate("heldout", TRIALS, swap=True)
    return {
        **{f"episode {n + 1}": each for n, each in enumerate(heldout.return_by_episode)},
        "swapped episode 3": swap.return_by_episode[-1],
        "train episode 3": lab.evaluate("train", TRIALS).return_by_episode[-1],
        "exploitability": exploitability(first_hand(lab.model, chat, rules)),
        "exploitability before": before,
        "invalid actions a trial": heldout.invalid_actions_per_trial,
        "population": msgspec.to_builtins(lab.league.state()),
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
