"""The head of a run's page: the return, what the controls lower it to, and figures of the run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mage_async.config.learning import Admission
from mage_async.pages.charts import duration, figure, percent, signed, words
from mage_async.pages.curves import curve_points, set_css
from mage_async.results.return_rows import SETS, EpisodeRow, Score, reference_rows
from mage_async.results.run_files import RunRecords


@dataclass(frozen=True, slots=True)
class Tile:
    """A large number with its label, its interval and a note."""

    label: str
    value: str
    note: str
    interval: str = ""
    css: str = ""
    before: str = ""
    """The earlier number that `value` has grown from; empty: none."""


@dataclass(frozen=True, slots=True)
class Headline:
    """Title, return, controls, and the sentence about them."""

    name: str
    run_line: str
    verdict: str
    tiles: Sequence[Tile] = ()
    """Empty if the run was not evaluated."""
    levels: str = ""
    """The references of the last episode in a line."""


def headline(records: RunRecords, summary: Mapping[str, Any]) -> Headline:
    """Return the head of a run's page."""
    done = "" if summary["complete"] else ", not finished"
    kind = words(summary["credit"]["kind"])
    name = summary["environment"]["name"]
    run_line = f"{summary['steps']} steps{done} · seed {summary['seed']} · {kind} credit"
    evaluation = summary.get("evaluation", {})
    if "heldout" not in evaluation:
        return Headline(name, run_line, unfinished(records, summary))
    heldout, *others = SETS
    tiles = [
        heldout_tile(
            evaluation[heldout], f"{evaluation[heldout]['num_trials']:,} trials, 95 % interval"
        ),
        *(_set_tile(each, evaluation[each]) for each in others if each in evaluation),
    ]
    levels = " · ".join(_last_value(row) for row in reference_rows(summary))
    return Headline(name, run_line, verdict(evaluation), tiles, levels)


def heldout_tile(heldout: Score, note: str) -> Tile:
    """Return the largest tile of a page: the held-out return of the first and the last episode."""
    returns, halves = heldout["return_by_episode"], heldout.get("ci95_by_episode")
    has_several = len(returns) > 1
    return Tile(
        label=f"held-out return, episode 1{f' → {len(returns)}' if has_several else ''}",
        value=signed(returns[-1]),
        note=note,
        interval=f"± {halves[-1]:.2f}" if halves else "",
        css="hero",
        before=signed(returns[0]) if has_several else "",
    )


def _set_tile(name: str, score: Score) -> Tile:
    returns = score["return_by_episode"]
    return Tile(
        label=f"{SETS[name].label}, episode {len(returns)}",
        value=signed(returns[-1]),
        note=SETS[name].note,
        interval=f"± {score['ci95_by_episode'][-1]:.2f}",
        css=set_css(name),
    )


def _last_value(reference: EpisodeRow) -> str:
    text = f"{reference.label} {signed(reference.values[-1])}"
    halves = reference.half_widths
    return text if halves is None else f"{text} ± {halves[-1]:.2f}"


def verdict(evaluation: Mapping[str, Score]) -> str:
    """Return a sentence on the held-out return and on how much of it is adaptation.

    Adaptation counts as shown if both controls lower the last return by more than the 95 %
    half-width of the difference.
    """
    heldout, num_episodes = evaluation["heldout"], len(evaluation["heldout"]["return_by_episode"])
    reached = f"In episode {num_episodes} the policy earns {_last(heldout)} on held-out tasks."
    blind, swapped = evaluation.get("heldout_blind"), evaluation.get("heldout_swapped")
    if blind is None or swapped is None or num_episodes == 1:
        return reached
    controls = (
        f" Without the earlier episodes in its context it earns {_last(blind)}; with another"
        f" hidden from the last episode on, {_last(swapped)}."
    )
    losses = [_loss(heldout, control) for control in (blind, swapped)]
    if all(loss > noise for loss, noise in losses):
        lost = " and ".join(signed(loss).removeprefix("+") for loss, _ in losses)
        return f"{reached}{controls} Adaptation is what these controls take away: {lost}."
    return (
        f"{reached}{controls} Adaptation is what these controls take away, and at least one of them"
        " takes away nothing that can be told from chance: this policy does not adapt."
    )


def _last(score: Score) -> str:
    mean, half = score["return_by_episode"][-1], score["ci95_by_episode"][-1]
    return f"{signed(mean)}\u00a0±\u00a0{half:.2f}"


def _loss(heldout: Score, control: Score) -> tuple[float, float]:
    """Return by how much a control lowers the last return, and the half-width of that."""
    loss = heldout["return_by_episode"][-1] - control["return_by_episode"][-1]
    halves = heldout["ci95_by_episode"][-1], control["ci95_by_episode"][-1]
    return loss, math.hypot(*halves)


def unfinished(records: RunRecords, summary: Mapping[str, Any]) -> str:
    """Return a sentence on how far a run without a final evaluation came."""
    text = (
        f"Not evaluated: it ended after {summary['steps']} of {records.config.learner.steps} steps."
    )
    if points := curve_points(records, "heldout"):
        version, score = points[-1]
        returns = " → ".join(signed(value) for value in score["return_by_episode"])
        text += f" The curve's last point, version {version}, held-out: {returns}."
    return text


def facts(summary: Mapping[str, Any], admission: Admission) -> list[Tile]:
    """Return the run's own figures as small tiles."""
    staleness, cache = summary.get("staleness", {}), summary.get("prefix_cache", {})
    rates, mismatch = summary.get("throughput", {}), summary.get("logprob_mismatch", {})
    spent = []
    if "warm_start_s" in summary:
        spent.append(f"warm start {duration(summary['warm_start_s'])} of it")
    if "processor_s" in summary:
        spent.append(f"{duration(summary['processor_s'])} of CPU time")
    rows = [("wall time", duration(summary["wall_s"]), "; ".join(spent))]
    if rates:
        speed = f"{figure(rates['generated_tokens_per_s'])} sampled tokens/s"
        rows.append(("trials/s", figure(rates["trials_per_s"]), speed))
    if staleness:
        lag = f" + {admission.lag} of lag" if admission.lag else ""
        bound = f"max {figure(staleness['max'])} of {admission.max_staleness}{lag} allowed"
        rows.append(("staleness, mean", f"{staleness['mean']:.2f}", bound))
    if cache:
        reuse = f"{percent(cache['reuse_rate'])} of tokens computed before"
        rows.append(("prefix-cache hits", percent(cache["hit_rate"]), reuse))
    if mismatch:
        mean = f"nats; mean {figure(mismatch['mean_abs'])}"
        rows.append(("log-prob mismatch, max", figure(mismatch["max_abs"]), mean))
    if "invalid_actions_per_trial" in summary:
        invalid = figure(round(summary["invalid_actions_per_trial"], 3))
        rows.append(("invalid actions", invalid, "a trial, while training"))
    for source, count in summary.get("injections", {}).items():
        rows.append(("special tokens in text", f"{count:,}", f"observations of {source}"))
    return [Tile(*row) for row in rows]
