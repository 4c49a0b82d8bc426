"""Summarise a run as one JSON document, choose its best checkpoint, and make the rows of the tables
of returns, which the terminal and the pages lay out.

The summary of an interrupted run has only the keys that can be known, and `complete` is false.
"""

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from mage_async.assembly import environment_of, has_steady_tasks
from mage_async.config.schema import Config
from mage_async.environments.user_class import ResetStep
from mage_async.results.intervals import halves_of, noise
from mage_async.results.metrics import injections_by_source, prefix_rates
from mage_async.results.run_directory import RunDirectory, checkpoints, step_of
from mage_async.results.run_files import (
    Record,
    RunRecords,
    each_line,
    read_document,
    read_lines,
    read_records,
    write_whole,
)
from mage_async.trajectory import num_decimals
from mage_async.user_modules import shown_name

_RATES = ("trials_per_s", "generated_tokens_per_s", "trained_tokens_per_s")
"""Metrics whose means over the training time the summary holds."""


def summarise(
    run: RunDirectory,
    *,
    wall_s: float,
    processor_s: float | None,
    records: RunRecords | None = None,
) -> dict[str, Any]:
    """Return the content of `summary.json`, without the parts that the run did not record.

    Returns are per unit of the environment, intervals are half-widths at 95 %, staleness is in
    steps, mismatches are in nats. Rates are means over the training time, including waits.

    Args:
        wall_s: seconds from the command to its end, including warm start and evaluation; of a
            resumed run the sum over its commands.
        processor_s: CPU time of all processes of the run together, in seconds. Unlike `wall_s` it
            hardly depends on what else the machine does. `None` if it is not known.
        records: Records of the run; None: they are read.
    """
    records = records or read_records(run)
    step_s = records.step_s()
    parts = {
        **_identity(records),
        "wall_s": wall_s,
        "processor_s": processor_s,
        # If there is no warm start, the learner's `warm_start_s` is the time in which it wrote the
        # policy, and is left out.
        "warm_start_s": records.config.warm_start and records.learner.get("warm_start_s"),
        "evaluated_step": records.evaluation.get("version"),
        "chosen_of": records.evaluation.get("chosen_of"),
        "changed_keys": changed_keys(run),
        "before_training": _before_training(records),
        "best_step": _best_step(run, records),
        "evaluation": {
            # `evaluation.json` keeps the returns of each member, of which there may be thousands.
            name: {key: value for key, value in score.items() if key != "by_member"}
            for name, score in records.evaluation.get("sets", {}).items()
        },
        "references": records.evaluation.get("references"),
        "reference_ci95": records.evaluation.get("reference_ci95"),
        "environments": records.evaluation.get("environments"),
        "unplayed": _unplayed(records),
        "diversity": records.evaluation.get("diversity"),
        "harder": records.evaluation.get("harder"),
        "throughput": {
            name: weighted_mean([record[name] for record in records.metrics], step_s)
            for name in (_RATES if records.metrics else ())
        },
        "staleness": _staleness(records.metrics, records.step_tokens()),
        "prefix_cache": _prefix_cache(records),
        "invalid_actions_per_trial": (
            _mean_over_steps(records, "invalid_actions_per_trial") if records.metrics else None
        ),
        "injections": injections_by_source(records.metrics, records.config.environment.name),
        # `parity`: after the last step the learner compares its log-probs with the engine's once
        # more.
        "logprob_mismatch": _mismatch([*records.metrics, records.learner.get("parity", {})]),
        "trials": _trials(run, records),
        "dropped_by_reason": records.learner.get("dropped_by_reason"),
    }
    return {name: part for name, part in parts.items() if part not in (None, {})}


def changed_keys(run: RunDirectory) -> dict[str, str]:
    """Return the values of the keys that `--resume` changed, in words, by key: "0.001 to step 100,
    then 0.0003". `config.toml` has the last values alone.
    """
    values: dict[str, list[tuple[Any, int]]] = {}
    now: dict[str, Any] = {}
    for change in read_document(run.launch).get("changes", []):
        key, step = change["key"], change["step"]
        spans = values.setdefault(key, [])
        # No step was trained between two changes at the same step.
        if not spans or spans[-1][1] < step:
            spans.append((change["was"], step))
        now[key] = change["now"]
    return {
        key: ", then ".join([*(f"{value} to step {step}" for value, step in spans), f"{now[key]}"])
        for key, spans in values.items()
        if any(value != now[key] for value, _ in spans)
    }


def changed_note(summary: Mapping[str, Any]) -> str:
    """Return a sentence on the keys that `--resume` changed; "" if it changed none."""
    changed = summary.get("changed_keys", {})
    values = "; ".join(f"{key} {text}" for key, text in changed.items())
    return f"changed by --resume: {values}" if values else ""


def _before_training(records: RunRecords) -> Record | None:
    """Return the held-out score of version 0 on the curve; None if no later one is evaluated."""
    if not records.evaluation.get("version"):
        return None
    first = (line["sets"]["heldout"] for line in records.curve if line["version"] == 0)
    score: Record = next(first, {})
    keys = ("num_trials", "return_by_episode", "ci95_by_episode")
    return {key: score[key] for key in keys if key in score}


def _best_step(run: RunDirectory, records: RunRecords) -> int | None:
    """Return the step of the best checkpoint; None if there is none."""
    best = best_checkpoint(run, records.config)
    return None if best is None else step_of(best.path)


def write_summary(run: RunDirectory, summary: Record) -> None:
    """Write `summary.json` atomically."""
    write_whole(run.summary, json.dumps(summary, indent=2) + "\n")


def _identity(records: RunRecords) -> Record:
    """Return what was run: seed, steps, environment and credit, and whether the run is complete."""
    config = records.config
    steps = trained_steps(records)
    is_whole = bool(records.learner) and bool(records.evaluation)
    environment = environment_of(config)
    facts = environment.facts
    return {
        "seed": config.seed,
        "steps": steps,
        "complete": is_whole and steps >= config.learner.steps,
        "environment": {
            "name": shown_name(config.environment.name),
            "options": config.environment.options,
            "units": facts.units,
            "min_return": facts.min_return,
            "max_return": facts.max_return,
            "has_wins": facts.has_wins,
            "are_tasks_numbers": isinstance(environment, ResetStep)
            and not hasattr(environment.kind, "members"),
        },
        "credit": msgspec.to_builtins(config.credit),
    }


def trained_steps(records: RunRecords) -> int:
    """Return the number of steps that a run has trained."""
    last: int = records.metrics[-1]["step"] if records.metrics else 0
    # The learner writes its summary at checkpoints and at the end, and its metrics at every step.
    return max(last, int(records.learner.get("version", 0)))


def _unplayed(records: RunRecords) -> Record | None:
    """Return the versions of which the curve has no point, although it should have one, and the
    number of points that it should have; None if it lacks none.
    """
    every, steps = records.config.evaluation.every, trained_steps(records)
    # The final sets are played with the last version, in place of a point.
    end = min(steps + 1, records.config.learner.steps)
    due = range(0, end, every) if every and steps else []
    played = {point["version"] for point in records.curve}
    versions = [version for version in due if version not in played]
    return {"versions": versions, "num_due": len(due)} if versions else None


def unplayed_note(summary: Mapping[str, Any]) -> str:
    """Return a sentence on the points that the curve lacks; "" if it lacks none."""
    if "unplayed" not in summary:
        return ""
    first, *others = summary["unplayed"]["versions"]
    which = f"versions {first} to {others[-1]}" if others else f"version {first}"
    points = f"{1 + len(others)} of {summary['unplayed']['num_due']} points of the curve ({which})"
    if not summary["complete"]:
        return f"{points} are not played; a resumed run plays those whose weights are still there"
    return (
        f"{points} were not played before the run, or its evaluator, was stopped, and their "
        "weights are gone; a larger evaluation.every, or fewer evaluation.trials, lets the "
        "evaluator keep up"
    )


def _trials(run: RunDirectory, records: RunRecords) -> Record | None:
    """Return what became of all trials so far; None if that was not recorded."""
    # The learner's summary may be that of the newest checkpoint, after which a run that was stopped
    # has trained further steps.
    if records.learner.get("version", 0) < trained_steps(records):
        return read_document(run.times).get("trials") or records.learner.get("trials")
    return records.learner.get("trials")


def _staleness(metrics: Sequence[Record], tokens: Sequence[float]) -> Record:
    """Return staleness over all trained tokens.

    Args:
        tokens: Number of sampled tokens of each step.
    """
    known = [record for record in metrics if "staleness_mean" in record]
    if not known:
        return {}

    def mean(name: str) -> float:
        return over_tokens(metrics, tokens, name)

    episodes = range(1, len(known[0]["return_by_episode"]) + 1)
    return {
        "mean": mean("staleness_mean"),
        "max": max(record["staleness_max"] for record in known),
        "mean_by_episode": [mean(f"staleness_mean_episode_{each}") for each in episodes],
        "over_bound_share": mean("over_bound_share"),
        "over_bound_share_by_episode": [
            mean(f"over_bound_share_episode_{each}") for each in episodes
        ],
    }


def over_tokens(metrics: Sequence[Record], tokens: Sequence[float], name: str) -> float:
    """Return the mean of a metric over the steps that have it, weighted by the tokens of each; 0 if
    no step has it.
    """
    steps = zip(metrics, tokens, strict=True)
    known = [(record[name], count) for record, count in steps if name in record]
    return weighted_mean(*zip(*known, strict=True)) if known else 0.0


def _prefix_cache(records: RunRecords) -> Record:
    """Return the shares of prompt tokens that caches held.

    These shares come from the totals of the run or, if it was interrupted, are means over steps.
    """
    if totals := records.learner.get("totals"):
        rates = prefix_rates(totals)
    else:
        names = ("prefix_hit_rate", "prefix_reuse_rate") if records.metrics else ()
        rates = {name: _mean_over_steps(records, name) for name in names}
    return {name.removeprefix("prefix_"): rate for name, rate in rates.items()}


def _mean_over_steps(records: RunRecords, name: str) -> float:
    """Return the mean of a metric that every step has: of invalid actions or cached prefixes."""
    # Every step trains equally many trials, so this is a mean over trials, too.
    return float(sum(record[name] for record in records.metrics) / len(records.metrics))


def _mismatch(measured: Sequence[Record]) -> Record:
    """Return the difference of log-probs, |learner - engine|, in nats.

    Only tokens count whose weights and KV cache had the version that the step began with.
    """
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
    """Return the weighted mean of `values`; 0 if all weights are 0."""
    total = sum(weights)
    pairs = zip(values, weights, strict=True)
    return sum(value * weight for value, weight in pairs) / total if total else 0.0


NEAR = 5
"""Number of steps before a checkpoint, and after it, whose training returns measure it."""
CLEAR_ERRORS, CLEAR_SHARE = 3.3, 0.1
"""Number of standard errors, and share of what was gained since the beginning, by which a
checkpoint must exceed the newest one to be called better. The level of 3.3 errors is 99.9 %, not
95 %, because the best of many checkpoints is compared.
"""
_STEP_OF_LINE = re.compile(rb'{"step": (\d+),')
"""Beginning of a line of `metrics.jsonl`."""
Returns = dict[int, tuple[float, float]]
"""Mean return of the last episode and its standard error, by version of the policy."""


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """Name the checkpoint of a run with the largest return of the last episode."""

    path: Path
    reason: str
    """Clause with its return and that of the newest checkpoint; "" if it is the newest, or not
    clearly better."""
    num_heldout: int
    """Number of checkpoints of which it is the best on held-out tasks; 0 if it was chosen by the
    returns of training, or is the only one."""


def best_checkpoint(run: RunDirectory, config: Config) -> BestCheckpoint | None:
    """Return the best checkpoint of a run; None if it has none.

    Two checkpoints are compared by their held-out evaluations, if both were played, else by the
    returns of the training steps around them. Where these cannot be compared either, because the
    tasks of training change (`has_steady_tasks`), the later checkpoint counts as the better one.

    Raises:
        RunError: a file of the run is damaged.
    """
    found = {step_of(folder): folder for folder in checkpoints(run.checkpoints)}
    if not found:
        return None
    played = [*read_lines(run.curve), read_document(run.evaluation)]
    # A half-width of few trials is more than 1.96 standard errors: the error is then overestimated.
    heldout = {
        each["version"]: (score["return_by_episode"][-1], halves_of(score)[-1] / 1.96)
        for each in played
        if (score := each.get("sets", {}).get("heldout"))
    }
    trained = _training_returns(run, [0, *found]) if has_steady_tasks(config) else {}

    def returns_of(one: int, other: int) -> tuple[str, Returns]:
        """Return the returns by which two checkpoints are compared, and where they were earned."""
        if heldout.keys() >= {one, other}:
            return "on held-out tasks", heldout
        return "in training", trained if trained.keys() >= {one, other} else {}

    newest = best = max(found)
    for step in sorted(found, reverse=True):
        _, returns = returns_of(step, best)
        if returns and returns[step][0] > returns[best][0]:
            best = step
    kind, returns = returns_of(best, newest)
    reason = _why_better(returns, best, newest, kind) if best != newest else ""
    num_heldout = len(found.keys() & heldout.keys()) if best in heldout else 0
    return BestCheckpoint(found[best], reason, num_heldout if num_heldout > 1 else 0)


def numbers_note(summary: Mapping[str, Any]) -> str:
    """Return a sentence on held-out tasks of a class without members; "" for others."""
    if not summary["environment"].get("are_tasks_numbers") or "evaluation" not in summary:
        return ""
    return (
        "held-out tasks are other numbers than those of training, and may hide the same things: "
        "`mage check` counts how many do"
    )


def chosen_note(summary: Mapping[str, Any]) -> str:
    """Return a sentence on the choice of the evaluated checkpoint, if that flatters its returns."""
    if "chosen_of" not in summary:
        return ""
    return (
        f"the checkpoint is the best of {summary['chosen_of']} on held-out tasks, and this "
        "evaluation plays some of the same tasks unless the split has enough members for two sets, "
        "so its held-out returns are biased upwards; report those of a step that was fixed "
        "beforehand, such as the newest one"
    )


def _training_returns(run: RunDirectory, versions: Sequence[int]) -> Returns:
    """Return the training returns of the steps around some versions of the policy."""
    around = {version: range(version - NEAR + 1, version + NEAR + 1) for version in versions}
    needed = {step for steps in around.values() for step in steps}

    def is_needed(line: bytes) -> bool:
        found = _STEP_OF_LINE.match(line)
        return not found or int(found[1]) in needed

    # The learner calls this at each checkpoint, so only the needed lines of a long run are parsed.
    lines = each_line(run.metrics, is_parsed=is_needed)
    returns = {each["step"]: each["return_by_episode"][-1] for each in lines}
    near = {
        version: [returns[step] for step in steps if step in returns]
        for version, steps in around.items()
    }
    return {
        version: (statistics.fmean(values), noise(values) / math.sqrt(len(values)))
        for version, values in near.items()
        if len(values) >= NEAR
    }


def _why_better(returns: Returns, best: int, newest: int, kind: str) -> str:
    """Return a clause with the returns of the best checkpoint and of the newest one; "" if the best
    is not clearly better.
    """
    (high, high_error), (low, low_error) = returns[best], returns[newest]
    least = CLEAR_ERRORS * math.hypot(high_error, low_error)
    if 0 in returns:
        least = max(least, CLEAR_SHARE * (high - returns[0][0]))
    if not high - low > least:  # NaN after an evaluation of a single trial
        return ""
    digits = num_decimals((high, low))
    return (
        f"the last episode earned {high:+.{digits}f} {kind} there, and {low:+.{digits}f} at step "
        f"{newest}, the newest"
    )


# Rows of the tables of returns in the terminal and on pages: one value for each episode.

Score = Mapping[str, Any]
"""A score of a set of trials as plain data: see `mage_async/results/score.py`."""


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Hold the name of an evaluation set, and its explanation."""

    label: str
    short_note: str
    """Note after the label in the terminal; "" for none."""
    note: str
    """What the set shows, as a note on pages."""


SETS = {
    "heldout": EvaluationSet("held-out", "", "tasks that training never used"),
    "heldout_blind": EvaluationSet("blind", "no memory", "earlier episodes removed"),
    "heldout_swapped": EvaluationSet(
        "swapped", "new last", "another opponent or task in the last episode"
    ),
    "heldout_unguided": EvaluationSet("unguided", "no earlier tasks", "no memory of earlier tasks"),
    "train": EvaluationSet("train", "", "tasks it was trained on"),
}
"""Evaluation sets in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """Hold a labelled row with a value for each episode."""

    label: str
    values: Sequence[float]
    half_widths: Sequence[float] | None = None
    """95 % half-widths, NaN of a single trial; None if the values are exact, or none was computed.
    """
    is_reference: bool = False
    """Whether these are known returns of the environment, not results of the run."""


def score_row(label: str, score: Score) -> EpisodeRow:
    """Return the returns of a score with their intervals."""
    return EpisodeRow(label, score["return_by_episode"], halves_of(score))


def set_rows(scores: Mapping[str, Score]) -> dict[str, EpisodeRow]:
    """Return the returns of each evaluation set, by its name in `SETS`."""
    return {
        name: score_row(each.label, scores[name]) for name, each in SETS.items() if name in scores
    }


def reference_rows(known: Mapping[str, Any]) -> list[EpisodeRow]:
    """Return the known held-out returns, such as those of random play, for comparison.

    References that were sampled have intervals, exact ones have none.

    Args:
        known: A summary, or its part about one environment of a mix of environments.
    """
    half_widths = known.get("reference_ci95", {}).get("heldout", {})
    references = known.get("references", {}).get("heldout", {})
    rows = [
        EpisodeRow(name.replace("_", " "), values, half_widths.get(name), is_reference=True)
        for name, values in references.items()
    ]
    # Returns before training are shown only if the environment states no references of its own.
    if "before_training" in known and references.keys() <= PLAYED_REFERENCES:
        rows.append(
            replace(score_row(BEFORE_TRAINING, known["before_training"]), is_reference=True)
        )
    return rows


PLAYED_REFERENCES = {"random", "win-stay"}
"""Names of the references that are measured by playing, for an environment that states none."""
BEFORE_TRAINING = "before training"
"""Label of the returns of version 0: those of the warm start's result, or of the pretrained model.
"""
SOLVED = 0.05
"""Share of the range of returns below the largest one within which a task counts as solved."""


def worse_note(summary: Mapping[str, Any]) -> str:
    """Return a sentence if the evaluated policy earns less in the last held-out episode than
    before training, or than win-stay, lose-shift, by more than the intervals; if it does not
    earn more than random play in an environment that states no references; or if a finished run
    does not earn more than before training. "" otherwise.
    """
    if not (score := summary.get("evaluation", {}).get("heldout")):
        return ""
    own = score_row("", score)
    rows = {row.label: row for row in reference_rows(summary)}
    known = [rows["win-stay"]] if "win-stay" in rows else []
    if "before_training" in summary:
        known.append(score_row(BEFORE_TRAINING, summary["before_training"]))
    better = [row for row in known if _gap(row, own) > 0]
    best, evaluated = summary.get("best_step"), summary.get("evaluated_step")
    if not better:
        references = summary.get("references", {}).get("heldout", {}).keys()
        is_played = "random" in references and references <= PLAYED_REFERENCES
        # The interval of a single trial is NaN, and shows nothing.
        if not is_played or not _gap(own, rows["random"]) <= 0:
            return _nothing_added(summary, own)
        digits = num_decimals([own.values[-1], rows["random"].values[-1]])
        risen = [row for row in known if row.label == BEFORE_TRAINING and _gap(own, row) > 0]
        return (
            f"step {evaluated} earns {own.values[-1]:+.{digits}f} in the last held-out episode, no "
            f"more than random play, {rows['random'].values[-1]:+.{digits}f}, by their intervals: "
            + (
                f"it earns more than before training, {risen[0].values[-1]:+.{digits}f}, so "
                "further steps may help"
                if risen
                else "nothing is learned yet. Easier tasks, partial rewards or a `script` to clone "
                "help more than further steps"
            )
        )
    cure = f"; the best checkpoint is that of step {best}: mage evaluate RUN_DIR --checkpoint best"
    digits = num_decimals(row.values[-1] for row in (own, *better))
    names = " and than ".join(f"{row.label}, {row.values[-1]:+.{digits}f}" for row in better)
    return (
        f"step {evaluated} earns {own.values[-1]:+.{digits}f} in the last held-out episode, less "
        f"than {names}{'' if best in (None, evaluated) else cure}"
    )


def _nothing_added(summary: Mapping[str, Any], own: EpisodeRow) -> str:
    """Return a sentence with the likely cause and a cure if a finished run does not earn more in
    the last held-out episode than before training, by the intervals; "" otherwise.

    Args:
        own: Held-out returns of the evaluated policy, which does not earn less than before.
    """
    if not summary["complete"] or "before_training" not in summary:
        return ""
    before = score_row(BEFORE_TRAINING, summary["before_training"])
    if not _gap(own, before) <= 0:  # also where a half-width of a single trial is NaN
        return ""
    facts = summary["environment"]
    least, most, units = (facts.get(name) for name in ("min_return", "max_return", "units"))
    train, blind = (summary["evaluation"].get(name) for name in ("train", "heldout_blind"))
    digits = num_decimals([own.values[-1], before.values[-1]])
    if most is not None and before.values[-1] * units > most - SOLVED * (most - least):
        cause = "the task was solved already. Choose harder ones"
    elif train and _gap(score_row("", train), own) > 0:
        cause = (
            "tasks of training are learned by heart, and earn more. Train on more of them, or for "
            "fewer learner.steps"
        )
    elif blind and _gap(own, score_row("", blind)) > 0:
        cause = (
            "the warm start, or the model itself, knew already how to use earlier episodes, for "
            f"without them (blind) it earns {score_row('', blind).values[-1]:+.{digits}f}. If more "
            "can be earned here, `mage doctor RUN_DIR` looks for a cause; if it finds none, raise "
            "learner.entropy or learner.steps"
        )
    else:
        cause = (
            "`mage doctor RUN_DIR` looks for a cause. If it finds none, raise learner.steps or "
            "learner.learning_rate; evaluation.trials and evaluation.final_trials narrow the "
            "intervals"
        )
    return (
        f"step {summary.get('evaluated_step')} earns {own.values[-1]:+.{digits}f} in the last "
        f"held-out episode, no more than before training, {before.values[-1]:+.{digits}f}, by "
        f"their intervals: {cause}"
    )


def _gap(row: EpisodeRow, other: EpisodeRow) -> float:
    """Return by how much the last episode of a row earns more than that of another one, beyond the
    half-width of the difference; negative if it does not.
    """
    halves = [each.half_widths[-1] for each in (row, other) if each.half_widths]
    return row.values[-1] - other.values[-1] - math.hypot(*halves)


@dataclass(frozen=True, slots=True)
class EnvironmentRows:
    """Hold the returns in one environment of a mix."""

    label: str
    sets: Mapping[str, EpisodeRow]
    """Rows of the evaluation sets by name."""
    references: Sequence[EpisodeRow]
    facts: Mapping[str, Any]
    """Facts of the environment, such as `units` and the bounds of its return."""


def environment_rows(summary: Mapping[str, Any]) -> list[EnvironmentRows]:
    """Return the rows of each environment of a mix; empty without a mix."""
    scores = summary.get("evaluation", {})
    found = []
    for name, known in summary.get("environments", {}).items():
        parts = {
            each: score["parts"]["environment"][name]
            for each, score in scores.items()
            if name in score.get("parts", {}).get("environment", {})
        }
        label = name if known["is_trained_on"] else f"{name} (not trained on)"
        rows = EnvironmentRows(label, set_rows(parts), reference_rows(known), known["environment"])
        found.append(rows)
    return found


def probe_rows(scores: Mapping[str, Score]) -> dict[str, EpisodeRow]:
    """Return the share of actions that only gather information, by evaluation set.

    Empty if the environment knows no such actions.
    """
    shares = {name: scores[name]["probes_by_episode"] for name in SETS if name in scores}
    if not any(map(any, shares.values())):
        return {}
    return {name: EpisodeRow(SETS[name].label, values) for name, values in shares.items()}


def diversity_row(diversity: Mapping[str, Any]) -> EpisodeRow:
    """Return the entropy of trajectories; see `mage_async/results/score.py`."""
    label = f"diversity, in nats, at most {diversity['most']:.2f}"
    return EpisodeRow(label, diversity["entropy_by_episode"], halves_of(diversity))


def harder_rows(harder: Mapping[str, Any]) -> list[EpisodeRow]:
    """Return the returns on each rung of a ladder of harder tasks, first the tasks as trained."""
    return [score_row(rung["label"], rung["score"]) for rung in harder["rungs"]]
