"""Pages of a run in `mage view`, live or ended: its overview, its evaluation, its graph memory."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from mage_async.doctor import Finding
from mage_async.pages.charts import duration, figure, percent, signed, time_bars
from mage_async.pages.curves import (
    POLICY,
    THROUGHPUT,
    adaptation,
    curve_points,
    learning_curves,
    metric_charts,
    staleness,
)
from mage_async.pages.headline import Tile, heldout_tile
from mage_async.pages.report import SET_NAMES, adaptation_part, episode_names, fates_part
from mage_async.pages.tables import population_table
from mage_async.pages.templating import Frame, fill
from mage_async.pages.trial_lists import ListedGroup, ListedTrial, TrialFilter, group_rows
from mage_async.results.return_rows import SETS
from mage_async.results.run_files import RunRecords

MAX_POINTS = 120
"""Steps in a chart; of more steps evenly spaced ones are drawn, so that each can be clicked."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run now."""

    records: RunRecords
    """Records with at most `MAX_POINTS` steps and evaluations."""
    state: str
    step: int
    seconds_by_state: Mapping[str, Mapping[str, float]]
    """Seconds that each process spent in each state."""
    trials: Mapping[str, int]
    """Counts of trials by fate, as the learner last reported them."""
    findings: Sequence[Finding]
    """Findings of the doctor."""
    restarts: Sequence[str]
    """Why processes were started again, the latest first."""
    groups: Sequence[ListedGroup]
    """Groups that no step has trained yet, the newest first."""
    listed: Sequence[ListedTrial]
    """Trials of these groups."""
    units: int | None
    """Units of the environment; `None` if it cannot be loaded here."""


def overview_page(frame: Frame, run: RunState) -> Markup:
    """Return the first page of a run."""
    records = run.records
    config, population = records.config, records.learner.get("population")
    steps, home = [line["step"] for line in records.metrics], frame.home
    curves = [
        (caption, chart and chart.with_links(lambda x: f"{home}step/{x}", "step", steps or [1]))
        for caption, chart in learning_curves(records)
    ]
    return fill(
        "overview.html",
        frame=frame,
        environment=config.environment.name,
        seed=config.seed,
        state=run.state,
        step=run.step,
        steps=config.learner.steps,
        tiles=_tiles(run),
        findings=run.findings,
        restarts=run.restarts,
        curves=curves,
        episode_names=episode_names(config.trial.episodes),
        is_sampled=len(steps) >= MAX_POINTS,
        rows=group_rows(run.groups, run.listed, TrialFilter()),
        time_bars=time_bars(run.seconds_by_state),
        staleness=staleness(records.metrics, config.admission.max_staleness),
        fates=fates_part({**records.learner, "trials": dict(run.trials)}) if run.trials else None,
        throughput=metric_charts(records, THROUGHPUT),
        policy=metric_charts(records, POLICY),
        population=population_table(population, run.units or 1) if population else None,
    )


def _tiles(run: RunState) -> list[Tile]:
    tiles = []
    if points := curve_points(run.records, "heldout"):
        version, score = points[-1]
        tiles.append(heldout_tile(score, f"version {version}"))
    if not run.records.metrics:
        return tiles
    last = run.records.metrics[-1]
    last_return = signed(last["return_by_episode"][-1])
    tiles += [
        Tile(f"batch of step {last['step']}", last_return, "last episode", css="train"),
        Tile("training", duration(last["time_s"]), _progress(run, last)),
        Tile("trials/s", figure(last["trials_per_s"]), "of the last step"),
    ]
    if "staleness_mean" in last:
        most = f"max {figure(last['staleness_max'])}"
        tiles.append(Tile("staleness", f"{last['staleness_mean']:.2f}", f"mean, in steps; {most}"))
    if "valid_action_share" in last:
        tiles.append(Tile("valid actions", percent(last["valid_action_share"]), "of the last step"))
    return tiles


def _progress(run: RunState, last: Mapping[str, Any]) -> str:
    steps = run.records.config.learner.steps
    if run.state != "running" or last["step"] >= steps:
        return f"step {last['step']} of {steps}"
    left = last["time_s"] / max(1, last["step"]) * (steps - last["step"])
    return f"about {duration(left)} left"


def evaluation_page(frame: Frame, records: RunRecords, summary: Mapping[str, Any]) -> Markup:
    """Return the page of the final evaluation with its controls, and of all evaluations so far.

    Without a final evaluation, the page shows the last point of the curve.
    """
    has_ended = bool(summary.get("evaluation")) and bool(records.evaluation)
    sets = records.curve[-1]["sets"] if records.curve and not has_ended else {}
    return fill(
        "evaluation.html",
        frame=frame,
        part=adaptation_part(records, summary) if has_ended else None,
        set_names=SET_NAMES,
        points=[
            (line["version"], [(SETS[name].label, score) for name, score in line["sets"].items()])
            for line in reversed(records.curve)
        ],
        chart=adaptation(sets, {}) if "heldout" in sets else None,
    )


def memory_page(frame: Frame, line: Mapping[str, Any] | None, last: int) -> Markup:
    """Return the page of the graph memory: strategies by kind of task, the most relevant first.

    Args:
        line: the line of the run's `memory.jsonl` with the version to show; `None` if the run has
            no memory.
        last: the newest version.
    """
    rows = line["strategies"] if line else []
    kinds = itertools.groupby(rows, key=lambda row: f"{row['kind']}, seat {row['seat']}")
    return fill(
        "memory.html",
        frame=frame,
        version=line["version"] if line else None,
        last=last,
        kinds=[(kind, list(strategies)) for kind, strategies in kinds],
    )
