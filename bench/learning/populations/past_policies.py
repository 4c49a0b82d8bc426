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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench.learning.populations.first_hand import exploitability, first_hand
from bench.lib.arms import Job, arguments, results, run_missing
from bench.lib.baseline import ROOT, write_baseline
from mage_async.algorithm import InProcessRun, prepare
from mage_async.assembly import environment_of, rules_of
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.inference.chat_files import load_chat
from mage_async.results.intervals import interval, paired

CONFIG = ROOT / "configs/kuhn.toml"
STEPS, TRIALS = 30, 1024
"""Half of the training of `kuhn.toml`."""
ARMS = {
    "scripts": (),
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
    rules = rules_of(config, environment_of(config), chat, config.trial.episodes)
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
        "population": msgspec.to_builtins(lab.league.table()),
        "curve": curve,
    }


def _report(found: Mapping[str, Mapping[int, dict[str, Any]]]) -> int:
    rows = []
    for measure in MEASURES:
        values = {
            arm: {seed: each[measure] for seed, each in runs.items()}
            for arm, runs in found.items()
            if runs
        }
        rows.append({"measure": measure, "values": values, "gains": _gains(values)})
    print("held-out scripts, chips a hand, by seed; then minus scripts only, 95 % over seeds")
    for row in rows:
        print(row["measure"])
        for arm, values in row["values"].items():
            shown = " ".join(f"{value:+.3f}" for value in values.values())
            gain = row["gains"].get(arm)
            print(f"  {arm:14} {shown}" + (f"   {gain[0]:+.3f} ± {gain[1]:.3f}" if gain else ""))
    arms = {arm: list(changes) for arm, changes in ARMS.items()}
    runs = {f"{arm}, seed {n}": each for arm, same in found.items() for n, each in same.items()}
    write_baseline(
        "population", {"arms": arms, "steps": STEPS, "trials": TRIALS, "rows": rows, "runs": runs}
    )
    return 0


def _gains(values: Mapping[str, Mapping[int, float]]) -> dict[str, tuple[float, float]]:
    """The gain of each arm over scripts only, seed by seed."""
    pairs = {
        arm: paired(each, values["scripts"])
        for arm, each in values.items()
        if arm != "scripts" and "scripts" in values
    }
    return {arm: interval(each) for arm, each in pairs.items() if len(each) > 1}


def _config(arm: str, seed: int) -> Config:
    return config_file.load(CONFIG, [*ARMS[arm], f"learner.steps={STEPS}", f"seed={seed}"])


if __name__ == "__main__":
    sys.exit(main())
