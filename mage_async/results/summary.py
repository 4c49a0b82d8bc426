"""The summary of a run as one JSON document: what it reached, how fast, and every trial's end.

The summary of an interrupted run has only the keys that can be known, and `complete` is false.
"""

import json
from collections.abc import Sequence
from typing import Any

from mage_async.assembly import environment_of
from mage_async.results.durable_files import write_whole
from mage_async.results.metrics import injections_by_source
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import Record, RunRecords, read_records

_SCORES = (
    "return_by_episode",
    "ci95_by_episode",
    "num_trials",
    "by_family",
    "best_within",
    "won_by_episode",
    "won_bounds_by_episode",
    "won_within",
    "lost_by_episode",
    "probes_by_episode",
    "parts",
    "invalid_actions_per_trial",
    "cut_short",
)
_RATES = ("trials_per_s", "generated_tokens_per_s", "trained_tokens_per_s")


def summarise(run: RunDirectory, *, wall_s: float, processor_s: float | None) -> dict[str, Any]:
    """The content of `summary.json`.

    Returns are per unit of the environment, intervals half-widths at 95 %, staleness is in steps,
    mismatches are in nats. Rates are means over the training time, waits included.

    Args:
        wall_s: from the command to its end, warm start and evaluation included.
        processor_s: seconds of CPU cores that all its processes used: its cost on a machine that is
            busy with other things too. None: not known.
    """
    records = read_records(run)
    parts = {
        **_identity(records),
        "wall_s": wall_s,
        "processor_s": processor_s,
        "warm_start_s": records.learner.get("warm_start_s"),
        "evaluation": _evaluation(records.evaluation),
        "references": records.evaluation.get("references"),
        "reference_ci95": records.evaluation.get("reference_ci95"),
        "environments": records.evaluation.get("environments"),
        "diversity": records.evaluation.get("diversity"),
        "harder": records.evaluation.get("harder"),
        "throughput": _throughput(records),
        "staleness": _staleness(records),
        "prefix_cache": _prefix_cache(records),
        "invalid_actions_per_trial": _invalid_actions(records),
        "injections": injections_by_source(records.metrics, records.config.environment.name),
        "logprob_mismatch": _mismatch([*records.metrics, records.learner.get("parity", {})]),
        "trials": records.learner.get("trials"),
        "dropped_by_reason": records.learner.get("dropped_by_reason"),
    }
    return {name: part for name, part in parts.items() if part not in (None, {})}


def write_summary(run: RunDirectory, summary: Record) -> None:
    """Write `summary.json`, whole or not at all."""
    write_whole(run.summary, json.dumps(summary, indent=2) + "\n")


def _identity(records: RunRecords) -> Record:
    config, steps = records.config, _num_steps(records)
    is_whole = bool(records.learner) and bool(records.evaluation)
    facts = environment_of(config).facts
    return {
        "seed": config.seed,
        "steps": steps,
        "complete": is_whole and steps >= config.learner.steps,
        "environment": {
            "name": config.environment.name,
            "options": config.environment.options,
            "units": facts.units,
            "min_return": facts.min_return,
            "max_return": facts.max_return,
        },
        "credit": {
            "kind": config.credit.kind,
            "turn_discount": config.credit.turn_discount,
            "episode_discount": config.credit.episode_discount,
        },
    }


def _num_steps(records: RunRecords) -> int:
    last = records.metrics[-1]["step"] if records.metrics else 0
    return records.learner.get("version", last)


def _evaluation(evaluation: Record) -> Record:
    """The scores of an evaluation, also of one that an earlier version wrote."""
    sets = evaluation.get("sets", {})
    return {
        name: {key: score[key] for key in _SCORES if key in score} for name, score in sets.items()
    }


def _throughput(records: RunRecords) -> Record:
    seconds = records.step_s()
    return {
        name: weighted_mean([record[name] for record in records.metrics], seconds)
        for name in _RATES
        if records.metrics
    }


def _staleness(records: RunRecords) -> Record:
    """Token by token: a step counts by the tokens it trained."""
    metrics = [record for record in records.metrics if "staleness_mean" in record]
    if not metrics:
        return {}
    episodes = range(1, len(metrics[0]["return_by_episode"]) + 1)
    return {
        "mean": _over_tokens(records, "staleness_mean"),
        "max": max(record["staleness_max"] for record in metrics),
        "mean_by_episode": [
            _over_tokens(records, f"staleness_mean_episode_{episode}") for episode in episodes
        ],
        "over_bound_share": _over_tokens(records, "over_bound_share"),
        "over_bound_share_by_episode": [
            _over_tokens(records, f"over_bound_share_episode_{episode}") for episode in episodes
        ],
        **records.learner.get("fates", {}),
    }


def _over_tokens(records: RunRecords, name: str) -> float:
    steps = zip(records.metrics, records.step_s(), strict=True)
    known = [(record, seconds) for record, seconds in steps if name in record]
    tokens = [record["generated_tokens_per_s"] * seconds for record, seconds in known]
    return weighted_mean([record[name] for record, _ in known], tokens)


def _prefix_cache(records: RunRecords) -> Record:
    """Shares of prompt tokens: from the totals, or of an interrupted run the mean of its steps."""
    if totals := records.learner.get("totals"):
        prompt, reused = totals["prompt_tokens"], totals["reused_tokens"]
        computed_before = reused + totals["repeated_tokens"]
        return {
            "hit_rate": reused / max(1, prompt),
            "reuse_rate": reused / max(1, computed_before),
        }
    names = {"hit_rate": "prefix_hit_rate", "reuse_rate": "prefix_reuse_rate"}
    return {
        key: sum(record[name] for record in records.metrics) / len(records.metrics)
        for key, name in names.items()
        if records.metrics
    }


def _invalid_actions(records: RunRecords) -> float | None:
    """Over all trials trained; every step trains equally many."""
    values = [record["invalid_actions_per_trial"] for record in records.metrics]
    return sum(values) / len(values) if values else None


def _mismatch(measured: Sequence[Record]) -> Record:
    """Learner against engine, over tokens whose weights and cached keys were the trained ones."""
    known = [each for each in measured if "logprob_mismatch_max" in each]
    tokens = [each["equal_version_tokens"] for each in known]
    if not known:
        return {}
    return {
        "mean_abs": weighted_mean([each["logprob_mismatch_mean"] for each in known], tokens),
        "max_abs": max(each["logprob_mismatch_max"] for each in known),
        "num_tokens": int(sum(tokens)),
    }


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Mean of `values` by `weights`; 0 where nothing weighs anything."""
    total = sum(weights)
    pairs = zip(values, weights, strict=True)
    return sum(value * weight for value, weight in pairs) / total if total else 0.0
