"""Draw charts of a run: returns and metrics against steps, and returns against the episode."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mage_async.pages.charts import (
    Chart,
    Point,
    Series,
    line_chart,
    short_number,
    small_chart,
    words,
    y_range,
)
from mage_async.results.metrics import explanation_of
from mage_async.results.run_files import Record, RunRecords
from mage_async.results.summary import SETS, weighted_mean

CurvePoint = tuple[int, Mapping[str, Any]]
"""A policy version and the score of an evaluation set."""
CAPTIONS = {
    "heldout": "held-out tasks; dashed: references, last episode",
    "train": "train tasks; faint: the batch of every step",
}
"""Captions of the charts of returns, by evaluation set."""


def learning_curves(records: RunRecords) -> list[tuple[str, Chart | None]]:
    """Return charts of held-out and train returns with their captions, on the same scale."""
    lines = {
        split: [
            *_reference_lines(records, split),
            *(_batches(records) if split == "train" else []),
            *episode_lines(curve_points(records, split), records.config.most_episodes),
        ]
        for split in CAPTIONS
    }
    span = y_range([line for series in lines.values() for line in series])
    charts = []
    for split, caption in CAPTIONS.items():
        alt_text = f"return of each episode against steps, {caption}"
        charts.append((caption, line_chart(lines[split], alt_text=alt_text, y_span=span)))
    return charts


def environment_curves(records: RunRecords) -> list[tuple[str, Chart | None]]:
    """Return one chart of held-out returns for each environment of a mix, each with its own y axis;
    none if the run plays a single environment.
    """
    points, most_episodes = curve_points(records, "heldout"), records.config.most_episodes
    names = points[0][1].get("parts", {}).get("environment", {}) if points else {}
    charts = []
    for name in names:
        own_points = [(version, score["parts"]["environment"][name]) for version, score in points]
        alt_text = f"return of each episode against steps, {name}"
        lines = episode_lines(own_points, most_episodes)
        charts.append((name, line_chart(lines, alt_text=alt_text)))
    return charts


def adaptation(
    evaluation: Mapping[str, Any], references: Mapping[str, Sequence[float]]
) -> Chart | None:
    """Return the chart of returns against the episode, with a line for each set and reference."""
    num_episodes = len(evaluation["heldout"]["return_by_episode"])
    series = [
        Series(label, _numbered(values), "reference")
        for label, values in grouped(references).items()
    ]
    for name, each in reversed(SETS.items()):  # the most important line is drawn last, on top
        if name in evaluation:
            score = evaluation[name]
            points = _numbered(score["return_by_episode"])
            halves = score["ci95_by_episode"]
            series.append(Series(each.label, points, set_css(name), halves, has_dots=True))
    named = [(float(k), f"episode {k}") for k in range(1, num_episodes + 1)]
    return line_chart(series, alt_text="return of each episode, by set", x_names=named)


def curve_points(records: RunRecords, split: str) -> list[CurvePoint]:
    """Return versions and scores of a split over the run; the final evaluation is the last."""
    return points_of(records.curve, records.evaluation, split)


def points_of(curve: Sequence[Record], evaluation: Record, split: str) -> list[CurvePoint]:
    """Return versions and scores of a split: the points of a curve, and the final evaluation as the
    last one.
    """
    points = {line["version"]: line["sets"][split] for line in curve}
    if evaluation:
        points[evaluation["version"]] = evaluation["sets"][split]
    return sorted(points.items())


def set_css(name: str) -> str:
    """Return the CSS class of an evaluation set."""
    return name.removeprefix("heldout_")


def episode_css(episode: int, most_episodes: int) -> str:
    """Return the CSS class of an episode: one of five colours, from the first to the last.

    Args:
        episode: Index of the episode, from 0.
        most_episodes: Number of episodes of the longest trials of the run (`Config.most_episodes`).
            All charts of a page use this number, so that an episode has one colour in all of them.
    """
    return f"e{round(4 * episode / (most_episodes - 1)) if most_episodes > 1 else 4}"


def grouped(references: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Return references by label; references of equal values share a line and a label."""
    names: dict[tuple[float, ...], list[str]] = {}
    for name, values in references.items():
        names.setdefault(tuple(round(value, 6) for value in values), []).append(words(name))
    return {", ".join(same): values for values, same in names.items()}


def _numbered(values: Sequence[float]) -> list[Point]:
    """Return values as points at 1, 2, 3, …"""
    return [(float(number), value) for number, value in enumerate(values, 1)]


def episode_lines(
    points: Sequence[CurvePoint],
    most_episodes: int,
    name: str = "return_by_episode",
    half_widths: str = "ci95_by_episode",
) -> list[Series]:
    """Return a line for each episode.

    Args:
        points: Positions on the x axis, ascending, each with a score.
        most_episodes: See `episode_css`.
        name: Field of a score that is drawn; it has one value for each episode.
        half_widths: Field with the half-widths of these values; "" for none.
    """
    num_episodes = len(points[0][1][name]) if points else 0
    return [
        Series(
            f"episode {episode + 1}",
            [(float(x), score[name][episode]) for x, score in points],
            episode_css(episode, most_episodes),
            [score[half_widths][episode] for _, score in points] if half_widths else (),
            has_dots=True,
        )
        for episode in range(num_episodes)
    ]


def _batches(records: RunRecords) -> list[Series]:
    """Return the noisy returns of each step's batch, as faint lines without labels."""
    num_episodes = len(records.metrics[0]["return_by_episode"]) if records.metrics else 0
    return [
        Series(
            "",
            [(float(line["step"]), line["return_by_episode"][k]) for line in records.metrics],
            f"faint {episode_css(k, records.config.most_episodes)}",
        )
        for k in range(num_episodes)
    ]


def _reference_lines(records: RunRecords, split: str) -> list[Series]:
    """Return the reference returns of the last episode, as horizontal lines over all steps."""
    references = records.evaluation.get("references", {}).get(split, {})
    last = max([1, *(line["step"] for line in records.metrics[-1:])])
    levels = grouped({name: values[-1:] for name, values in references.items()})
    return [
        Series(label, [(0.0, value), (float(last), value)], "reference")
        for label, (value,) in levels.items()
    ]


# Metrics against steps.

THROUGHPUT = (
    *("trials_per_s", "generated_tokens_per_s", "trained_tokens_per_s"),
    *("trial_s", "train_s", "waiting_s", "prefix_hit_rate", "groups_in_flight"),
)
"""Metrics of speed, in the order of their charts."""
POLICY = (
    *("entropy", "loss", "grad_norm", "clipped_share", "mean_weight"),
    *("logprob_gap_mean", "invalid_actions_per_trial", "learning_rate"),
)
"""Metrics of the policy and its training, in the order of their charts."""


@dataclass(frozen=True, slots=True)
class MetricChart:
    """Hold a small chart of one metric, with its meaning and its mean."""

    label: str
    meaning: str
    mean: str
    chart: Chart | None


def staleness(metrics: Sequence[Record], bound: int | None, most_episodes: int) -> Chart | None:
    """Return the chart of staleness: largest, mean, mean by episode, and the bound if there is one.

    `None` if no step was trained.

    Args:
        most_episodes: See `episode_css`.
    """
    steps = [float(line["step"]) for line in metrics]
    if not steps:
        return None
    num_episodes = len(metrics[0]["return_by_episode"])
    ends = steps[0], steps[-1]
    bounds = (
        [] if bound is None else [Series("bound", [(x, float(bound)) for x in ends], "reference")]
    )
    # Maximum and mean borrow the colours of the sets "swapped" and "heldout".
    series = [
        *bounds,
        _metric_line(metrics, "staleness_max", "max", "swapped"),
        *(
            _metric_line(
                metrics,
                f"staleness_mean_episode_{k + 1}",
                f"episode {k + 1}",
                f"thin {episode_css(k, most_episodes)}",
            )
            for k in range(num_episodes)
        ),
        _metric_line(metrics, "staleness_mean", "mean", "heldout"),
    ]
    alt_text = "staleness of the tokens of each step, in steps"
    # The y axis begins a little below 0 and ends above all lines, so that values at 0, at the bound
    # and above it can be seen.
    top = max(1.0, *(y for line in series for _, y in line.finite))
    return line_chart(series, alt_text=alt_text, y_span=(-0.1, top * 1.15 + 0.1))


def metric_charts(records: RunRecords, names: Sequence[str]) -> list[MetricChart]:
    """Return a small chart for each of the metrics that some step recorded."""
    charts = []
    for name in names:
        points = [
            (float(line["step"]), float(line[name])) for line in records.metrics if name in line
        ]
        if points:
            unit, meaning = explanation_of(name)
            # "train_s" is labelled "train time".
            label = words(f"{name.removesuffix('_s')}_time" if unit == "s" else name)
            chart = small_chart(points, alt_text=f"{label}: {meaning}")
            mean = with_unit(name, _mean(records, name))
            charts.append(MetricChart(label, meaning, mean, chart))
    return charts


def with_unit(name: str, value: float) -> str:
    """Return the value of a metric with its unit; without one for numbers, shares and rates."""
    text, unit = short_number(value), explanation_of(name)[0]
    if text == "1" and "/" not in unit and unit != "s":
        unit = unit.removesuffix("s")  # 1 step
    return text if unit in ("", "1", "share", "1/s") else f"{text} {unit}"


def _mean(records: RunRecords, name: str) -> float:
    """Return the mean of a metric over the steps that recorded a finite value; NaN without any."""
    lines = [line for line in records.metrics if math.isfinite(line.get(name, math.nan))]
    if not lines:
        return math.nan
    # Rates are averaged over time, as in the summary; other metrics over steps. All steps train the
    # same number of trials, so the time of a step is proportional to 1 / (its trials/s). The time
    # since the line before would be wrong: a live page has only some steps of a long run.
    is_rate = name.endswith("_per_s")
    weights = [1 / line["trials_per_s"] if is_rate else 1.0 for line in lines]
    return weighted_mean([line[name] for line in lines], weights)


def _metric_line(metrics: Sequence[Record], name: str, label: str, css: str) -> Series:
    """Return a metric of each step as a line."""
    points = [(float(line["step"]), line[name]) for line in metrics if name in line]
    return Series(label, points, css)
