"""What a reader should take away: the return reached, and what the controls take from it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mage_async.config.sections.admission import Admission
from mage_async.report.charts.learning_curves import curve_points
from mage_async.report.charts.number_format import duration, figure, percent, signed, words
from mage_async.results.run_files import RunRecords

Score = Mapping[str, Any]
CONTROLS = {
    "heldout_blind": ("blind", "earlier episodes removed"),
    "heldout_swapped": ("swapped", "another hidden at the end"),
    "heldout_unguided": ("unguided", "earlier tasks not told of"),
    "train": ("train", "tasks it was trained on"),
}


@dataclass(frozen=True, slots=True)
class Tile:
    """A number in large, with what it is, its interval and a note."""

    label: str
    value: str
    note: str
    interval: str = ""
    css: str = ""
    before: str = ""
    """The number that this one has grown from."""


@dataclass(frozen=True, slots=True)
class Headline:
    """Title, the one number, the controls beside it, and the sentence about them."""

    name: str
    run_line: str
    verdict: str
    tiles: Sequence[Tile] = ()
    """Empty where the run was not evaluated."""
    levels: str = ""
    """The references of the last episode in a line."""


def headline(records: RunRecords, summary: Mapping[str, Any]) -> Headline:
    """The head of a run's page."""
    name, run_line = summary["environment"]["name"], _run_line(summary)
    evaluation = summary.get("evaluation", {})
    if "heldout" not in evaluation:
        return Headline(name, run_line, unfinished(records, summary))
    references = summary.get("references", {}).get("heldout", {})
    errors = summary.get("reference_ci95", {}).get("heldout", {})
    levels = [_level(name, values, errors.get(name)) for name, values in references.items()]
    tiles = [_hero(evaluation["heldout"]), *_controls(evaluation)]
    return Headline(name, run_line, verdict(evaluation), tiles, " · ".join(levels))


def _level(name: str, values: Sequence[float], half_widths: Sequence[float] | None) -> str:
    """A reference of the last episode; a sampled one with its interval."""
    said = f"{words(name)} {signed(values[-1])}"
    return said if half_widths is None else f"{said} ± {half_widths[-1]:.2f}"


def verdict(evaluation: Mapping[str, Score]) -> str:
    """What was reached on held-out tasks, and how much of it is adaptation, where that shows."""
    heldout, num_episodes = evaluation["heldout"], len(evaluation["heldout"]["return_by_episode"])
    reached = f"In episode {num_episodes} the policy earns {_last(heldout)} on held-out tasks."
    blind, swapped = evaluation.get("heldout_blind"), evaluation.get("heldout_swapped")
    if blind is None or swapped is None or num_episodes == 1:
        return reached
    controls = (
        f" Without the earlier episodes in its context it earns {_last(blind)}; with another"
        f" hidden from the last episode on, {_last(swapped)}."
    )
    taken = [_taken(heldout, control) for control in (blind, swapped)]
    if all(gain > noise for gain, noise in taken):
        gains = " and ".join(signed(gain).removeprefix("+") for gain, _ in taken)
        return f"{reached}{controls} Adaptation is what these controls take away: {gains}."
    return (
        f"{reached}{controls} Adaptation is what these controls take away, and at least one of them"
        " takes away nothing that can be told from chance: this policy does not adapt."
    )


def unfinished(records: RunRecords, summary: Mapping[str, Any]) -> str:
    """How far a run without a final evaluation came."""
    text = (
        f"Not evaluated: it ended after {summary['steps']} of {records.config.learner.steps} steps."
    )
    if points := curve_points(records, "heldout"):
        version, score = points[-1]
        returns = " → ".join(signed(value) for value in score["return_by_episode"])
        text += f" The curve's last point, version {version}, held-out: {returns}."
    return text


def facts(summary: Mapping[str, Any], rules: Admission) -> list[Tile]:
    """The run's own figures as a strip of small tiles."""
    staleness, cache = summary.get("staleness", {}), summary.get("prefix_cache", {})
    rates, mismatch = summary.get("throughput", {}), summary.get("logprob_mismatch", {})
    rows = [("wall time", duration(summary["wall_s"]), _spent(summary))]
    if rates:
        speed = f"{figure(rates['generated_tokens_per_s'])} sampled tokens/s"
        rows.append(("trials/s", figure(rates["trials_per_s"]), speed))
    if staleness:
        behind = f" + {rules.lag} of lag" if rules.lag else ""
        bound = f"max {figure(staleness['max'])} of {rules.max_staleness}{behind} allowed"
        rows.append(("staleness, mean", f"{staleness['mean']:.2f}", bound))
    if cache:
        again = f"{percent(cache['reuse_rate'])} of what was known before"
        rows.append(("prefix-cache hits", percent(cache["hit_rate"]), again))
    if mismatch:
        mean = f"nats; mean {figure(mismatch['mean_abs'])}"
        rows.append(("log-prob mismatch, max", figure(mismatch["max_abs"]), mean))
    if "invalid_actions_per_trial" in summary:
        invalid = figure(round(summary["invalid_actions_per_trial"], 3))
        rows.append(("invalid actions", invalid, "a trial, while training"))
    for source, count in summary.get("injections", {}).items():
        rows.append(("special tokens in text", f"{count:,}", f"observations of {source}"))
    return [Tile(*row) for row in rows]


def _run_line(summary: Mapping[str, Any]) -> str:
    done = "" if summary["complete"] else ", not finished"
    kind = words(summary["credit"]["kind"])
    return f"{summary['steps']} steps{done} · seed {summary['seed']} · {kind} credit"


def _hero(heldout: Score) -> Tile:
    returns = heldout["return_by_episode"]
    has_several = len(returns) > 1
    return Tile(
        label=f"held-out return, episode 1{f' → {len(returns)}' if has_several else ''}",
        value=signed(returns[-1]),
        note=f"{heldout['num_trials']:,} trials, 95 % interval",
        interval=f"± {heldout['ci95_by_episode'][-1]:.2f}",
        css="hero",
        before=signed(returns[0]) if has_several else "",
    )


def _controls(evaluation: Mapping[str, Score]) -> list[Tile]:
    return [
        Tile(
            label=f"{label}, episode {len(evaluation[name]['return_by_episode'])}",
            value=signed(evaluation[name]["return_by_episode"][-1]),
            note=note,
            interval=f"± {evaluation[name]['ci95_by_episode'][-1]:.2f}",
            css=label,
        )
        for name, (label, note) in CONTROLS.items()
        if name in evaluation
    ]


def _spent(summary: Mapping[str, Any]) -> str:
    parts = {"warm start {} of it": "warm_start_s", "{} of CPU time": "processor_s"}
    known = [
        said.format(duration(summary[name])) for said, name in parts.items() if name in summary
    ]
    return "; ".join(known)


def _last(score: Score) -> str:
    mean, half = score["return_by_episode"][-1], score["ci95_by_episode"][-1]
    return f"{signed(mean)}\u00a0±\u00a0{half:.2f}"


def _taken(heldout: Score, control: Score) -> tuple[float, float]:
    """How much a control takes from the last episode, and the 95 % half-width of that."""
    gain = heldout["return_by_episode"][-1] - control["return_by_episode"][-1]
    halves = heldout["ci95_by_episode"][-1], control["ci95_by_episode"][-1]
    return gain, math.hypot(*halves)
