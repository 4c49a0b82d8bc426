"""The page of a run, live or ended: its curves, whose points lead to steps, and how it fares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from mage_async.doctor import Finding
from mage_async.pages.frame import Frame
from mage_async.pages.listed import ListedGroup, ListedTrial
from mage_async.pages.templating import fill
from mage_async.pages.trial_lists import Choice, group_rows
from mage_async.report.charts.learning_curves import (
    SETS,
    adaptation,
    curve_points,
    learning_curves,
)
from mage_async.report.charts.number_format import duration, figure, percent, signed
from mage_async.report.charts.stacked_bars import time_bars
from mage_async.report.charts.step_metrics import POLICY, THROUGHPUT, metric_charts, staleness
from mage_async.report.headline import Tile
from mage_async.report.population_table import population_table
from mage_async.report.run_page import adaptation_part, episode_names, fates_part
from mage_async.results.run_files import RunRecords

MOST_POINTS = 120
"""Steps that a chart shows; of more, evenly spaced ones, so that each can be clicked."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a run now."""

    records: RunRecords
    """With at most `MOST_POINTS` steps and evaluations."""
    state: str
    step: int
    blocked_s: Mapping[str, Mapping[str, float]]
    trials: Mapping[str, int]
    """By fate, as the learner last counted."""
    findings: Sequence[Finding]
    """Of the doctor."""
    ends: Sequence[str]
    """Epitaphs of processes, the latest first."""
    groups: Sequence[ListedGroup]
    """Not trained yet, the newest first."""
    listed: Sequence[ListedTrial]
    """Their trials."""
    units: int | None
    """Of the environment; None where that cannot be loaded here."""


def overview_page(frame: Frame, seen: Seen) -> Markup:
    """The run's own page."""
    records = seen.records
    config, population = records.config, records.learner.get("population")
    steps, home = [line["step"] for line in records.metrics], frame.home
    return fill(
        "overview.html",
        frame=frame,
        environment=config.environment.name,
        seed=config.seed,
        state=seen.state,
        step=seen.step,
        steps=config.learner.steps,
        tiles=_tiles(seen),
        findings=seen.findings,
        ends=seen.ends,
        curves=[
            (said, chart and chart.leading(lambda x: f"{home}step/{x}", "step", steps or [1]))
            for said, chart in learning_curves(records)
        ],
        episode_names=episode_names(config.trial.episodes),
        is_sampled=len(steps) >= MOST_POINTS,
        rows=group_rows(seen.groups, seen.listed, Choice()),
        time_bars=time_bars(seen.blocked_s),
        staleness=staleness(records.metrics, config.admission.max_staleness),
        fates=fates_part({**records.learner, "trials": dict(seen.trials)}) if seen.trials else None,
        throughput=metric_charts(records, THROUGHPUT),
        policy=metric_charts(records, POLICY),
        population=population_table(population, seen.units or 1) if population else None,
    )


def _tiles(seen: Seen) -> list[Tile]:
    """The state of the run in a strip."""
    last = seen.records.metrics[-1] if seen.records.metrics else {}
    tiles = [_heldout(seen.records)] if seen.records.curve or seen.records.evaluation else []
    if not last:
        return tiles
    returns = last["return_by_episode"]
    tiles.append(
        Tile(f"batch of step {last['step']}", signed(returns[-1]), "last episode", css="train")
    )
    tiles.append(Tile("training", duration(last["time_s"]), _left(seen, last)))
    tiles.append(Tile("trials/s", figure(last["trials_per_s"]), "of the last step"))
    if "staleness_mean" in last:
        most = f"max {figure(last['staleness_max'])}"
        tiles.append(Tile("staleness", f"{last['staleness_mean']:.2f}", f"mean, in steps; {most}"))
    if "valid_action_share" in last:
        tiles.append(Tile("valid actions", percent(last["valid_action_share"]), "of the last step"))
    return tiles


def _heldout(records: RunRecords) -> Tile:
    version, score = curve_points(records, "heldout")[-1]
    returns, halves = score["return_by_episode"], score.get("ci95_by_episode")
    return Tile(
        label=f"held-out, episode 1 → {len(returns)}" if len(returns) > 1 else "held-out",
        value=signed(returns[-1]),
        note=f"version {version}",
        interval=f"± {halves[-1]:.2f}" if halves else "",
        css="hero",
        before=signed(returns[0]) if len(returns) > 1 else "",
    )


def _left(seen: Seen, last: Mapping[str, Any]) -> str:
    steps = seen.records.config.learner.steps
    if seen.state != "running" or last["step"] >= steps:
        return f"step {last['step']} of {steps}"
    left = last["time_s"] / max(1, last["step"]) * (steps - last["step"])
    return f"about {duration(left)} left"


def evaluation_page(frame: Frame, records: RunRecords, summary: Mapping[str, Any]) -> Markup:
    """Held-out tasks beside the controls `blind` and `swapped`, by set, family and member.

    Without a final evaluation: the points of the curve.
    """
    has_ended = bool(summary.get("evaluation")) and bool(records.evaluation)
    sets = records.curve[-1]["sets"] if records.curve and not has_ended else {}
    return fill(
        "evaluation.html",
        frame=frame,
        part=adaptation_part(records, summary) if has_ended else None,
        set_names={css: label for label, css in SETS.values()},
        points=[
            (line["version"], [(SETS[name][0], score) for name, score in line["sets"].items()])
            for line in reversed(records.curve)
        ],
        chart=adaptation(sets, {}) if "heldout" in sets else None,
    )
