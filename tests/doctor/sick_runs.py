"""Runs made to have a signature: a recorded run is well until a step, and then is not.

A sickness changes the record of a step, `k` steps after the first sick one (k = 0 there).
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mage_async.config import config_file
from mage_async.doctor import Doctor

RECORDED = Path(__file__).parent / "recorded"
ONSET = 31
Record = dict[str, Any]
Sickness = Callable[[Record, int], Record]


def healthy(name: str = "quickstart") -> list[Record]:
    """The steps of a whole run that was well, seed 0 of a shipped configuration: what the doctor
    looks at of them.
    """
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


def made_sick(name: str) -> list[Record]:
    """The recorded quickstart with a sickness from step `ONSET` on."""
    return [
        record
        | BEFORE.get(name, {})
        | (SICKNESSES[name](record, record["step"] - ONSET) if record["step"] >= ONSET else {})
        for record in healthy()
    ]


def doctor(*assignments: str, config: str = "quickstart") -> Doctor:
    """A doctor who has seen no step yet of a run whose returns are between -1 and 1."""
    loaded = config_file.load(config_file.find(config), list(assignments))
    return Doctor(loaded, (-1.0, 1.0))


def _returning(record: Record, last: float) -> Record:
    """The step's returns with another one of the last episode."""
    return {"return_by_episode": [*record["return_by_episode"][:-1], last]}


def _unlike_what_was_said(record: Record, k: int) -> Record:
    ages = (name for name in record if name.startswith("k3_mean_age_"))
    return {name: 0.08 * k for name in ages}


def _losing_long_groups(record: Record, k: int) -> Record:
    kept = [["kind", "a", 100, 18], ["kind", "b", 600, 6]]
    return {"trained_groups": kept, "dropped_groups": [["kind", "b", 400, "raised", 8]]}


def _raising_once(record: Record, k: int) -> Record:
    return {"dropped_groups": [["kind", "b", 400, "the environment raised", 1]]} if k == 0 else {}


SICKNESSES: dict[str, Sickness] = {
    "not_finite": lambda r, k: {"loss": math.nan, "grad_norm": math.inf, "skipped_updates": 1.0},
    "no_variance": lambda r, k: {"zero_advantage_share": 1.0, **_returning(r, -0.8)},
    "rare_rewards": lambda r, k: {"earning_share": 0.01},
    "truncation": lambda r, k: {"truncated_action_share": 0.2},
    "invalid_actions": lambda r, k: {"valid_action_share": 0.97 - 0.03 * k},
    "entropy_collapse": lambda r, k: {"entropy": 0.5 * 0.5**k, **_returning(r, 0.5)},
    "entropy_runaway": lambda r, k: {"entropy": r["entropy"] + 0.15 * k},
    "off_policy": lambda r, k: {"effective_share": max(0.05, 0.9 - 0.15 * k)},
    "engine_mismatch": _unlike_what_was_said,
    "over_bound": lambda r, k: {"over_bound_by_actor": {"actor-2": 0.05}},
    "format_gaming": lambda r, k: {"valid_action_share": 0.99, **_returning(r, 0.5)},
    "return_collapse": lambda r, k: _returning(r, 0.3 + 0.01 * (k % 3)),
    "class_raises": _raising_once,
    "slow_retries": lambda r, k: (
        {"retried_trials": 1, "waiting_s": 8.0 * r["train_s"]} if k % 2 else {}
    ),
    "member_failing": lambda r, k: {"dropped_by_member": {"beat-rock": 1}},
    "selection": _losing_long_groups,
    "disk_soon_full": lambda r, k: {"disk_free_bytes": 30_000_000_000 - 1_500_000_000 * k},
    "evicted_contexts": lambda r, k: {"prefix_reuse_rate": 0.28, "staleness_max": 0.0},
    "learner_starving": lambda r, k: {"waiting_s": 60.0 * r["train_s"]},
    "actors_starving": lambda r, k: {"actors_idle_share": 0.95},
}
"""A sickness for each signature that steps show."""
BEFORE = {
    "no_variance": {"return_by_episode": [-0.9, -0.8, -0.8]},
    "format_gaming": {"valid_action_share": 0.85},
    "disk_soon_full": {"disk_free_bytes": 30_000_000_000},
}
"""What a sickness needs to have been before."""
